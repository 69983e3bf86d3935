"""Owns the CPU recorder: ATen calls of one forward, replayed into the same storages.

Must never know models or CUDA. It is a test double and a demo backend, never a speed-up: no CUDA
graph is involved. Its blind spots: it cannot see work outside ATen (numpy, raw kernels), it has
no streams or pool, so lifetime faults appear only where a borrowed tensor has died, and every
intermediate stays in memory. The surprising fact: a capture does execute its ops, to know their
layouts, and then makes itself unseen: outputs become NaN, writes and random numbers are undone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor

from ..breaks import BoundBreak, BreakSite, handling_breaks
from ..buffers import poison
from ..errors import CaptureAborted, Reason
from ..observer import CaptureLog
from ..tree import UnknownLeaf, map_tensors, tensor_leaves
from ..watch import Args, EachOp, Kwargs, iter_tensors, storage_key, traits_of, unwatched
from .base import BreakLog, CapturePlan, Recording, refusal_of

__all__ = ["RecordedBackend", "RecordedRecording"]

T = TypeVar("T")
G = TypeVar("G", Args, Kwargs)


@dataclass(slots=True)
class _Call:
    """One recorded op: replaying it leaves `fresh` holding the new result."""

    func: torch._ops.OpOverload
    args: Args
    kwargs: Kwargs
    fresh: tuple[Tensor, ...]

    def run(self) -> None:
        result = self.func(*self.args, **self.kwargs)
        if self.fresh:
            outputs = (result,) if isinstance(result, Tensor) else result
            for target, source in zip(self.fresh, iter_tensors(outputs), strict=True):
                target.copy_(source)


class _Borrowed:
    """A tensor that is not kept alive; once its storage has died it reads as NaN."""

    def __init__(self, tensor: Tensor, kept: dict[int, Tensor]) -> None:
        self._ref = weakref.ref(tensor)
        self._kept = kept
        self._key = storage_key(tensor)
        self._place = (tensor.shape, tensor.stride(), tensor.storage_offset())
        self._dtype = tensor.dtype

    def resolve(self) -> Tensor:
        shape, stride, offset = self._place
        tensor = self._kept.get(self._key)
        if tensor is not None:
            whole = torch.empty(0, dtype=self._dtype, device="cpu").set_(tensor.untyped_storage())
            return whole.as_strided(shape, stride, offset)
        alive = self._ref()
        if alive is not None:
            return alive
        dead = torch.empty(tuple(shape), dtype=self._dtype, device="cpu")
        poison(dead)
        return dead


class _Session(BreakLog):
    def __init__(self, plan: CapturePlan) -> None:
        super().__init__(plan)
        self.steps: list[_Call | BoundBreak] = []
        self.kept: dict[int, Tensor] = {}
        self._undo: dict[int, tuple[Tensor, Tensor]] = {}

    def record(self, func: torch._ops.OpOverload, args: Args, kwargs: Kwargs) -> object:
        traits = traits_of(func)
        for tensor in traits.written(args, kwargs):
            self._remember(tensor)
        # a later in-place view op (transpose_, squeeze_) changes shapes, never these aliases
        held_args, held_kwargs = _aliased(args), _aliased(kwargs)
        result = func(*args, **kwargs)
        if traits.is_view:
            return result
        fresh: tuple[Tensor, ...] = ()
        if traits.is_plain:
            outputs = (result,) if isinstance(result, Tensor) else result
            if not isinstance(outputs, (list, tuple)):
                return result  # a Python value of host-only data
            produced = tuple(iter_tensors(outputs))
            for tensor in produced:
                self._produce(tensor)
            fresh = tuple(tensor.detach() for tensor in produced)
        if traits.launches:
            self.steps.append(_Call(func, held_args, held_kwargs, fresh))
        return result

    def _remember(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if not self.is_produced(tensor) and key not in self._undo:
            whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
            self._undo[key] = (whole, whole.clone())

    def run_break(
        self,
        site: BreakSite,
        fn: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        recorded = self.next_break(site)
        with unwatched():
            outputs = recorded.result.allocate(torch.device("cpu"))
            map_tensors(outputs, self._produce)
            buffers = [tensor.detach() for tensor in tensor_leaves(outputs)]
            self.steps.append(
                self.bind_break(recorded, fn, args, kwargs, self._borrow, buffers, _resolve)
            )
        return outputs

    def _produce(self, tensor: Tensor) -> Tensor:
        self.note_produced(tensor)
        self.kept[storage_key(tensor)] = tensor.detach()  # whoever else holds it is of interest
        return tensor

    def _borrow(self, tensor: Tensor) -> object:
        return _Borrowed(tensor, self.kept)

    def count_segments(self) -> int:
        """Runs of recorded calls between breaks."""
        pairs = zip([None, *self.steps], self.steps, strict=False)
        return sum(isinstance(b, _Call) and not isinstance(a, _Call) for a, b in pairs)

    def vanish(self) -> None:
        """Writes are undone and everything produced is poisoned: the capture ran nothing."""
        for whole, before in self._undo.values():
            whole.copy_(before)
        for tensor in self.kept.values():
            if tensor.numel():
                poison(tensor)

    def release(self) -> None:
        """Nothing recorded is kept any longer."""
        for held in (self.steps, self.bound, self.kept, self.externals, self._undo):
            held.clear()
        self.plan = replace(self.plan, inputs=(), written_inputs=(), externals=())


def _aliased(given: G) -> G:
    """The arguments with tensors that share memory but not their shape with what was given."""
    return cast(G, map_tensors(given, lambda tensor: tensor.detach(), keep_unknown=True))


def _resolve(value: object) -> object:
    """`value` with borrowed tensors resolved to live ones."""
    if isinstance(value, _Borrowed):
        return value.resolve()
    if isinstance(value, dict):
        return {key: _resolve(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)) and not hasattr(value, "_make"):
        return type(value)(_resolve(item) for item in value)
    return value


class RecordedBackend:
    """Records one forward on the CPU; host reads inside it abort, as on CUDA."""

    name = "recorded"

    def capture(self, fn: Callable[[CaptureLog | None], T], plan: CapturePlan) -> Recording[T]:
        """Records `fn`. Raises `CaptureAborted`; nothing outside has changed then."""
        if plan.state.device.type != "cpu":
            raise CaptureAborted(Reason.OTHER_DEVICE, "the recorder replays on the CPU only")
        session = _Session(plan)
        random = plan.state.random_state()
        explicit = [(generator, generator.get_state()) for generator in plan.generators]
        try:
            with EachOp(session.record), handling_breaks(session):
                result = fn(session)
            output = cast(T, map_tensors(result, Tensor.detach))
            del result
        except UnknownLeaf as leaf:
            session.vanish()
            raise CaptureAborted(Reason.UNSUPPORTED_OUTPUT, f"returned a {leaf.kind}") from None
        except BaseException as error:
            session.vanish()
            if isinstance(error, CaptureAborted) or not isinstance(error, Exception):
                raise
            raise refusal_of(error) from error
        finally:
            plan.state.set_random_state(random)
            for generator, state in explicit:
                generator.set_state(state)
        session.vanish()
        return RecordedRecording(output, session)


class RecordedRecording(Generic[T]):
    """The recorded calls and breaks, in order."""

    def __init__(self, output: T, session: _Session) -> None:
        self.output = output
        self.segments = session.count_segments()
        self.breaks = len(session.bound)
        self.captured_fraction = session.captured_fraction()
        self.nbytes = sum(t.untyped_storage().nbytes() for t in session.kept.values())
        self._session = session
        self._produced = session.produced_outputs(output)
        self._steps = tuple(session.steps)

    def replay(self) -> None:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        # recorded calls have been cast already; a break's body is the model's own code
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for step in self._steps:
                if dtype is None or isinstance(step, _Call):
                    step.run()
                    continue
                with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
                    step.run()

    def poison(self) -> None:
        for tensor in self._produced:
            poison(tensor)

    def held(self) -> list[object]:
        return self._session.held()

    def reads(self) -> frozenset[int]:
        return self._session.reads()

    def close(self) -> None:
        self._steps = ()
        self._session.release()
