"""Calls of a request that nobody looks up: what they must not hide, and what they must bear."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where

import dit_graphs
from dit_graphs.cache import Entry, StructurePlan
from dit_graphs.errors import Reason
from dit_graphs.pauses import Pauses
from dit_graphs.request_scope import Request
from dit_graphs.signature import sign
from dit_graphs.watch import BreakPolicy


class Plain(nn.Module):
    """Two arguments, of which the second may be anything."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = 1.0

    def forward(self, x: Tensor, extra: object = None) -> Tensor:
        if isinstance(extra, dict):
            extra.pop("once", None)
        return self.linear(x) * self.scale


def _warmed(where: Where, *args: object, **overrides: object) -> Twin:
    """One signature has a graph; no other one will ever have."""
    twin = Twin(Plain(), where, capture="warmup_only", **overrides)
    with twin.runner.warming_up():
        twin.until_replayed(lambda index: (where.randn(3, 8, seed=index), *args))
    return twin


Call = Callable[[Twin, Where, int], object]


def _in_autocast(twin: Twin, where: Where, seed: int) -> None:
    with torch.autocast(where.device.type, torch.bfloat16):
        twin(where.randn(3, 8, seed=seed))


def _transposed(twin: Twin, where: Where, seed: int) -> None:
    twin(where.randn(8, 3, seed=seed).t())


def _unaligned(twin: Twin, where: Where, seed: int) -> None:
    twin(where.randn(25, seed=seed)[1:].view(3, 8))


def _in_double(twin: Twin, where: Where, seed: int) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        twin(where.randn(3, 8, seed=seed).float())
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("other", [_in_autocast, _transposed, _unaligned, _in_double])
def test_a_call_that_looks_like_one_with_a_graph_does_not_hide_it(
    graphing: Where, other: Call
) -> None:
    twin = _warmed(graphing)
    before = twin.replays
    with dit_graphs.request():
        for index in range(5):
            other(twin, graphing, index)
            twin(graphing.randn(3, 8, seed=index))
    assert twin.replays == before + 5
    assert twin.runner.stats.fallbacks[Reason.WARMUP_ONLY] == 5


def test_a_key_of_the_users_tells_calls_apart_that_look_alike(where: Where) -> None:
    branch = ["main"]
    twin = _warmed(where, key=lambda: branch[0])
    before = twin.replays
    with dit_graphs.request():
        for index in range(5):
            for branch[0] in ("side", "main"):
                twin(where.randn(3, 8, seed=index))
    assert twin.replays == before + 5


def test_a_state_whose_graph_is_kept_is_not_hidden_by_another_one(graphing: Where) -> None:
    twin = _warmed(graphing)
    before = twin.replays
    with dit_graphs.request():
        for index in range(4):
            for scale in (2.0, 1.0):
                for module in (twin.module, twin.plain):
                    module.scale = scale
                twin.runner.mark_changed()
                for seed in range(2):
                    twin(graphing.randn(3, 8, seed=9 * index + seed))
    assert twin.replays == before + 8


def test_settings_that_another_call_of_the_request_had_are_looked_up(
    graphing: Where,
) -> None:
    """No graph is known yet: what was put off under one setting is learned under another."""
    twin = Twin(Plain(), graphing)
    x = graphing.randn(3, 8)
    with dit_graphs.request():
        for _ in range(2):
            _in_autocast(twin, graphing, 0)
        (entry,) = twin.runner.cache.entries.values()
        twin.runner._settle_release(entry)
        entry.block(Reason.HOST_READ, "for a test")
        for _ in range(3):
            _in_autocast(twin, graphing, 0)
        for _ in range(5):
            twin(x)
    assert twin.replays > 0 and twin.runner.stats.fallbacks[Reason.HOST_READ] == 3


def test_weights_that_another_call_finds_exchanged_give_a_new_chance(graphing: Where) -> None:
    twin = Twin(Plain(), graphing)
    with dit_graphs.request():
        for seed in range(5):
            twin(graphing.randn(3, 8, seed=seed))
            twin(graphing.randn(4, 8, seed=seed))
        entry = twin.runner.cache.held()[0]
        twin.runner._settle_release(entry)
        entry.block(Reason.HOST_READ, "for a test")
        for seed in range(2):
            twin(graphing.randn(3, 8, seed=seed))
        for module in (twin.module, twin.plain):
            torch.manual_seed(7)
            module.linear = nn.Linear(8, 8).to(graphing.device)
        twin(graphing.randn(4, 8))
        before = twin.replays
        for seed in range(6):
            twin(graphing.randn(3, 8, seed=seed))
    assert twin.replays > before and twin.runner.stats.fallbacks[Reason.HOST_READ] == 2


def test_what_a_call_emptied_is_not_what_was_put_off(where: Where) -> None:
    """A glimpse at a dict after the forward took something out would be of another call."""
    twin = Twin(Plain(), where)
    runner = twin.runner
    with dit_graphs.request(total_steps=20) as request:
        for index in range(4):
            twin(where.randn(3, 8, seed=index), {"once": 1})
        entry = next(iter(runner.cache.entries.values()))
        emptied: dict[str, object] = {}
        call, _ = runner._look_up(request, (where.randn(3, 8), {"once": 1}), {})
        call.arguments["extra"].pop("once")  # type: ignore[index]
        runner._pause(entry, call, 10, (Reason.NOT_ADMITTED, ""))
        given = where.randn(3, 8), emptied
        assert runner._pauses.find(request, given, {}, runner._setting) is None


def _paused(*calls: tuple[object, ...]) -> tuple[Pauses, Request]:
    pauses, request = Pauses(), Request(9)
    for args in calls:
        entry = Entry(sign("call", None, None, []), StructurePlan(BreakPolicy()))
        pauses.add(request, (args, {}), entry, (Reason.NOT_ADMITTED, ""), 5, None)
    return pauses, request


def test_calls_too_large_for_a_glimpse_are_not_all_one() -> None:
    pauses, request = _paused((object(),))
    assert pauses.find(request, (object(),), {}, lambda: None) is None


def test_how_values_are_grouped_is_seen() -> None:
    pauses, request = _paused(([1, 2], []))
    assert pauses.find(request, ([1, 2], []), {}, lambda: None) is not None
    for other in (([1], [2]), ([], [1, 2]), ((1, 2), [])):
        assert pauses.find(request, other, {}, lambda: None) is None


def test_a_request_of_ever_new_calls_keeps_few_pauses() -> None:
    pauses, request = _paused(*((number,) for number in range(80)))
    found = [pauses.find(request, (n,), {}, lambda: None) is not None for n in range(80)]
    assert found == [True] * 64 + [False] * 16


def _holding_itself() -> list[object]:
    held: list[object] = []
    held.append(held)
    return held


def _deep() -> list[object]:
    held: list[object] = []
    for _ in range(5000):
        held = [held]
    return held


_ODD: dict[str, Callable[[], object]] = {
    "slice": lambda: slice(0, 3),
    "nested tensor": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "list that holds itself": _holding_itself,
    "deep list": _deep,
    "tensor as key": lambda: {torch.zeros(2): 1},
}


@pytest.mark.filterwarnings("ignore:.*prototype stage")
@pytest.mark.parametrize("kind", _ODD)
@pytest.mark.parametrize("capture", ["second_use", "warmup_only"])
def test_odd_arguments_reach_the_forward(where: Where, kind: str, capture: str) -> None:
    module = Plain().to(where.device)
    dit_graphs.wrap(module, backend=where.backend, capture=capture)
    x = where.randn(3, 8)
    expected = torch.nn.functional.linear(x, module.linear.weight, module.linear.bias)
    for total in (None, 8):
        with dit_graphs.request(total_steps=total):
            for extra in (None, None, _ODD[kind](), _ODD[kind](), None):
                assert torch.equal(module(x, extra), expected)
    assert torch.equal(module(x, _ODD[kind]()), expected)


def test_an_object_of_the_callers_in_a_container_is_not_looked_at_after_the_call(
    graphing: Where,
) -> None:
    """The plain pass of a further size put something unknown into its dict."""

    class Noting(nn.Module):
        def forward(self, x: Tensor, notes: dict[str, object]) -> Tensor:
            if len(x) > 8:
                notes["size"] = pytest
            return x * 2.0

    twin = Twin(Noting(), graphing)
    for rows in (3, 4, 9, 10):
        with dit_graphs.request(total_steps=6):
            for seed in range(6):
                twin.module(graphing.randn(rows, 8, seed=seed), {})
    assert twin.replays > 0


def test_a_huge_argument_costs_a_glimpse_nothing(where: Where) -> None:
    twin = Twin(Plain(), where, capture="warmup_only")
    huge = [[[None] * 40 for _ in range(40)] for _ in range(45)]
    x, pauses = where.randn(3, 8), twin.runner._pauses
    with dit_graphs.request() as request:
        twin(x)
        started = time.perf_counter()
        for _ in range(10):
            assert pauses.find(request, (x, huge), {}, lambda: None) is None
        assert (time.perf_counter() - started) / 10 < 1e-3


def test_a_module_that_was_put_off_goes_at_once(where: Where) -> None:
    """In the middle of its request, and without the collector."""
    module = Plain().to(where.device)
    dit_graphs.wrap(module, backend=where.backend, capture="warmup_only")
    gc.collect()
    gc.disable()
    try:
        with dit_graphs.request():
            for seed in range(3):
                module(where.randn(3, 8, seed=seed))
            weights = weakref.ref(module.linear.weight)
            dit_graphs.unwrap(module)
            del module
            assert weights() is None
    finally:
        gc.enable()


def test_a_pause_of_zero_is_none_of_minus_zero(where: Where) -> None:
    twin = Twin(Plain(), where, capture="warmup_only")
    with twin.runner.warming_up():
        twin.until_replayed(lambda index: (where.randn(3, 8, seed=index), -0.0))
    before = twin.replays
    with dit_graphs.request():
        for index in range(3):
            for extra in (0.0, -0.0, complex(0.0, 0.0)):
                twin(where.randn(3, 8, seed=index), extra)
    assert twin.replays == before + 3
