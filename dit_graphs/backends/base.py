"""Owns the contract between runners and backends: `Backend`, `CapturePlan`, `Recording`.

Must never know runners or models. The surprising fact: after `capture` the output holds garbage;
only `replay` gives it values, and they are valid until the next replay on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ..breaks import BoundBreak, BreakSite, RecordedBreak
from ..errors import CaptureAborted, Reason
from ..memory import DeviceState
from ..observer import CaptureLog
from ..op_traits import iter_tensors, storage_key, storage_parts
from ..tree import map_tensors, tensor_leaves

__all__ = ["Backend", "BreakLog", "CapturePlan", "Recording", "refusal_of"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """What a capture must respect: where it runs, which breaks come in which order.

    `inputs` are the static buffers the forward reads; the recording keeps them alive.
    `written_inputs` of them and `externals` are what the observed pass wrote in place.
    `is_trial`: capture into a scratch pool that is thrown away afterwards.
    """

    state: DeviceState
    inputs: tuple[Tensor, ...]
    breaks: tuple[RecordedBreak, ...] = ()
    generators: tuple[torch.Generator, ...] = ()
    externals: tuple[Tensor, ...] = ()
    written_inputs: tuple[Tensor, ...] = ()
    break_launches: int = 0
    is_trial: bool = False
    strong_break_refs: bool = False


class Recording(Protocol, Generic[T_co]):
    """One captured forward; owns everything its graph reads until `close`."""

    @property
    def output(self) -> T_co: ...

    segments: int
    breaks: int
    captured_fraction: float
    nbytes: int

    def replay(self) -> None:
        """Output tensors hold the result for the inputs' current values.

        Raises `BreakFailed` where an eager break did something else than recorded.
        """

    def poison(self) -> None:
        """Every output that a replay must rewrite holds garbage."""

    def held(self) -> list[object]:
        """What its breaks are given, as it is kept for their next run."""

    def reads(self) -> frozenset[int]:
        """The storages outside of it that it reads and does not write, inputs aside."""

    def close(self) -> None:
        """Everything the recording held is released; it is never replayed again."""


def refusal_of(error: Exception) -> CaptureAborted:
    """What was raised on the way to a recording, as the reason why there is none.

    Its traceback goes: the frames hold the tensors of the pass or capture that died.
    """
    error.__traceback__ = None
    is_short = isinstance(error, torch.OutOfMemoryError)
    first_line = next(iter(str(error).splitlines()), "")
    reason = Reason.OUT_OF_MEMORY if is_short else Reason.CAPTURE_FAILED
    return CaptureAborted(reason, f"{type(error).__name__}: {first_line}")


class Backend(Protocol):
    """A way to capture. `fn(log)` runs one forward on the plan's inputs and reports to `log`.

    `fn(None)` runs it plainly, without any watch mode.
    """

    name: str

    def capture(self, fn: Callable[[CaptureLog | None], T], plan: CapturePlan) -> Recording[T]: ...


class BreakLog:
    """What any capture session keeps: storages it produced, externals it reads, its breaks."""

    def __init__(self, plan: CapturePlan) -> None:
        self.plan = plan
        self.launches = 0
        self.bound: list[BoundBreak] = []
        self.externals: dict[int, Tensor] = {storage_key(t): t.detach() for t in plan.externals}
        self._produced: set[int] = set()
        self._rewrites: set[int] = set()
        self._inputs = {storage_key(tensor) for tensor in plan.inputs}
        self._written = {storage_key(t) for t in (*plan.written_inputs, *plan.externals)}

    def note_produced(self, tensor: Tensor) -> None:
        """The tensor's memory was allocated in this capture: every replay rewrites it."""
        self._produced.add(storage_key(tensor))

    def note_used(self, tensor: Tensor) -> None:
        """An op read this tensor; if it is external, the recording keeps its storage alive."""
        for part in storage_parts(tensor):
            key = storage_key(part)
            if key and not (key in self._produced or key in self._inputs or key in self.externals):
                self.externals[key] = part.detach()

    def note_written(self, tensor: Tensor) -> None:
        """Every replay writes this memory: the observed pass may have done so once."""
        self._rewrites.add(storage_key(tensor))

    def note_launch(self) -> None:
        """One more kernel launch lies in a segment."""
        self.launches += 1

    def is_produced(self, tensor: Tensor) -> bool:
        """Whether every replay rewrites this tensor's memory."""
        return storage_key(tensor) in self._produced

    def may_write(self, tensor: Tensor) -> bool:
        """Whether this was produced here, or the observed pass wrote it: a compare can undo it."""
        key = storage_key(tensor)
        return not key or key in self._produced or key in self._written

    def is_rewritten(self, tensor: Tensor) -> bool:
        """Whether a replay or the call before it writes this memory: produced, or an input's."""
        key = storage_key(tensor)
        return key in self._produced or key in self._inputs

    def next_break(self, site: BreakSite) -> RecordedBreak:
        """The observed break this one repeats. Raises `CaptureAborted` where they differ."""
        index = len(self.bound)
        if index >= len(self.plan.breaks) or self.plan.breaks[index].site != site:
            raise CaptureAborted(Reason.CAPTURE_FAILED, f"break {site} was not observed here")
        return self.plan.breaks[index]

    def bind_break(
        self,
        recorded: RecordedBreak,
        fn: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        borrow: Callable[[Tensor], object],
        buffers: list[Tensor],
        fresh: Callable[[object], object] | None = None,
    ) -> BoundBreak:
        """The break with arguments it may keep: borrowed where produced here, owned elsewhere.

        `fresh` makes of them, before each run, what the body is to get.
        """

        def hold(tensor: Tensor) -> object:
            if self.is_produced(tensor) and not self.plan.strong_break_refs:
                return borrow(tensor)
            return tensor.detach()

        held_args = map_tensors(args, hold, keep_unknown=True)
        held_kwargs = map_tensors(kwargs, hold, keep_unknown=True)
        assert isinstance(held_args, tuple) and isinstance(held_kwargs, dict)
        bound = BoundBreak(recorded, fn, held_args, held_kwargs, buffers, fresh)
        self.bound.append(bound)
        return bound

    def held(self) -> list[object]:
        """What the breaks are given, as it is kept for their next run."""
        return [value for bound in self.bound for value in (*bound.args, *bound.kwargs.values())]

    def reads(self) -> frozenset[int]:
        """The storages outside that ops and the bodies of breaks read and no op writes."""
        given = set(map(storage_key, iter_tensors(self.held())))
        outside = given - self._produced - self._inputs
        return frozenset((outside | self.externals.keys()) - self._rewrites)

    def produced_outputs(self, output: object) -> list[Tensor]:
        """The output tensors a replay rewrites (not inputs or weights handed through)."""
        return [tensor for tensor in tensor_leaves(output) if self.is_produced(tensor)]

    def captured_fraction(self) -> float:
        """Launches in segments over all launches of the forward."""
        total = self.launches + self.plan.break_launches
        return self.launches / total if total else 1.0
