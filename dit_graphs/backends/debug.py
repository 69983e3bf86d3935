"""Owns the `debug` backend: the whole forward is one eager break behind the graph machinery.

Must never know CUDA. The surprising fact: it tells two kinds of wrong pictures apart. Wrong here
means the model or the runner; wrong only with graphs means the capture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar, cast

from ..breaks import BreakResult, handling_breaks
from ..buffers import clone_layout, copy_layout, poison
from ..errors import BreakFailed, CaptureAborted, Reason
from ..observer import CaptureLog
from ..tree import UnknownLeaf, map_tensors, tensor_leaves
from .base import BreakLog, CapturePlan, Recording

__all__ = ["DebugBackend", "DebugRecording"]

T = TypeVar("T")


class DebugBackend:
    """Runs the forward eagerly on the static inputs at every replay."""

    name = "debug"

    def capture(self, fn: Callable[[CaptureLog | None], T], plan: CapturePlan) -> Recording[T]:
        """One eager run gives the layout of the output; its values are dropped."""
        log = BreakLog(plan)
        random = plan.state.random_state()
        kept = [(tensor, clone_layout(tensor)) for tensor in (*plan.inputs, *plan.externals)]
        try:
            with plan.state.capture_stream(), handling_breaks(None):
                result = fn(None)
        finally:
            for tensor, before in kept:
                copy_layout(tensor, before)
            plan.state.set_random_state(random)
        try:
            layout = BreakResult.of(result)
            output = cast(T, map_tensors(result, clone_layout))
        except UnknownLeaf as leaf:
            raise CaptureAborted(Reason.UNSUPPORTED_OUTPUT, f"returned a {leaf.kind}") from None
        return DebugRecording(output, layout, fn, log)


class DebugRecording(Generic[T]):
    """The forward itself, writing into fixed outputs."""

    segments = 0
    breaks = 1
    captured_fraction = 0.0
    nbytes = 0

    def __init__(
        self, output: T, layout: BreakResult, fn: Callable[[CaptureLog | None], T], log: BreakLog
    ) -> None:
        self.output = output
        self._buffers = tensor_leaves(output)
        self._layout = layout
        self._fn: Callable[[CaptureLog | None], T] | None = fn
        self._log = log

    def replay(self) -> None:
        assert self._fn is not None, "replayed after close"
        try:
            with handling_breaks(None):
                result = self._fn(None)
        except Exception as error:
            raise BreakFailed(Reason.BREAK_RAISED, f"{type(error).__name__}: {error}") from error
        self._layout.copy_into(self._buffers, result)

    def poison(self) -> None:
        for buffer in self._buffers:
            poison(buffer)

    def held(self) -> list[object]:
        return self._log.held()

    def close(self) -> None:
        self._fn = None
        self._log.externals.clear()
        self._log.plan = replace(self._log.plan, inputs=(), externals=())
