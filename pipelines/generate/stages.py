"""Owns the seconds of each stage of one pipeline call, measured from outside.

Must never put a hook on a module: hooks are a reason to run eagerly, and the clock would change
what it measures. The surprising fact: one place is enough. A pipeline opens its progress bar when
denoising starts and closes it when denoising ends; encode is what came before, decode what follows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import cast

import torch
from diffusers import DiffusionPipeline

__all__ = ["StageClock"]


class StageClock:
    """Seconds per stage, in order. Every mark waits for the device, so a stage pays for itself.

    `has_no_step`: a pipeline began to denoise and had nothing to do.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self.num_steps = 0
        self.has_no_step = False
        self._device = device
        self._start = 0.0

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Add the seconds of the block to `stage`."""
        self._restart()
        yield
        self._add(stage)

    @contextmanager
    def watch(self, pipe: DiffusionPipeline) -> Iterator[None]:
        """Time the one call of `pipe` inside the block as encode, denoise and decode.

        A pipeline without a progress bar gives one stage, "generate". The pipeline is as before
        when the block ends, also by an error.
        """
        own = pipe.__dict__.get("progress_bar")
        opened: Callable[..., object] = pipe.progress_bar

        def progress_bar(*args: object, **kwargs: object) -> _WatchedBar:
            self._add("encode" if not self.num_steps else "decode")
            bar = opened(*args, **kwargs)
            total = getattr(bar, "total", None)
            self.num_steps += int(total or 0)
            self.has_no_step = total == 0 and not self.num_steps
            return _WatchedBar(bar, lambda: self._add("denoise"))

        self.num_steps = 0
        self._restart()
        pipe.progress_bar = progress_bar
        try:
            yield
            self._add("decode" if "denoise" in self.seconds else "generate")
        finally:
            if own is None:
                del pipe.progress_bar
            else:
                pipe.progress_bar = own

    @property
    def total(self) -> float:
        """Seconds of all stages together."""
        return sum(self.seconds.values())

    def _restart(self) -> None:
        self._wait()
        self._start = time.perf_counter()

    def _add(self, stage: str) -> None:
        self._wait()
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._start
        self._start = now

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # sync: a stage's kernels belong to that stage


class _WatchedBar:
    """The pipeline's own bar, which says when the loop under it has ended."""

    def __init__(self, bar: object, ended: Callable[[], None]) -> None:
        self._bar = bar
        self._ended = ended

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
        self._ended()

    def __iter__(self) -> Iterator[object]:
        yield from cast(Iterable[object], self._bar)
        self._ended()

    def __getattr__(self, name: str) -> object:
        return getattr(self._bar, name)
