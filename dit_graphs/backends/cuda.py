"""Owns CUDA graph capture: segments between eager breaks, in one shared pool.

Must never know runners or models. The surprising fact: a recording keeps no tensor alive inside
the pool, not even its output. Addresses stay valid because replays of a device are serialised
and results are cloned before the next one, so a larger graph's memory serves the smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor

from ..breaks import BoundBreak, BreakSite, handling_breaks
from ..buffers import of_same_view, poison, span_numel
from ..errors import CaptureAborted, Reason
from ..memory import CudaState, PoolId
from ..observer import CaptureLog
from ..tree import UnknownLeaf, map_tensors, tensor_leaves
from ..watch import unwatched
from .base import BreakLog, CapturePlan, Recording, refusal_of

__all__ = ["CudaBackend", "CudaRecording"]

T = TypeVar("T")


class _Span:
    """A device address range in the form `torch.as_tensor` reads without owning it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def borrow(tensor: Tensor) -> Tensor:
    """A tensor of the same address and layout that keeps nothing alive.

    A conjugate or negative view stays one: it is the same bytes read in another way.
    """
    if tensor.is_conj() or tensor.is_neg():
        return of_same_view(borrow, tensor)
    numel = span_numel(tuple(tensor.shape), tensor.stride())
    if numel == 0:
        return tensor.detach()
    nbytes = numel * tensor.element_size()
    raw = torch.as_tensor(_Span(tensor.data_ptr(), nbytes), device=tensor.device)
    return raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class CudaBackend:
    """`full` (no break allowed) or `breakable` capture on the device's capture stream."""

    def __init__(self, name: str) -> None:
        self.name = name

    def capture(self, fn: Callable[[CaptureLog | None], T], plan: CapturePlan) -> Recording[T]:
        """Captures `fn`. Raises `CaptureAborted`; the process is healthy afterwards."""
        state = plan.state
        if not isinstance(state, CudaState):
            raise CaptureAborted(Reason.NO_CUDA, str(state.device))
        if plan.breaks and self.name == "full":
            raise CaptureAborted(Reason.BREAK_NOT_ALLOWED, str(plan.breaks[0].site))
        pool = torch.cuda.graph_pool_handle() if plan.is_trial else state.pool
        session = _Session(plan, state, pool)
        before = state.pool_bytes() + state.driver_bytes()
        with torch.cuda.device(state.device), state.quiet_collector(), state.capture_stream():
            output = session.run(fn)
        try:
            produced = [borrow(tensor) for tensor in session.produced_outputs(output)]
            output = cast(T, map_tensors(output, session.hand_out))
        except UnknownLeaf as leaf:
            session.discard()
            raise CaptureAborted(Reason.UNSUPPORTED_OUTPUT, f"returned a {leaf.kind}") from None
        nbytes = max(state.pool_bytes() + state.driver_bytes() - before, 0)
        return CudaRecording(output, produced, session, nbytes)


class _Session(BreakLog):
    def __init__(self, plan: CapturePlan, state: CudaState, pool: PoolId) -> None:
        super().__init__(plan)
        self.state = state
        self.pool = pool
        self.steps: list[torch.cuda.CUDAGraph | BoundBreak] = []
        self._open: torch.cuda.CUDAGraph | None = None
        self._idle: list[torch.cuda.CUDAGraph] = []
        self._launches_before = 0

    def run(self, fn: Callable[[CaptureLog | None], T]) -> T:
        try:
            self._begin()
            with handling_breaks(self):
                output = fn(self)
            self._end()
        except BaseException as error:
            self._abort(error)
            if isinstance(error, CaptureAborted) or not isinstance(error, Exception):
                raise
            raise refusal_of(error) from error
        return output

    def _begin(self) -> None:
        # a workspace inside the pool belongs to this graph alone and dies with it
        torch._C._cuda_clearCublasWorkspaces()
        graph = torch.cuda.CUDAGraph()
        for generator in self.plan.generators:
            if generator.device.type == "cuda":
                graph.register_generator_state(generator)
        self._open = graph  # a begin that fails half-way must be healed too
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
        self._launches_before = self.launches

    def _end(self) -> None:
        assert self._open is not None
        graph, self._open = self._open, None
        try:
            graph.capture_end()
        except BaseException:
            self._open = graph
            raise
        torch._C._cuda_clearCublasWorkspaces()
        if self.launches > self._launches_before:
            self.steps.append(graph)
        else:
            self._idle.append(graph)  # no kernels, no launch; it keeps the pool's use count up

    def run_break(
        self,
        site: BreakSite,
        fn: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        recorded = self.next_break(site)
        with unwatched():
            outputs = recorded.result.allocate(self.state.device)
            map_tensors(outputs, self._produce)
            buffers = [borrow(tensor) for tensor in tensor_leaves(outputs)]
            self._end()
            self.steps.append(self.bind_break(recorded, fn, args, kwargs, borrow, buffers))
            self._begin()
        return outputs

    def _produce(self, tensor: Tensor) -> Tensor:
        self.note_produced(tensor)
        return tensor

    def hand_out(self, tensor: Tensor) -> Tensor:
        """An output as the recording keeps it: borrowed from the pool, owned if external."""
        if self.is_produced(tensor):
            return borrow(tensor)
        return tensor.detach()

    def _abort(self, error: BaseException) -> None:
        graph, self._open = self._open, None
        failed = False
        if graph is not None:
            try:
                graph.capture_end()
                graph.reset()
            except RuntimeError:
                failed = True
        self.discard()
        # the traceback's frames hold tensors of the dead capture
        error.__traceback__ = None
        del graph
        if failed:
            self.state.recover(self.pool)
        torch._C._cuda_clearCublasWorkspaces()

    def discard(self) -> None:
        """The segments captured so far are destroyed."""
        for step in (*self.steps, *self._idle):
            if isinstance(step, torch.cuda.CUDAGraph):
                step.reset()
        self.steps.clear()
        self._idle.clear()
        self.bound.clear()
        self.externals.clear()
        self.plan = replace(self.plan, inputs=(), written_inputs=(), externals=())


class CudaRecording(Generic[T]):
    """Segments and eager breaks, in order. `output` is valid from replay to the next replay."""

    def __init__(self, output: T, produced: list[Tensor], session: _Session, nbytes: int) -> None:
        self.output = output
        self.nbytes = nbytes
        self.breaks = len(session.bound)
        self.segments = len(session.steps) - self.breaks
        self.captured_fraction = session.captured_fraction()
        self._session = session
        self._produced = produced
        self._steps: tuple[Callable[[], None], ...] = tuple(
            step.run if isinstance(step, BoundBreak) else step.replay for step in session.steps
        )

    def replay(self) -> None:
        for step in self._steps:
            step()

    def poison(self) -> None:
        for tensor in self._produced:
            poison(tensor)

    def held(self) -> list[object]:
        return self._session.held()

    def reads(self) -> frozenset[int]:
        return self._session.reads()

    def close(self) -> None:
        self._steps = ()
        self._session.discard()
