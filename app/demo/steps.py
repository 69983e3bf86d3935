"""Owns the view of one pipeline call from outside: its stages, its steps, and the way to end it.

Must never pass an argument to the pipeline or hook a module: hooks are a reason to run eagerly, and
the watched call must be the call everybody makes. The surprising fact: two methods are enough.
Every pipeline opens `progress_bar` for its loop and calls `scheduler.step` once per step.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, cast

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

__all__ = ["StepWatcher", "watch_steps"]

_MAX_AHEAD = 1


class StepWatcher(Protocol):
    """Told what a pipeline call does; any of its methods may raise to end the call."""

    def loop_opened(self, total: int) -> None:
        """The text is encoded, `total` denoising steps follow."""

    def step_done(self, latents: Tensor | None) -> None:
        """One step is over; `latents` is the best guess of the finished latents, where known."""

    def loop_closed(self) -> None:
        """Denoising is over, decoding follows."""

    def check(self) -> None:
        """Called in the middle of a step."""


@contextmanager
def watch_steps(pipe: DiffusionPipeline, watcher: StepWatcher) -> Iterator[None]:
    """Calls of `pipe` inside the block report to `watcher`; the pipeline is as before afterwards.

    On CUDA the host never runs more than one step ahead of the device, so that a step reported is
    a step done and a stop stops the device too.
    """
    throttle = _Throttle(torch.device(pipe._execution_device))
    latest: list[Tensor | None] = [None]

    def on_step() -> None:
        throttle.step_queued()
        latents, latest[0] = latest[0], None
        watcher.step_done(latents)

    def opened(*args: object, **kwargs: object) -> _WatchedBar:
        bar = _own_bar(*args, **kwargs)
        watcher.loop_opened(int(getattr(bar, "total", 0) or 0))
        return _WatchedBar(bar, on_step, watcher.loop_closed)

    own = vars(pipe).get("progress_bar")
    _own_bar: Callable[..., object] = pipe.progress_bar
    pipe.progress_bar = opened
    try:
        with _watched_scheduler(getattr(pipe, "scheduler", None), latest, watcher.check):
            yield
    except BaseException:
        _end_call(pipe)
        raise
    finally:
        if own is None:
            del pipe.progress_bar
        else:
            pipe.progress_bar = own


def _end_call(pipe: DiffusionPipeline) -> None:
    """What the pipeline would have done last: ends the request, puts offloaded weights back."""
    free = getattr(pipe, "maybe_free_model_hooks", None)
    if callable(free):
        free()


@contextmanager
def _watched_scheduler(
    scheduler: object, latest: list[Tensor | None], check: Callable[[], None]
) -> Iterator[None]:
    step = getattr(scheduler, "step", None)
    if not callable(step):
        yield
        return

    # wraps: pipelines read the signature of `step` to learn which arguments it takes
    @functools.wraps(step)
    def watched(*args: object, **kwargs: object) -> object:
        check()
        result = step(*args, **kwargs)
        latest[0] = _clean_guess(scheduler, args, result)
        return result

    own = vars(scheduler).get("step")
    scheduler.step = watched  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if own is None:
            del scheduler.step  # type: ignore[attr-defined]
        else:
            scheduler.step = own  # type: ignore[attr-defined]


def _clean_guess(scheduler: object, args: tuple[object, ...], result: object) -> Tensor | None:
    """Where this step is heading: x0 = x_t - sigma * v for flow matching, else the next latents."""
    latents = result[0] if isinstance(result, tuple) else getattr(result, "prev_sample", None)
    if not isinstance(latents, Tensor):
        return None
    if not type(scheduler).__name__.startswith("FlowMatchEuler") or len(args) < 3:
        return latents
    velocity, sample = args[0], args[2]
    index = getattr(scheduler, "step_index", None)
    sigmas = getattr(scheduler, "sigmas", None)
    if not isinstance(velocity, Tensor) or not isinstance(sample, Tensor):
        return latents
    if index is None or not isinstance(sigmas, Tensor) or velocity.shape != sample.shape:
        return latents
    return sample - sigmas[index - 1].to(sample) * velocity.to(sample.dtype)


class _Throttle:
    """Keeps the host at most `_MAX_AHEAD` steps before the device; does nothing elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: deque[torch.cuda.Event] = deque()

    def step_queued(self) -> None:
        if self._device.type != "cuda":
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)
        while len(self._events) > _MAX_AHEAD:
            self._events.popleft().synchronize()  # sync: a stop must find few steps queued


class _WatchedBar:
    """The pipeline's own bar, which reports each step and its end."""

    def __init__(self, bar: object, on_step: Callable[[], None], on_end: Callable[[], None]):
        self._bar = bar
        self._on_step = on_step
        self._on_end = on_end

    def __enter__(self) -> _WatchedBar:
        self._bar.__enter__()  # type: ignore[attr-defined]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.__exit__(kind, error, trace)  # type: ignore[attr-defined]
        if error is None:
            self._on_end()

    def __iter__(self) -> Iterator[object]:
        for item in cast(Iterable[object], self._bar):
            yield item
            self._on_step()
        self._on_end()

    def update(self, n: float = 1) -> object:
        """One step forward."""
        result = self._bar.update(n)  # type: ignore[attr-defined]
        self._on_step()
        return result

    def __getattr__(self, name: str) -> object:
        return getattr(self._bar, name)
