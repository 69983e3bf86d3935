"""One module in several threads' hands: what one thread lets go, another is not left with.

Pipelines that share a transformer share its runner, and all pipelines of a device share its pool.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where

import dit_graphs
from dit_graphs import Reason, eager_on_graph
from dit_graphs.cache import Entry
from dit_graphs.memory import device_state
from dit_graphs.pipelines.families.patches import replacing
from dit_graphs.signature import Signature
from dit_graphs.wrapping import runner_of


def test_a_graph_that_went_while_its_call_waited_is_not_replayed(where: Where) -> None:
    twin = Twin(nn.Linear(8, 8), where)
    twin.until_replayed(lambda index: (where.randn(3, 8, seed=index),))
    state, x = device_state(where.device), where.randn(3, 8, seed=30)

    def call() -> Tensor:
        with torch.no_grad():
            return twin.module(x)

    with ThreadPoolExecutor(1) as pool:
        with state.replay_lock:  # another pipeline's replay, which then runs out of memory
            done = pool.submit(call)
            time.sleep(0.3)
            assert not done.done()
            state.retire()
        result = done.result(timeout=60)
    assert torch.equal(result, twin.plain(x))
    assert twin.fallbacks["state_changed"] == 1
    twin.until_replayed(lambda index: (where.randn(3, 8, seed=index),))


@pytest.mark.parametrize("verify", [True, False])
def test_a_graph_that_goes_right_after_its_capture_is_captured_again(
    where: Where, verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = Twin(nn.Linear(8, 8), where, verify=verify)
    real, left = twin.runner._keep_budget, [1]

    def keep(entry: Entry) -> None:
        real(entry)
        if left[0]:
            left[0] -= 1
            device_state(where.device).retire()  # another thread, short of memory

    monkeypatch.setattr(twin.runner, "_keep_budget", keep)
    for index in range(12):
        twin(where.randn(3, 8, seed=index))
    assert left == [0]
    assert twin.replays > 0


def test_a_report_leaves_out_what_goes_meanwhile(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = Twin(nn.Linear(8, 8), where)
    for size in (2, 3):
        twin.until_replayed(lambda index, size=size: (where.randn(size, 8, seed=index),))
    assert len(twin.runner.report()["graphs"]) == 2
    real = twin.runner.describe

    def describe(signature: Signature) -> str:
        twin.runner.drop_graphs()
        return real(signature)

    monkeypatch.setattr(twin.runner, "describe", describe)
    assert len(twin.runner.report()["graphs"]) == 1


_retires = threading.Event()


@eager_on_graph
def _short_of_memory(x: Tensor) -> Tensor:
    if _retires.is_set():
        device_state(x.device).retire()  # as a call of another runner in here does
    return x + 1


class Nested(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _short_of_memory(x.sin()).cos()


def test_graphs_that_are_retired_inside_a_replay_serve_it_to_the_end(breaking: Where) -> None:
    for verify in (True, "always"):
        twin = Twin(Nested(), breaking, verify=verify)
        for index in range(4):
            twin(breaking.randn(3, 8, seed=index))
        assert twin.graphs == 1
        _retires.set()
        try:
            twin(breaking.randn(3, 8, seed=9))
        finally:
            _retires.clear()
        assert twin.graphs == 0


class Reader(nn.Module):
    """Its child reads the device, so that observed passes put something on the child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = _Child()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        meeting = Reader.meeting
        if meeting is not None:
            meeting()
        return self.linear(self.child(x))

    meeting = None


class _Child(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 if x.sum().item() > 0 else 2.0)


def test_two_threads_do_not_observe_one_module_at_once(segmenting: Where) -> None:
    module = Reader().to(segmenting.device)
    plain = Reader().to(segmenting.device)
    plain.load_state_dict(module.state_dict())
    dit_graphs.wrap(module, backend=segmenting.backend)
    both, first_left = threading.Barrier(2, timeout=30), threading.Event()
    order = iter(range(100))

    def meeting() -> None:
        place = next(order)
        if place > 1:
            return
        both.wait()
        if place == 1:  # whoever came first leaves first
            assert first_left.wait(timeout=30)

    def call() -> tuple[Tensor, Tensor]:
        x = segmenting.randn(3, 8, seed=5)
        with torch.no_grad():
            result = module(x)
        first_left.set()
        return result, x

    module(segmenting.randn(3, 8))
    module(segmenting.randn(3, 8, seed=1))  # finds the child's read
    Reader.meeting = staticmethod(meeting)
    try:
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(call) for _ in range(2)]
            results = [done.result(timeout=60) for done in calls]
    finally:
        Reader.meeting = None
    for result, x in results:
        assert torch.equal(result, plain(x))
    assert "_compiled_call_impl" not in vars(module.child)
    for index in range(40):
        x = segmenting.randn(3, 8, seed=index)
        assert torch.equal(module(x), plain(x))
    stats = runner_of(module).stats
    assert Reason.COMPILED not in stats.fallbacks
    assert stats.replays > 0


class _Greeter(nn.Module):
    def greet(self) -> str:
        return "own"


def test_what_a_recording_replaces_is_replaced_for_its_own_thread() -> None:
    module = _Greeter()
    with (
        replacing([module], "greet", lambda _, own: lambda: f"not {own()}"),
        ThreadPoolExecutor(1) as pool,
    ):
        assert module.greet() == "not own"
        assert pool.submit(module.greet).result(timeout=30) == "own"
    assert "greet" not in vars(module)
