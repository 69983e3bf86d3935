"""Owns the `debug` backend: the whole forward is one eager break behind the graph machinery.

Must never know CUDA. The surprising fact: it tells two kinds of wrong pictures apart. Wrong here
means the model or the runner; wrong only with graphs means the capture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar, cast

import torch

from ..breaks import BreakResult, handling_breaks
from ..buffers import clone_layout, copy_layout, poison
from ..errors import BreakFailed, CaptureAborted, Reason
from ..observer import CaptureLog
from ..op_traits import Args, Kwargs, iter_tensors, traits_of
from ..tree import UnknownLeaf, map_tensors, tensor_leaves
from ..watch import EachOp
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
            watching = EachOp(partial(_run_watched, plan, log))
            with plan.state.capture_stream(), handling_breaks(None), watching:
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


def _run_watched(
    plan: CapturePlan, log: BreakLog, func: torch._ops.OpOverload, args: Args, kwargs: Kwargs
) -> object:
    """Nothing is written that the observed pass did not write: no compare could undo it."""
    traits = traits_of(func)
    for tensor in traits.written(args, kwargs):
        is_here = tensor.device.type == plan.state.device.type
        if is_here and not log.may_write(tensor):
            detail = f"{traits.name}: a write not observed yet"
            raise CaptureAborted(Reason.STATE_CHANGED, detail)
    result = func(*args, **kwargs)
    if traits.is_plain or traits.name == "aten::lift_fresh":  # `torch.tensor`
        for tensor in iter_tensors((result,)):
            log.note_produced(tensor)
    return result


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

    def reads(self) -> frozenset[int]:
        return frozenset()  # what the module holds then, whichever that is

    def close(self) -> None:
        self._fn = None
        self._log.externals.clear()
        self._log.plan = replace(self._log.plan, inputs=(), written_inputs=(), externals=())
