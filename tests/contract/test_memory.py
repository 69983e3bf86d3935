"""Graph memory: budgets, running out, and one pool for all runners of a device.

The CPU recorder has no pool; here the device's answers are replaced by numbers, so that what the
runner does with them is seen on every machine.
"""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where

from dit_graphs.backends.recorded import RecordedRecording
from dit_graphs.memory import DeviceState, HostState, device_state

RECORDED = Where("recorded", torch.device("cpu"))


@pytest.fixture(autouse=True)
def _no_grad() -> object:
    with torch.no_grad():
        yield


class Greedy(nn.Module):
    """Runs out of memory as often as `failures` says."""

    failures = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 4 and Greedy.failures > 0:
            Greedy.failures -= 1
            raise torch.OutOfMemoryError("on purpose")
        return self.linear(x)


def _serve(twin: Twin, size: int = 3, calls: int = 5) -> None:
    for index in range(calls):
        twin(twin.where.randn(size, 8, seed=index))


def test_b31_out_of_memory_releases_the_graphs_and_tries_once_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    twin, other = Twin(Greedy(), RECORDED), Twin(nn.Linear(8, 8), RECORDED)
    _serve(twin)
    _serve(other)
    assert twin.graphs == other.graphs == 1
    Greedy.failures = 1
    with caplog.at_level(logging.WARNING, logger="dit_graphs"):
        result = twin.module(RECORDED.randn(6, 8))
    assert torch.equal(result, twin.plain(RECORDED.randn(6, 8)))
    assert twin.fallbacks["out_of_memory"] == 1
    assert twin.graphs == other.graphs == 0, "all graphs of the device gave their memory back"
    assert any("trying once more" in r.getMessage() for r in caplog.records)
    for each in (twin, other):
        before = each.replays
        _serve(each, calls=4)
        assert each.replays > before, "the hot signature came back"


def test_out_of_memory_without_graphs_is_the_callers() -> None:
    device_state(RECORDED.device).retire()  # other tests' graphs could be released, too
    twin = Twin(Greedy(), RECORDED)
    Greedy.failures = 1
    with pytest.raises(torch.OutOfMemoryError, match="on purpose"):
        twin.module(RECORDED.randn(6, 8))
    assert Greedy.failures == 0, "tried once: there was nothing to release"
    _serve(twin, 6)
    Greedy.failures = 2
    with pytest.raises(torch.OutOfMemoryError, match="on purpose"), _eager_only(twin):
        twin.module(RECORDED.randn(7, 8))
    Greedy.failures = 0
    _serve(twin, 6)


def _eager_only(twin: Twin) -> object:
    return twin.runner.switched_off()


def test_out_of_memory_in_a_replay_gives_the_eager_result(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin(Greedy(), RECORDED)
    _serve(twin)

    def fail(self: RecordedRecording[object]) -> None:
        raise torch.OutOfMemoryError("in the replay")

    with monkeypatch.context() as patch:
        patch.setattr(RecordedRecording, "replay", fail)
        twin(RECORDED.randn(3, 8, seed=20))
    assert twin.fallbacks["out_of_memory"] == 1
    assert twin.graphs == 0
    twin.until_replayed(lambda i: (RECORDED.randn(3, 8, seed=i),), limit=60)


def test_out_of_memory_in_a_compare_gives_the_eager_result(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin(Greedy(), RECORDED)
    _serve(twin, calls=2)

    def fail(self: RecordedRecording[object]) -> None:
        raise torch.OutOfMemoryError("in the compare")

    with monkeypatch.context() as patch:
        patch.setattr(RecordedRecording, "replay", fail)
        twin(RECORDED.randn(3, 8, seed=20))
    assert twin.fallbacks["out_of_memory"] == 1
    twin.until_replayed(lambda i: (RECORDED.randn(3, 8, seed=i),), limit=60)


def test_a_budget_that_one_graph_breaks_is_told_and_not_tried_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(HostState, "pool_bytes", lambda self: 64 << 20)
    twin = Twin(Greedy(), RECORDED, memory_budget=32 << 20)
    with caplog.at_level(logging.WARNING, logger="dit_graphs"):
        _serve(twin, calls=60)
    assert twin.graphs == 0
    assert twin.captures <= 4
    assert twin.fallbacks["memory_budget"] >= 50
    told = [r.getMessage() for r in caplog.records if "memory_budget" in r.getMessage()]
    assert any("64 MiB" in text and "32 MiB" in text for text in told)


def test_over_budget_all_graphs_of_the_device_retire(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Twin(nn.Linear(8, 8), RECORDED)
    _serve(first)
    generation = device_state(RECORDED.device).generation
    with monkeypatch.context() as patch:
        patch.setattr(HostState, "pool_bytes", lambda self: 64 << 20)
        second = Twin(nn.Linear(8, 8), RECORDED, memory_budget=1 << 20)
        _serve(second, calls=2)
    assert device_state(RECORDED.device).generation == generation + 1
    assert first.graphs == 0
    _serve(first)
    assert first.graphs == 1


def test_a_budget_per_component_is_that_components(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostState, "pool_bytes", lambda self: 64 << 20)
    twin = Twin(Greedy(), RECORDED, memory_budget={"vae": 1})
    _serve(twin)
    assert twin.graphs == 1, "a module of its own has no budget here"


def test_one_state_per_device_is_shared_by_all_runners(where: Where) -> None:
    first, second = (Twin(nn.Linear(8, 8), where) for _ in range(2))
    assert first.runner.state is second.runner.state
    assert isinstance(first.runner.state, DeviceState)
    held = [first.runner, second.runner]
    assert all(runner in held[0].state.holders for runner in held)
    second.runner.close()
    assert held[1] not in held[0].state.holders


def test_b36_captures_do_not_let_the_collector_in_and_restore_its_state(graphing: Where) -> None:
    import gc

    state = device_state(graphing.device)
    for enabled in (True, False):
        gc.enable() if enabled else gc.disable()
        try:
            with state.quiet_collector():
                assert not gc.isenabled()
            assert gc.isenabled() is enabled
            with pytest.raises(RuntimeError), state.quiet_collector():
                raise RuntimeError
            assert gc.isenabled() is enabled
        finally:
            gc.enable()
