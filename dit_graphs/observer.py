"""Owns what one forward does to the outside: `Observer` finds it out, `Guard` holds captures to it.

Must never know CUDA graphs or models. The surprising fact: the observed pass is an ordinary eager
call whose result the user gets; it costs tens of milliseconds once, and nothing afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from .breaks import (
    BreakResult,
    BreakSite,
    RecordedBreak,
    call_break,
    handling_breaks,
    left_in,
)
from .constants import ConstantTable, caller_location
from .effects import Reach
from .errors import CaptureAborted, Reason
from .escapes import Escapes
from .flex import breaking_flex_attention
from .host_functions import HANDLERS
from .origins import Origin
from .tree import UnknownLeaf, freeze, map_tensors, tensor_leaves
from .watch import (
    Args,
    BreakPolicy,
    Kwargs,
    OpTraits,
    Watch,
    iter_tensors,
    storage_key,
    unwatched,
)

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
    """Everything a capture must respect, found in one eager pass of one signature.

    `draws_on_host`: Python's or numpy's random numbers were drawn, which only a break may do.
    """

    constants: ConstantTable
    host_reads: tuple[HostRead, ...]
    breaks: tuple[RecordedBreak, ...]
    generators: tuple[torch.Generator, ...]
    is_random: bool
    written_inputs: frozenset[int]
    written_externals: tuple[Tensor, ...]
    break_launches: int
    draws_on_host: bool = False

    @property
    def is_simple(self) -> bool:
        """Nothing depends on this signature: other sizes may be captured without a pass."""
        return not (
            self.constants.entries
            or self.constants.reads
            or self.host_reads
            or self.breaks
            or self.generators
            or self.written_inputs
            or self.written_externals
        )


class Observer(Watch):
    """Watches one eager pass; afterwards `observation()` says what it did."""

    handlers = HANDLERS

    def __init__(
        self, module: nn.Module, device: torch.device, policy: BreakPolicy, inputs: list[Tensor]
    ) -> None:
        super().__init__(module, device, policy)
        self._inputs = {storage_key(t): i for i, t in enumerate(inputs) if storage_key(t)}
        self._produced: set[int] = set()
        self.escapes = Escapes()
        self._constants = ConstantTable()
        self._constant_of: dict[int, tuple[str, int]] = {}
        self._reads: list[HostRead] = []
        self._breaks: list[RecordedBreak] = []
        self._generators: dict[torch.Generator, Tensor] = {}
        self._random = False
        self._written_inputs: set[int] = set()
        self._written: dict[int, tuple[Tensor, Tensor]] = {}
        self._launches = 0
        self._break_launches = 0
        self._refusal: tuple[Reason, str] | None = None

    def host_read(self, name: str) -> None:
        path, location = self.location()
        self._reads.append(HostRead(path, location, name, Reason.HOST_READ))

    def host_copy(self, name: str) -> None:
        path, location = self.location()
        self._reads.append(HostRead(path, location, name, Reason.HOST_COPY))

    def constant(self, build: Callable[[], Tensor], source: Callable[[], Tensor]) -> Tensor:
        key = self.occurrences.next(caller_location())
        with unwatched():  # the transfer itself is explained: it is not host traffic
            result = build()
            made_from = source()
        self._constants.record(key, made_from, result)
        self._constant_of[storage_key(result)] = key
        self.origins.set(result, Origin.HOST)
        return result

    def known_read(self, name: str, read: Callable[[], object]) -> object:
        key = self.occurrences.next(caller_location())
        with unwatched():
            value = read()
            self._constants.record_read(key, name, value)
        for tensor in iter_tensors((value,)):
            self._constant_of[storage_key(tensor)] = key
            self.origins.set(tensor, Origin.KNOWN)
        return value

    def run_break(
        self,
        site: BreakSite,
        fn: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        before = self._launches
        given = (*args, *kwargs.values())
        known = _tensors_in(given)
        self.in_break += 1
        try:
            with handling_breaks(None):
                result = fn(*args, **kwargs)
        finally:
            self.in_break -= 1
        if not _tensors_in(given) <= known:  # what is behind it would read that very tensor
            self._refusal = Reason.PYTHON_STATE, f"{site} puts a tensor into what it is given"
        # an op-level break runs below our own dispatch handler, which then counts nothing
        self._launches = max(self._launches, before + 1)
        self._break_launches += self._launches - before
        if site.kind == "op":  # its schema has no alias: the result is memory of its own
            self._note_produced(result)
        try:
            with unwatched():
                left = self._reach(site, given), left_in(given)
                self._breaks.append(RecordedBreak(site, BreakResult.of(result), *left))
        except CaptureAborted as failure:
            self._refusal = (failure.reason, failure.detail)
        return result

    def _reach(self, site: BreakSite, given: Args) -> Reach | None:
        """What the body may have set for the code behind it; ops set nothing."""
        if site.kind == "module":
            return Reach([self.module.get_submodule(site.name)])
        modules = [value for value in given if isinstance(value, nn.Module)]
        return Reach(modules) if modules else None

    def about_to_run(
        self, traits: OpTraits, args: Args, kwargs: Kwargs, written: Iterable[Tensor]
    ) -> None:
        if traits.is_random:
            self._note_random(args, kwargs)
        if traits.is_collective:  # a compare would issue it twice, on this process alone
            self._refusal = Reason.COLLECTIVE, f"{traits.name} at {caller_location()}"
        for tensor in written:
            self._note_write(tensor)

    def ran(self, traits: OpTraits, given: list[Tensor], made: list[Tensor]) -> None:
        if traits.launches:
            self._launches += 1
        for tensor in made:
            key = storage_key(tensor)
            if traits.is_plain:
                self._produced.add(key)
            # a break's body runs on every replay; the rest a recording would have in memory of its
            # own, written on every replay
            is_own = not self.in_break and (key in self._produced or key in self._inputs)
            if is_own and tensor.device.type == self.device.type:
                self.escapes.note(tensor, traits.name)

    def gave(self, traits: OpTraits, made: list[Tensor]) -> None:
        for tensor in made:
            self.escapes.note(tensor, traits.name)

    def _note_produced(self, result: object) -> None:
        for tensor in iter_tensors((result,)):
            self._produced.add(storage_key(tensor))

    def _note_random(self, args: Args, kwargs: Kwargs) -> None:
        self._random = True
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator) and value not in self._generators:
                self._generators[value] = value.get_state()

    def _note_write(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if key in self._inputs:
            self._written_inputs.add(self._inputs[key])
        elif key in self._constant_of:
            self._constants.note_write(self._constant_of[key])
        elif key and key not in self._produced and key not in self._written:
            # the storage, not the view: the forward may write other parts of it later
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            whole.set_(tensor.untyped_storage())
            self._written[key] = (whole, whole.clone())

    def undo(self) -> None:
        """Module state and generators are as before the pass; its result must not be used."""
        for whole, before in self._written.values():
            whole.copy_(before)
        for generator, state in self._generators.items():
            generator.set_state(state)

    def observation(self) -> Observation:
        """What was seen."""
        return Observation(
            constants=self._constants,
            host_reads=tuple(self._reads),
            breaks=tuple(self._breaks),
            generators=tuple(self._generators),
            is_random=self._random,
            written_inputs=frozenset(self._written_inputs),
            written_externals=tuple(whole for whole, _ in self._written.values()),
            break_launches=self._break_launches,
        )

    def refusal(self, output: object) -> tuple[Reason, str] | None:
        """Why what the forward or a break returned cannot be rebuilt; None where it can."""
        if self._refusal is None:
            try:
                freeze(output, [])
                tensor_leaves(output)  # taken apart is not yet put together again
            except UnknownLeaf as leaf:
                return Reason.UNSUPPORTED_OUTPUT, f"returned a {leaf.kind}"
        return self._refusal


def _tensors_in(given: Args) -> set[int]:
    found: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        found.add(id(tensor))
        return tensor

    map_tensors(given, note, keep_unknown=True)
    return found


class CaptureLog(Protocol):
    """The part of a capture session the guard reports to."""

    def note_produced(self, tensor: Tensor) -> None: ...

    def note_used(self, tensor: Tensor) -> None: ...

    def note_launch(self) -> None: ...

    def may_write(self, tensor: Tensor) -> bool: ...

    def note_written(self, tensor: Tensor) -> None: ...

    def is_rewritten(self, tensor: Tensor) -> bool: ...


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
        escapes: Escapes,
        *,
        is_observed: bool = True,
    ) -> None:
        super().__init__(module, device, policy)
        self._constants = constants
        self._log = log
        self._escapes = escapes
        self._is_observed = is_observed
        self._recalled: set[int] = set()

    def host_read(self, name: str) -> None:
        path, location = self.location()
        raise CaptureAborted(Reason.HOST_READ, f"{name} in {path or 'the root'} at {location}")

    def host_copy(self, name: str) -> None:
        path, location = self.location()
        raise CaptureAborted(Reason.HOST_COPY, f"{name} in {path or 'the root'} at {location}")

    def constant(self, build: Callable[[], Tensor], source: Callable[[], Tensor]) -> Tensor:
        key = self.occurrences.next(caller_location())
        with unwatched():
            made_from = source()
        value = self._constants.recall(key, made_from)
        self._recalled.add(storage_key(value))
        self.origins.set(value, Origin.HOST)
        return value

    def known_read(self, name: str, read: Callable[[], object]) -> object:
        value = self._constants.recall_read(self.occurrences.next(caller_location()), name)
        for tensor in iter_tensors((value,)):
            self._recalled.add(storage_key(tensor))
            self.origins.set(tensor, Origin.KNOWN)
        return value

    def about_to_run(
        self, traits: OpTraits, args: Args, kwargs: Kwargs, written: Iterable[Tensor]
    ) -> None:
        if traits.is_collective:
            raise CaptureAborted(Reason.COLLECTIVE, f"{traits.name} at {caller_location()}")
        # a way that the observed pass did not take, because it filled a cache, or another size's:
        # what the compare could not undo must not be in it
        for tensor in written:
            is_own = tensor.device.type != self.device.type or storage_key(tensor) in self._recalled
            if not (is_own or self._log.may_write(tensor)):
                self._refuse(f"{traits.name}: a write not observed yet")
            self._log.note_written(tensor)
        if self._is_observed:
            return
        if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            self._refuse("draws from a generator, not observed yet")

    def _refuse(self, detail: str) -> None:
        reason = Reason.STATE_CHANGED if self._is_observed else Reason.CAPTURE_FAILED
        raise CaptureAborted(reason, detail)

    def ran(self, traits: OpTraits, given: list[Tensor], made: list[Tensor]) -> None:
        for tensor in given:
            self._log.note_used(tensor)
        for tensor in made:
            if traits.is_plain:
                self._log.note_produced(tensor)
                self._escapes.note(tensor, traits.name)
            elif self._log.is_rewritten(tensor):
                self._escapes.note(tensor, traits.name)
        if traits.launches:
            self._log.note_launch()

    def gave(self, traits: OpTraits, made: list[Tensor]) -> None:
        for tensor in made:
            self._escapes.note(tensor, traits.name)


@contextmanager
def breaking_modules(module: nn.Module, paths: tuple[str, ...]) -> Iterator[None]:
    """Inside, calls of the named submodules are breaks, and so is flex attention."""
    with ExitStack() as stack:
        stack.enter_context(breaking_flex_attention())
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

    call.keeps_eager = getattr(previous, "keeps_eager", previous is None)  # type: ignore[attr-defined]
    child._compiled_call_impl = call
    try:
        yield
    finally:
        if previous is None:
            child.__dict__.pop("_compiled_call_impl", None)
        else:
            child._compiled_call_impl = previous
