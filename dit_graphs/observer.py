"""Owns what one forward does to the outside: `Observer` finds it out, `Guard` holds captures to it.

Must never know CUDA graphs or models. The surprising fact: the observed pass is an ordinary eager
call whose result the user gets; it costs tens of milliseconds once, and nothing afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from .breaks import BreakResult, BreakSite, RecordedBreak, call_break, handling_breaks
from .constants import ConstantTable, caller_location
from .errors import CaptureAborted, Reason
from .host_functions import HANDLERS
from .watch import Args, BreakPolicy, Kwargs, OpTraits, Watch, iter_tensors, storage_key

__all__ = ["Guard", "HostRead", "Observation", "Observer", "breaking_modules"]


@dataclass(frozen=True, slots=True)
class HostRead:
    """A device value read on the host: in which submodule (path), where, by which op."""

    module: str
    location: str
    op: str
    reason: Reason

    def __str__(self) -> str:
        return f"{self.op} in {self.module or 'the root forward'} at {self.location}"


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything a capture must respect, found in one eager pass of one signature."""

    constants: ConstantTable
    host_reads: tuple[HostRead, ...]
    breaks: tuple[RecordedBreak, ...]
    generators: tuple[torch.Generator, ...]
    is_random: bool
    written_inputs: frozenset[int]
    written_externals: tuple[Tensor, ...]
    launches: int
    break_launches: int

    @property
    def is_simple(self) -> bool:
        """Nothing depends on this signature: other sizes may be captured without a pass."""
        return not (
            self.constants.entries
            or self.host_reads
            or self.breaks
            or self.generators
            or self.written_inputs
            or self.written_externals
        )

    @property
    def captured_fraction(self) -> float:
        """Kernel launches in segments over all launches of the eager forward."""
        return 1.0 - self.break_launches / max(self.launches, 1)


class Observer(Watch):
    """Watches one eager pass; afterwards `observation()` says what it did."""

    handlers = HANDLERS

    def __init__(
        self, module: nn.Module, device: torch.device, policy: BreakPolicy, inputs: list[Tensor]
    ) -> None:
        super().__init__(module, device, policy)
        self._inputs = {storage_key(t): i for i, t in enumerate(inputs) if storage_key(t)}
        self._produced: set[int] = set()
        self._constants = ConstantTable()
        self._constant_of: dict[int, tuple[str, int]] = {}
        self._reads: list[HostRead] = []
        self._breaks: list[RecordedBreak] = []
        self._generators: list[torch.Generator] = []
        self._random = False
        self._written_inputs: set[int] = set()
        self._written: dict[int, Tensor] = {}
        self._launches = 0
        self._break_launches = 0
        self._failure: CaptureAborted | None = None

    def host_read(self, name: str) -> None:
        path, location = self.location()
        self._reads.append(HostRead(path, location, name, Reason.HOST_READ))

    def host_copy(self, name: str) -> None:
        path, location = self.location()
        self._reads.append(HostRead(path, location, name, Reason.HOST_COPY))

    def constant(self, build: Callable[[], Tensor], source: Callable[[], Tensor]) -> Tensor:
        key = self.occurrences.next(caller_location())
        result = build()
        self._constants.record(key, source(), result)
        self._constant_of[storage_key(result)] = key
        return result

    def run_break(
        self,
        site: BreakSite,
        fn: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        before = self._launches
        self.in_break += 1
        try:
            with handling_breaks(None):
                result = fn(*args, **kwargs)
        finally:
            self.in_break -= 1
        # an op-level break runs below our own dispatch handler, which then counts nothing
        self._launches = max(self._launches, before + 1)
        self._break_launches += self._launches - before
        try:
            self._breaks.append(RecordedBreak(site, BreakResult.of(result)))
        except CaptureAborted as failure:
            self._failure = failure
        return result

    def ran(self, traits: OpTraits, args: Args, kwargs: Kwargs, result: object) -> None:
        if not traits.is_view:
            self._launches += 1
        if self.in_break:
            return
        if traits.is_random:
            self._note_random(traits, args, kwargs)
        for position in traits.writes:
            written = (
                kwargs.get(position)
                if isinstance(position, str)
                else (args[position] if position < len(args) else None)
            )
            for tensor in iter_tensors((written,)):
                self._note_write(tensor)
        if traits.is_plain:
            for tensor in iter_tensors((result,)):
                self._produced.add(storage_key(tensor))

    def _note_random(self, traits: OpTraits, args: Args, kwargs: Kwargs) -> None:
        self._random = True
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator) and value not in self._generators:
                self._generators.append(value)

    def _note_write(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if key in self._inputs:
            self._written_inputs.add(self._inputs[key])
        elif key in self._constant_of:
            self._constants.note_write(self._constant_of[key])
        elif key not in self._produced and key:
            self._written[key] = tensor.detach()

    def observation(self) -> Observation:
        """What was seen. Raises `CaptureAborted` where a break cannot be rebuilt."""
        if self._failure is not None:
            raise self._failure
        return Observation(
            constants=self._constants,
            host_reads=tuple(self._reads),
            breaks=tuple(self._breaks),
            generators=tuple(self._generators),
            is_random=self._random,
            written_inputs=frozenset(self._written_inputs),
            written_externals=tuple(self._written.values()),
            launches=self._launches,
            break_launches=self._break_launches,
        )


class CaptureLog(Protocol):
    """The part of a capture session the guard reports to."""

    def note_produced(self, tensor: Tensor) -> None: ...

    def note_used(self, tensor: Tensor) -> None: ...

    def note_launch(self) -> None: ...


class Guard(Watch):
    """Watches a capture: constants come from the observation, host traffic aborts it."""

    handlers = HANDLERS

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        policy: BreakPolicy,
        constants: ConstantTable,
        log: CaptureLog,
    ) -> None:
        super().__init__(module, device, policy)
        self._constants = constants
        self._log = log

    def host_read(self, name: str) -> None:
        path, location = self.location()
        raise CaptureAborted(Reason.HOST_READ, f"{name} in {path or 'the root'} at {location}")

    def host_copy(self, name: str) -> None:
        path, location = self.location()
        raise CaptureAborted(Reason.HOST_COPY, f"{name} in {path or 'the root'} at {location}")

    def constant(self, build: Callable[[], Tensor], source: Callable[[], Tensor]) -> Tensor:
        key = self.occurrences.next(caller_location())
        return self._constants.recall(key, source())

    def ran(self, traits: OpTraits, args: Args, kwargs: Kwargs, result: object) -> None:
        for tensor in iter_tensors((*args, *kwargs.values())):
            self._log.note_used(tensor)
        if traits.is_plain:
            for tensor in iter_tensors((result,)):
                self._log.note_produced(tensor)
        if not traits.is_view:
            self._log.note_launch()


@contextmanager
def breaking_modules(module: nn.Module, paths: tuple[str, ...]) -> Iterator[None]:
    """Inside, calls of the named submodules are breaks."""
    with ExitStack() as stack:
        for path in paths:
            stack.enter_context(_breaking(module.get_submodule(path), path))
        yield


@contextmanager
def _breaking(child: nn.Module, path: str) -> Iterator[None]:
    previous = child.__dict__.get("_compiled_call_impl")
    inner = previous if previous is not None else child._call_impl
    site = BreakSite("module", path)

    def call(*args: object, **kwargs: object) -> object:
        return call_break(site, inner, args, kwargs)

    child._compiled_call_impl = call
    try:
        yield
    finally:
        if previous is None:
            child.__dict__.pop("_compiled_call_impl", None)
        else:
            child._compiled_call_impl = previous
