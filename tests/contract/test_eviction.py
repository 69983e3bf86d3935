"""How many graphs are kept, which one goes, and that its going harms no other."""

from __future__ import annotations

import gc
import logging
import random
import weakref

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where

import dit_graphs


class Shares(nn.Module):
    """Every size reads the same memoised table, which the module itself then forgets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(1, 2, 8, device=x.device)
        return self.linear(x) * self.table


def _round_robin(twin: Twin, sizes: range, rounds: int) -> None:
    for index in range(rounds):
        for size in sizes:
            with dit_graphs.request(total_steps=4):
                for step in range(4):
                    twin(twin.where.randn(size, 8, seed=100 * index + 10 * size + step))


def test_twenty_sizes_over_four_graphs_do_not_thrash(
    where: Where, caplog: pytest.LogCaptureFixture
) -> None:
    twin = Twin(Shares(), where, max_graphs=4)
    with caplog.at_level(logging.WARNING, logger="dit_graphs"):
        _round_robin(twin, range(1, 21), 5)
    assert twin.graphs == 4
    assert twin.captures <= 24
    told = [r.getMessage() for r in caplog.records if "max_graphs" in r.getMessage()]
    assert len(told) == 1, "one warning, naming the field to raise"
    assert "MiB" in told[0]
    assert twin.fallbacks["max_graphs"] >= 200


@pytest.mark.parametrize("seed", range(2))
def test_b46_sizes_and_batches_in_any_order(where: Where, seed: int) -> None:
    """Six sizes times three batches, in disorder, over three graphs: no call is ever wrong."""
    twin = Twin(Shares(), where, max_graphs=3)
    chance = random.Random(seed)
    for number in range(60):
        batch, size = chance.choice((1, 2, 4)), chance.choice((3, 4, 5, 6, 7, 9))
        twin(where.randn(batch, size, 8, seed=number))
    assert twin.graphs == 3
    assert set(twin.fallbacks) <= {"warming_up", "max_graphs"}


def test_a_size_that_becomes_common_pushes_out_one_that_is_not(where: Where) -> None:
    twin = Twin(Shares(), where, max_graphs=2)
    _round_robin(twin, range(1, 3), 2)
    for _ in range(8):
        _round_robin(twin, range(5, 6), 1)
    assert twin.runner.stats.evictions == 1
    assert twin.graphs == 2
    before = twin.replays
    _round_robin(twin, range(5, 6), 1)
    assert twin.replays == before + 4


def test_the_graphs_that_stay_read_nothing_that_went(where: Where) -> None:
    twin = Twin(Shares(), where, max_graphs=8)
    _round_robin(twin, range(1, 5), 2)
    held = twin.runner.cache.held()
    assert len(held) == 4
    twin.runner._evict(held[0])
    gc.collect()
    junk = [torch.full((n, 8), float("nan"), device=where.device) for n in range(1, 9)]
    _round_robin(twin, range(2, 5), 1)
    assert twin.runner.stats.evictions == 1
    del junk


def test_what_a_graph_reads_outlives_the_module_that_forgot_it(graphing: Where) -> None:
    """The model's one-slot cache drops its table while a graph still reads it."""
    twin = Twin(Shares(), graphing)
    twin.until_replayed(lambda i: (graphing.randn(3, 8, seed=i),))
    table = twin.module.table
    assert table is not None
    kept = weakref.ref(table.untyped_storage())
    entry = twin.runner.cache.held()[0]
    assert entry.recording is not None
    twin.module.table = None
    del table
    junk = [torch.full((8,), float("nan"), device=graphing.device) for _ in range(8)]
    x = graphing.randn(3, 8, seed=40)
    assert entry.inputs is not None
    entry.inputs.bind([x])
    entry.recording.replay()
    expected = twin.plain(x)
    assert torch.equal(entry.hand_out(), expected)
    del junk, kept


def test_a_parameter_moved_by_data_is_not_followed(graphing: Where) -> None:
    """`p.data = new` frees the old storage if only the Parameter object is held."""
    twin = Twin(nn.Linear(8, 8), graphing)
    twin.until_replayed(lambda i: (graphing.randn(3, 8, seed=i),))
    for module in (twin.module, twin.plain):
        module.weight.data = torch.ones(8, 8, device=graphing.device)
    junk = [torch.full((8, 8), float("nan"), device=graphing.device) for _ in range(8)]
    twin(graphing.randn(3, 8, seed=20))
    assert twin.runner.stats.invalidations == 1
    del junk


def test_a_budget_below_one_graph_keeps_none(pooled: Where) -> None:
    twin = Twin(Shares(), pooled, memory_budget=0)
    for index in range(6):
        twin(pooled.randn(3, 8, seed=index))
    assert twin.graphs == 0
    assert "memory_budget" in twin.fallbacks


def test_b34_unwrap_releases_everything(where: Where) -> None:
    module = Shares().to(where.device)
    dit_graphs.wrap(module, backend=where.backend)
    for index in range(5):
        module(where.randn(3, 8, seed=index))
    from dit_graphs.wrapping import runner_of

    runner = runner_of(module)
    entry = runner.cache.held()[0]
    buffers = [weakref.ref(tensor) for tensor in entry.inputs.buffers]
    recording = weakref.ref(entry.recording)
    del entry, runner
    dit_graphs.unwrap(module)
    gc.collect()
    assert recording() is None
    assert all(ref() is None for ref in buffers)


def test_callers_tensors_are_let_go_at_the_end_of_a_request(where: Where) -> None:
    twin = Twin(Shares(), where)
    with dit_graphs.request():
        for index in range(6):
            x = where.randn(3, 8, seed=index)
            last = weakref.ref(x)
            twin.module(x)
        del x
    gc.collect()
    assert last() is None
    x = where.randn(3, 8, seed=9)
    last = weakref.ref(x)
    twin.module(x)
    del x
    gc.collect()
    assert last() is None, "outside a request a call holds nothing afterwards"
