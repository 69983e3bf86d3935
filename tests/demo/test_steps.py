"""A watched pipeline call is the call everybody makes; a stopped one leaves nothing behind."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import tiny
import torch
from diffusers import DiffusionPipeline
from torch import Tensor

import dit_graphs
from dit_graphs.app.demo.jobs import Stopped
from dit_graphs.app.demo.steps import watch_steps


class Watcher:
    """Notes what it is told; stops where `stop_at` says."""

    def __init__(self, stop_at: Callable[[int], bool] = lambda step: False) -> None:
        self.told: list[str] = []
        self.latents: list[Tensor | None] = []
        self.checks = 0
        self._stop_at = stop_at

    def loop_opened(self, total: int) -> None:
        self.told.append(f"open {total}")

    def step_done(self, latents: Tensor | None) -> None:
        self.latents.append(latents)
        self.told.append("step")

    def loop_closed(self) -> None:
        self.told.append("close")

    def check(self) -> None:
        self.checks += 1
        if self._stop_at(len(self.latents)):
            raise Stopped


@pytest.fixture(scope="module")
def pipe() -> DiffusionPipeline:
    return tiny.build("z-image")


@pytest.mark.parametrize("name", ["z-image", "sdxl", "flux"])
def test_every_step_is_seen_and_the_result_is_the_same(name: str) -> None:
    pipe = tiny.build(name)
    plain = tiny.latents(pipe, tiny.call_kwargs(name))
    watcher = Watcher()
    with watch_steps(pipe, watcher):
        watched = tiny.latents(pipe, tiny.call_kwargs(name))
    assert torch.equal(plain, watched)
    assert watcher.told == ["open 4", *["step"] * 4, "close"]
    assert watcher.checks == 4
    assert all(isinstance(item, Tensor) for item in watcher.latents)


def test_the_last_guess_is_the_result(pipe: DiffusionPipeline) -> None:
    """At the last step sigma is followed by 0: x0 = x_t - sigma * v is what the step returns."""
    watcher = Watcher()
    with watch_steps(pipe, watcher):
        result = tiny.latents(pipe, tiny.call_kwargs("z-image"))
    last = watcher.latents[-1]
    assert last is not None
    torch.testing.assert_close(last, result)
    first = watcher.latents[0]
    assert first is not None
    assert not torch.allclose(first, last)


def test_b69_a_stop_ends_the_call_within_a_step_and_the_next_call_is_equal(
    pipe: DiffusionPipeline,
) -> None:
    arguments = {"num_inference_steps": 50}
    dit_graphs.accelerate(pipe, backend="recorded")
    try:
        watcher = Watcher(lambda done: done >= 5)
        with pytest.raises(Stopped), watch_steps(pipe, watcher):
            pipe(**{**tiny.call_kwargs("z-image"), **arguments})
        assert 5 <= len(watcher.latents) <= 7
        assert "close" not in watcher.told
        again = tiny.latents(pipe, tiny.call_kwargs("z-image"))
    finally:
        dit_graphs.restore(pipe)
    assert torch.equal(again, tiny.latents(pipe, tiny.call_kwargs("z-image")))


def test_a_stopped_call_puts_offloaded_weights_back(
    pipe: DiffusionPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pipelines do it as their last act, which a stopped call never reaches."""
    freed: list[str] = []
    monkeypatch.setattr(pipe, "maybe_free_model_hooks", lambda: freed.append("once"))
    with pytest.raises(Stopped), watch_steps(pipe, Watcher(lambda done: done >= 1)):
        pipe(**tiny.call_kwargs("z-image"))
    assert freed == ["once"]


def test_nothing_is_left_on_the_pipeline(pipe: DiffusionPipeline) -> None:
    before, steps = set(vars(pipe)), set(vars(pipe.scheduler))
    with watch_steps(pipe, Watcher()):
        assert "step" in vars(pipe.scheduler)
        names = inspect.signature(pipe.scheduler.step).parameters
        assert "model_output" in names  # pipelines read it to know which arguments to pass
    assert set(vars(pipe)) == before
    assert set(vars(pipe.scheduler)) == steps


def test_an_accelerated_pipeline_gets_its_own_progress_bar_back(pipe: DiffusionPipeline) -> None:
    dit_graphs.accelerate(pipe, backend="recorded")
    try:
        override = vars(pipe)["progress_bar"]
        with watch_steps(pipe, Watcher()):
            pass
        assert vars(pipe)["progress_bar"] is override
    finally:
        dit_graphs.restore(pipe)
