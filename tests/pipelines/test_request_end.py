"""A request ends with the pipeline call that opened it, however that ends.

Pipelines differ: some never call `maybe_free_model_hooks`, some loop over the bar without `with`,
and all of them may raise anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import diffusers
import pytest
import tiny
import torch
from torch import Tensor

import dit_graphs
from benchmarks.weights import randomise
from dit_graphs.module_watch import ModuleWatch
from dit_graphs.request_scope import Request, current_request
from dit_graphs.wrapping import runner_of


class Bare(diffusers.DiffusionPipeline):
    """A pipeline of a user's own: no clean-up at the end, the bar used in one of three ways."""

    def __init__(self, unet: diffusers.UNet2DModel, scheduler: object) -> None:
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)

    @torch.no_grad()
    def __call__(self, how: str, at_step: Callable[[int], None], steps: int = 6) -> Tensor:
        image = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        self.scheduler.set_timesteps(steps)
        times = self.scheduler.timesteps
        if how == "for":
            for index, time in enumerate(self.progress_bar(times)):
                image = self._step(image, time, index, at_step)
        elif how == "with":
            with self.progress_bar(total=steps) as bar:
                for index, time in enumerate(times):
                    image = self._step(image, time, index, at_step)
                    bar.update()
        else:
            bar = self.progress_bar(total=steps)
            for index, time in enumerate(times):
                image = self._step(image, time, index, at_step)
                bar.update()
        at_step(steps)
        return image

    def _step(self, image: Tensor, time: Tensor, index: int, at_step: object) -> Tensor:
        at_step(index)  # type: ignore[operator]
        noise = self.unet(image, time).sample
        return self.scheduler.step(noise, time, image).prev_sample


def _bare() -> Bare:
    unet = diffusers.UNet2DModel(
        sample_size=8,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        block_out_channels=(8, 8),
        norm_num_groups=4,
    )
    randomise(unet.eval(), seed=0)
    pipe = Bare(unet, diffusers.DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)
    return dit_graphs.accelerate(pipe, backend="recorded")


WAYS = ("for", "with", "by hand")


@pytest.fixture(params=[True, False], ids=["quiet", "shown"])
def pipe(request: pytest.FixtureRequest) -> Iterator[Bare]:
    made = _bare()
    made.set_progress_bar_config(disable=request.param)
    yield made
    dit_graphs.restore(made)


@pytest.mark.parametrize("how", WAYS)
def test_a_call_without_a_clean_up_ends_its_request(pipe: Bare, how: str) -> None:
    seen: list[Request | None] = []
    results = [pipe(how, lambda step: seen.append(current_request())) for _ in range(2)]
    assert torch.equal(*results)
    assert current_request() is None
    loop = [request for index, request in enumerate(seen) if index % 7 < 6]
    assert None not in loop
    assert len(set(loop)) == 2, "one request per call"
    assert all(request.is_over for request in loop)
    assert pipe.unet is not None
    assert dit_graphs.stats(pipe)["components"]["denoiser"]["replays"] == 9


@pytest.mark.parametrize("where", [2, 6], ids=["in the loop", "after the loop"])
@pytest.mark.parametrize("how", WAYS)
def test_a_call_that_raises_ends_its_request(pipe: Bare, how: str, where: int) -> None:
    """Also while somebody still holds the traceback, and with it every frame and its locals."""
    seen: list[Request | None] = []

    def stop(step: int) -> None:
        seen.append(current_request())
        if step == where:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        pipe(how, stop)
    assert seen[0] is not None
    assert current_request() is None
    assert seen[0].is_over
    assert caught.tb is not None


def test_what_a_request_held_is_let_go_when_the_bar_is(pipe: Bare) -> None:
    pipe("by hand", lambda step: None)
    (entry,) = runner_of(pipe.unet).cache.held()
    assert not any(entry.inputs._bound), "tensors of a call that is over are kept"


def test_a_generation_within_a_generation_leaves_the_outer_one_going(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A callback that upscales, say: the outer loop goes on in its own request afterwards."""
    outer, inner = _bare(), _bare()
    seen: list[Request | None] = []

    def upscale(step: int) -> None:
        if step == 2:
            inner("with", lambda step: None)
        seen.append(current_request())

    outer("with", upscale)
    assert len(set(seen)) == 1 and seen[0] is not None
    checks = []
    note = ModuleWatch._note_checked

    def counted(self: ModuleWatch, request: Request | None, said: int) -> None:
        checks.append(self.module is outer.unet)
        note(self, request, said)

    monkeypatch.setattr(ModuleWatch, "_note_checked", counted)
    outer("with", upscale)
    assert checks.count(True) == 1


def test_a_request_of_the_users_own_outlives_the_calls_in_it(pipe: Bare) -> None:
    with dit_graphs.request() as mine:
        pipe("for", lambda step: None)
        assert current_request() is mine
        with pytest.raises(KeyError):
            pipe("with", lambda step: {}[step])
        assert current_request() is mine
    assert current_request() is None


def test_a_loop_of_the_users_own_around_the_pipelines_bar(pipe: Bare) -> None:
    def loop() -> None:
        with pipe.progress_bar(total=3) as bar, torch.no_grad():
            for step in range(3):
                pipe.unet(torch.randn(1, 3, 8, 8), step)
                assert current_request() is not None
                bar.update()

    loop()
    assert current_request() is None


def test_two_stages_of_one_call_are_two_requests() -> None:
    class Twice(Bare):
        @torch.no_grad()
        def __call__(self, seen: list[Request | None]) -> None:
            image = torch.randn(1, 3, 8, 8)
            for _ in range(2):
                with self.progress_bar(total=2):
                    for step in range(2):
                        self.unet(image, step)
                        seen.append(current_request())

    made = _bare()
    pipe = dit_graphs.accelerate(Twice(made.unet, made.scheduler), backend="recorded")
    seen: list[Request | None] = []
    pipe(seen)
    assert None not in seen and len(set(seen)) == 2
    assert seen[0].is_over and seen[0].total_steps == 2


def test_weights_replaced_after_a_failed_call_are_seen_by_a_bare_call() -> None:
    pipe = tiny.build("wan")
    arguments = tiny.call_kwargs("wan", steps=6)
    call = tiny.denoiser_calls(pipe, arguments)[0]
    dit_graphs.accelerate(pipe, backend="recorded", capture="first_use")

    def stop(pipe: object, step: int, time: object, values: dict[str, object]) -> dict[str, object]:
        if step == 4:
            raise KeyboardInterrupt
        return values

    with pytest.raises(KeyboardInterrupt):
        pipe(**arguments, callback_on_step_end=stop)
    assert current_request() is None
    with torch.no_grad():
        parameter = next(pipe.transformer.parameters())
        parameter.data = parameter.data * 2.0
        got = call()[0]
        with dit_graphs.disabled(pipe):
            expected = call()[0]
    assert torch.equal(got, expected)
