"""What a look at a module must not miss, although the call it belongs to had begun before."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where

import dit_graphs
from dit_graphs.calls import Call
from dit_graphs.errors import Reason
from dit_graphs.glance import Glance
from dit_graphs.module_watch import ModuleWatch
from dit_graphs.request_scope import begin_request, end_request


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class Stretched(Scaled):
    """A longer input makes its table anew, with other values at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(6.0) / 6, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.table):
            self.table = torch.arange(float(len(x)), device=x.device) / len(x)
        return super().forward(x) + self.table[: len(x), None]


@pytest.fixture(autouse=True)
def _no_request_is_left() -> Iterator[None]:
    yield
    end_request()


def _generation(twin: Twin, where: Where, *rows: int, seed: int = 0) -> None:
    """As a pipeline without callbacks has it: between its calls nobody looks."""
    started = begin_request(len(rows))
    for step, size in enumerate(rows):
        twin(where.randn(size, 8, seed=100 * seed + step))
    end_request(started)


def test_what_a_quiet_pass_changed_counts_within_its_request(graphing: Where) -> None:
    """Passes that changed nothing so far are not looked at; the replay after one is."""
    twin = Twin(Stretched(), graphing)
    for rows in (6, 5, 4, 3, 2):
        _generation(twin, graphing, *[rows] * 6, seed=rows)
    before = twin.replays
    _generation(twin, graphing, 6, 6, 9, 6, 6, 9, 9, 9, 6, 6, seed=7)
    assert twin.replays > before


def test_what_a_quiet_pass_changed_is_not_captured_at_once(graphing: Where) -> None:
    """A graph under the module's old state would be in vain."""
    twin = Twin(Stretched(), graphing)
    for rows in (6, 5, 4, 3, 2):
        _generation(twin, graphing, *[rows] * 6, seed=rows)
    captures = twin.captures
    for rows in (1, 9):
        begin_request(8)
        twin(graphing.randn(6, 8))  # looked at, and so the request is
        twin(graphing.randn(rows, 8))
        assert twin.captures == captures + 1, "only where its plain pass changed nothing"


def test_what_a_size_that_nobody_warmed_up_changed_counts_within_its_request(
    graphing: Where,
) -> None:
    twin = Twin(Stretched(), graphing, capture="warmup_only")
    with twin.runner.warming_up():
        twin.until_replayed(lambda index: (graphing.randn(6, 8, seed=index),))
    before = twin.replays
    _generation(twin, graphing, 6, 6, 9, 6, 6)
    assert twin.replays == before + 2, "the graph was of the old table"


def test_a_look_is_not_told_by_another_threads_that_all_is_well(
    graphing: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attribute is turned before both calls. What the second one finds, and looks at from then
    on, is not what the first one was signed for."""
    twin = Twin(Scaled(), graphing)
    for seed in range(6):
        with dit_graphs.request(total_steps=1):
            twin(graphing.randn(3, 8, seed=seed))
    assert twin.replays
    twin.module.scale = twin.plain.scale = 2.0
    x, is_outdated = graphing.randn(3, 8, seed=50), twin.runner._is_outdated
    others: list[bool] = []

    def other() -> bool:
        with torch.no_grad(), dit_graphs.request(total_steps=1):
            return torch.equal(twin.module(x), twin.plain(x))  # type: ignore[arg-type]

    def late(call: Call) -> bool:
        if not others:
            others.append(False)
            with ThreadPoolExecutor(1) as pool:
                others[0] = pool.submit(other).result(timeout=60)
        return is_outdated(call)

    monkeypatch.setattr(twin.runner, "_is_outdated", late)
    with dit_graphs.request(total_steps=1):
        twin(x)
    assert others == [True]


def test_a_call_that_sees_what_a_pass_left_has_heard_that_weights_moved(
    graphing: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread's call, in the moment in which a pass that made the table anew is told of."""
    twin = Twin(Stretched(), graphing)
    _generation(twin, graphing, *[6] * 6)
    assert twin.replays
    short, long = graphing.randn(6, 8, seed=50), graphing.randn(9, 8, seed=51)
    twin.plain(long)
    adopt, others = ModuleWatch._adopt, []

    def other() -> bool:
        with torch.no_grad(), dit_graphs.request(total_steps=1):
            return torch.equal(twin.module(short), twin.plain(short))

    def adopted(self: ModuleWatch, *state: object) -> None:
        adopt(self, *state)  # type: ignore[arg-type]
        if len(twin.module.table) == 9 and not others:
            others.append(False)
            with ThreadPoolExecutor(1) as pool:
                others[0] = pool.submit(other).result(timeout=60)

    monkeypatch.setattr(ModuleWatch, "_adopt", adopted)
    twin.runner._watch.expect_changes()  # passes are looked at
    with dit_graphs.request(total_steps=1):
        assert torch.equal(twin.module(long), twin.plain(long))
    assert others == [True]


@pytest.mark.parametrize("is_told_before", [False, True])
def test_what_is_said_during_a_look_is_not_forgotten_after_it(
    graphing: Where, monkeypatch: pytest.MonkeyPatch, is_told_before: bool
) -> None:
    """By another thread, right after the look: the next call of this request heeds it."""
    twin = Twin(Scaled(), graphing)
    for seed in range(4):
        _generation(twin, graphing, 3, 3, 3, seed=seed)
    look, turned = Glance.is_exactly_same, []

    def looked(self: Glance) -> bool:
        is_same = look(self)
        if not turned:
            turned.append(True)
            twin.module.scale = 2.0
            twin.runner.mark_changed()
        return is_same

    if is_told_before:
        twin.runner.mark_changed()
    monkeypatch.setattr(Glance, "is_exactly_same", looked)
    begin_request(4)
    first = graphing.randn(3, 8, seed=50)
    twin.module(first)  # began before the change: either value is right
    assert turned
    twin.plain.scale = 2.0
    for seed in range(3):
        twin(graphing.randn(3, 8, seed=60 + seed))


def test_a_module_is_looked_at_after_a_call_that_it_may_have_refused(graphing: Where) -> None:
    """Weights put elsewhere by hand: the arguments that go with them fit no graph of before."""
    module = Scaled().to(graphing.device)
    dit_graphs.wrap(module, backend=graphing.backend)
    x = graphing.randn(3, 8)
    for _ in range(6):
        module(x)
    for name, weight in list(module.linear.named_parameters()):
        setattr(module.linear, name, nn.Parameter(weight.detach().to("meta")))
    for _ in range(3):
        assert module(x.to("meta")).is_meta
    runner = dit_graphs.wrapping.runner_of(module)
    assert runner is not None and runner.stats.fallbacks[Reason.OFFLOAD] == 2


def test_a_block_that_another_thread_takes_back_is_none_for_a_call_that_has_found_it(
    graphing: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = Twin(Scaled(), graphing)
    _generation(twin, graphing, 3, 3, 3, 3)
    (entry,) = twin.runner.cache.held()
    twin.runner._settle_release(entry)
    entry.block(Reason.HOST_READ, "for a test")
    is_outdated, taken_back = twin.runner._is_outdated, []

    def late(call: Call) -> bool:
        if not taken_back:
            taken_back.append(entry.state)
            entry.unblock()
        return is_outdated(call)

    monkeypatch.setattr(twin.runner, "_is_outdated", late)
    before = twin.replays
    _generation(twin, graphing, 3, 3, 3, 3, seed=1)
    assert taken_back and twin.replays > before
    assert not twin.runner.stats.fallbacks[Reason.HOST_READ]
