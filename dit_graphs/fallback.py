"""Owns the eager call: the method as it would run without this package, with a counted reason.

Must never know how a graph is made. The surprising fact: memory may run out because of the graphs
alone, so a call that fails for want of it lets all of them go and runs once more, from where it
started; where that cannot be had again, the caller decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from .buffers import version_of
from .cache import Entry, State
from .calls import Call
from .counters import log
from .errors import FallbackError, Reason, forget_refusals
from .holding import GraphHolding
from .memory import DeviceState
from .module_watch import ModuleWatch
from .pauses import Pause
from .taken import reached, repeatable
from .tree import PLAIN

__all__ = ["EagerCalls"]

_UNCHANGING = (*PLAIN, tuple)
_SIMPLE = frozenset(PLAIN)


class EagerCalls(GraphHolding):
    """A holder of graphs that serves without them."""

    def _miss(self, entry: Entry, call: Call, reason: Reason, detail: str = "") -> object:
        """An eager call that brings its signature no nearer to a graph.

        Where the next call would take what it changes in the module for the user's doing, that is
        looked at and noted as the forward's own.
        """
        is_watched = self._must_watch(entry)
        if is_watched:
            self._watch.before_pass()
        result = self._pass(entry, call, reason, detail)
        if is_watched:
            self._adopt(entry)
        return result

    def _must_watch(self, entry: Entry) -> bool:
        """Whether such calls change what is part of the key, and a look was misled by that before.

        Not from the start: most eager calls change nothing, and a look costs time.
        """
        return self._watch.was_misled and self._watch.is_key(
            self._habits.changed(entry.signature.call)
        )

    def _pass(self, entry: Entry, call: Call, reason: Reason, detail: str = "") -> object:
        differs = self._difference(reason, entry.signature)
        return self._fall_back(reason, detail, call.args, call.kwargs, differs)

    def _pass_by(self, pause: Pause, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """A call that needs no graph for as long as its request lasts."""
        pause.request.count(pause.entry.signature)
        if pause.reason is Reason.NOT_ADMITTED:
            self._capturer.note_lost(pause.entry)
        pause.entry.uses += 1
        return self._fall_back(pause.reason, pause.detail, args, kwargs)

    def _fall_back(
        self,
        reason: Reason,
        detail: str,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        differs: Sequence[str] = (),
    ) -> object:
        self.stats.count_eager(reason, detail, differs)
        if self.config.strict and not reason.is_asked_for:
            raise FallbackError(reason, detail) from None
        is_foreign = reason is Reason.FOREIGN_MODE
        may_repeat = not is_foreign and self.state.may_hold_graphs  # it takes the memory of some
        start = _Start(self.state, args, kwargs) if may_repeat else None
        try:
            with self._noting_writes():
                return self.call_eager(*args, **kwargs)
        except torch.OutOfMemoryError:
            held = self.state.pool_bytes()
            if not self.state.retire():
                raise
            can_repeat = start is not None and start.is_whole()
            log.warning(
                "%s: out of memory; %d MiB of graphs released%s", self.stats.component, held >> 20,
                ", trying once more" if can_repeat else "; the call has changed what it was given",
            )  # fmt: skip
            self.stats.count_eager(Reason.OUT_OF_MEMORY, f"{held >> 20} MiB of graphs released")
            if start is None or not can_repeat:
                raise
            start.put_back()
        except Exception as error:
            forget_refusals(error)
            raise
        with self._noting_writes():
            return self.call_eager(*args, **kwargs)

    def _noting_writes(self) -> AbstractContextManager[None]:
        """Inside, a forward runs eagerly, to its end or not, and may change the module: the next
        call looks. Graphs that read what it wrote are compared once more.

        A table that a forward fills anew where the size changes is never filled by a replay.
        """
        return _EagerPass(self._watch, self.cache.readers)

    def _start_of(self, call: Call) -> _Start | None:
        """What a pass over the call's buffers starts from, where its bits may not be eager's."""
        if any(not tensor.dim() and tensor.device != self.device for tensor in call.tensors):
            return _Start(self.state, call.args, call.kwargs)
        return None

    def _eagers_own(self, result: object, start: _Start | None, entry: Entry, call: Call) -> object:
        """Eager's result in place of the pass's: kernels take a scalar of the host as it is, one on
        the device in the precision of what it is multiplied with.
        """
        wrote = entry.observation is not None and entry.observation.written_externals
        if start is None or wrote or not start.is_whole():
            return result
        start.put_back()
        return repeatable(self.call_eager, call.args, call.kwargs, entry.taken)()


class _EagerPass(AbstractContextManager[None]):
    # no generator: most calls of new sizes pass through
    __slots__ = ("_before", "_watch")

    def __init__(self, watch: ModuleWatch, readers: list[Entry]) -> None:
        self._watch = watch
        tables = [(entry, entry.tables) for entry in readers]
        self._before = [(entry, read, _versions(read)) for entry, read in tables if read]

    def __exit__(self, *_: object) -> None:
        self._watch.note_pass()
        for entry, read, before in self._before:
            if entry.state is State.READY and _versions(read) != before:
                entry.state = State.CAPTURED


def _versions(tensors: tuple[Tensor, ...]) -> list[int | None]:
    return list(map(version_of, tensors))


class _Start:
    """What a call starts from, as far as a second try may have to find it again."""

    def __init__(
        self, state: DeviceState, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        self._state = state
        self._random = state.random_state()
        self._lists: list[tuple[list[object], list[object]]] = []
        self._dicts: list[tuple[dict[object, object], dict[object, object]]] = []
        self._tensors: list[tuple[Tensor, int | None]] = []
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        self._is_known = True  # nothing among it may have changed unseen, a cache object say
        for given in (*args, *kwargs.values()):
            if isinstance(given, Tensor):
                self._tensors.append((given, version_of(given)))
            elif type(given) not in _SIMPLE:
                self._keep(given)

    def _keep(self, given: object) -> None:
        for value in reached(given):
            if isinstance(value, Tensor):
                self._tensors.append((value, version_of(value)))
            elif type(value) is list:
                self._lists.append((value, list(value)))
            elif type(value) is dict:
                self._dicts.append((value, dict(value)))
            elif isinstance(value, torch.Generator):
                self._generators.append((value, value.get_state()))
            elif not isinstance(value, _UNCHANGING):
                self._is_known = False

    def is_whole(self) -> bool:
        """Whether everything that `put_back` cannot put back is as at the start."""
        is_unwritten = all(version_of(tensor) == version for tensor, version in self._tensors)
        return self._is_known and is_unwritten

    def put_back(self) -> None:
        """Random numbers, lists and dicts are as at the start."""
        self._state.set_random_state(self._random)
        for generator, drawn in self._generators:
            generator.set_state(drawn)
        for items, before in self._lists:
            items[:] = before
        for named, was in self._dicts:
            named.clear()
            named.update(was)
