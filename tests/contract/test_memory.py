"""Graph memory: budgets, running out, and one pool for all runners of a device.

The CPU recorder has no pool; here the device's answers are replaced by numbers, so that what the
runner does with them is seen on every machine.
"""

from __future__ import annotations

import logging

import pytest
import tiny
import torch
from torch import Tensor, nn
from twin import Twin, Where

import dit_graphs
from dit_graphs import GraphConfig
from dit_graphs.backends.recorded import RecordedRecording
from dit_graphs.memory import DeviceState, HostState, device_state
from dit_graphs.wrapping import runner_of

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


def test_the_second_try_draws_what_the_first_one_would_have_drawn() -> None:
    """Plain eager would not have run out of memory, so it would have drawn once."""

    class Draws(nn.Module):
        failures = 0

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand_like(x)
            if Draws.failures:
                Draws.failures -= 1
                raise torch.OutOfMemoryError("on purpose")
            return self.linear(x + noise)

    twin = Twin(Draws(), RECORDED)
    _serve(twin)
    state = torch.get_rng_state()
    expected = twin.plain(RECORDED.randn(6, 8)), torch.rand(1)
    torch.set_rng_state(state)
    Draws.failures = 1
    found = twin.module(RECORDED.randn(6, 8)), torch.rand(1)
    assert twin.fallbacks["out_of_memory"] == 1
    assert all(map(torch.equal, found, expected))


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


def _alone(config: GraphConfig) -> Twin:
    """A module accelerated on its own counts as a denoiser."""
    twin = Twin(Greedy(), RECORDED)
    dit_graphs.unwrap(twin.module)
    dit_graphs.accelerate(twin.module, config)
    return twin


def test_a_budget_per_component_counts_what_that_component_holds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pool is everybody's: the other parts' graphs are not this one's to answer for."""
    monkeypatch.setattr(HostState, "pool_bytes", lambda self: 64 << 20)
    generous = _alone(GraphConfig(backend="recorded", memory_budget={"denoiser": 1 << 20}))
    _serve(generous)
    assert generous.graphs == 1 and generous.runner.graph_bytes() < 1 << 20
    other = _alone(GraphConfig(backend="recorded", memory_budget={"vae": 1}))
    _serve(other)
    assert other.graphs == 1, "a budget of another component is none"
    with caplog.at_level(logging.WARNING, logger="dit_graphs"):
        tight = _alone(GraphConfig(backend="recorded", memory_budget={"denoiser": 1}))
        _serve(tight, calls=40)
    assert tight.graphs == 0
    assert tight.fallbacks["memory_budget"] >= 30
    assert generous.graphs == other.graphs == 1, "nobody else's graphs went"
    told = [r.getMessage() for r in caplog.records if "memory_budget" in r.getMessage()]
    assert len(told) == 1 and "MiB is over" in told[0]


def test_over_its_own_budget_the_colder_graph_goes() -> None:
    probe = _alone(GraphConfig(backend="recorded"))
    _serve(probe, 4)
    size = probe.runner.graph_bytes()
    twin = _alone(GraphConfig(backend="recorded", memory_budget={"denoiser": int(1.5 * size)}))
    _serve(twin, 3)
    assert twin.graphs == 1
    _serve(twin, 4, calls=8)
    assert twin.runner.cache.held()[0].signature.tensors[0].shape[0] == 3, "no reason to change"
    _serve(twin, 4, calls=60)
    (held,) = twin.runner.cache.held()
    assert held.signature.tensors[0].shape[0] == 4
    assert twin.runner.stats.evictions == 1


def test_the_methods_of_one_component_share_its_budget() -> None:
    pipe = tiny.build("sdxl")
    dit_graphs.accelerate(pipe, backend="recorded", memory_budget={"vae": 1, "denoiser": 1 << 30})
    for seed in range(4):
        arguments = tiny.call_kwargs("sdxl", size=32, steps=4, seed=seed)
        pipe(**{**arguments, "output_type": "pt"})
    parts = dit_graphs.stats(pipe)["components"]
    assert parts["denoiser"]["replays"] > 0
    assert parts["vae"]["graphs"] == [] and parts["vae"]["fallbacks"]["memory_budget"] > 0
    decode, encode = runner_of(pipe.vae, "decode"), runner_of(pipe.vae, "encode")
    assert decode.component_bytes() == encode.component_bytes()
    assert runner_of(pipe.unet).component_bytes() == runner_of(pipe.unet).graph_bytes() > 0


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
