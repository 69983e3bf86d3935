"""Owns the question "is the module still what its graphs were captured from?".

Must never know graphs. The surprising fact: forwards change their own module (rope tables filled
on first use, last shapes remembered), and such changes must not look like the user's.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Literal

import torch
from torch import nn

from .errors import Reason
from .glance import Glance, hooks_ever
from .module_state import Exchange, ModuleState, sweep, weight_keys
from .request_scope import Request
from .restless import Restless, can_find, restless_storages, restless_values

__all__ = ["Change", "ModuleWatch"]

Change = Literal["weights", "caches"]
_KEPT_REQUESTS = 16
_KEPT_STATES = 64  # an older one that comes back is a new one
_TIRED = 3  # an attribute the forward changed this often is no longer part of the key
_QUIET = 4  # passes in a row that changed nothing: the next one is not expected to


def _always() -> bool:
    return True


def _nothing(_: object) -> None:
    return None


class ModuleWatch:
    """Sweeps a module tree, glances at it while nothing changes, and numbers its Python states."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.refusal: tuple[Reason, str] | None = None
        self.ran_eager = False
        self.exchange = Exchange()  # what the last watched pass did to the tensors of caches
        self.changed: frozenset[str] = frozenset()  # the attributes that it changed
        self.moved_weights = False  # whether it did
        # whether a look ever found changes that may have been an unwatched pass's own
        self.was_misled = False
        self._found: Restless = ()  # what restless attributes held before the last watched pass
        self._is_fresh = False
        self._base: ModuleState | None = None
        self._ids: OrderedDict[Hashable, int] = OrderedDict()  # keeps the states' objects alive
        self._id = 0
        self._numbers = itertools.count(1)
        self._checked: list[int] = []
        self._volatile: frozenset[str] = frozenset()
        self._kept: frozenset[str] = frozenset()  # never volatile again: they decide results
        self._changes: Counter[str] = Counter()
        self._left: dict[str, object] = {}  # as what the last pass that changed it left each
        self._moved = 0
        self._pending: Change | None = None
        self._hooks_ever = 0
        self.glance: Glance | None = None  # made before `_base` was swept, never after
        self._in_vain = 0
        self._is_watched = False
        self._said = 1  # how often somebody said that something changed
        self._heard = 0  # how many of these the last check came after
        self._quiet_passes = 0
        self._passes = itertools.count(1)
        self._last_pass = 0  # that ended
        self._seen_pass = 0  # the last one that ended before a look

    @property
    def device(self) -> torch.device | None:
        """Where the weights lay at the last sweep; None where there are none or several places."""
        devices = self._base.devices if self._base is not None else frozenset()
        return next(iter(devices)) if len(devices) == 1 else None

    def begin_call(self) -> None:
        """Nothing was looked at for this call so far."""
        self._is_fresh = False

    def is_current(self, request: Request | None) -> bool:
        """Whether this request was checked and nothing was said since."""
        is_checked = request is not None and request.number in self._checked
        return is_checked and self._hooks_ever == hooks_ever()

    def can_wait(self) -> bool:
        """Whether a call that is new to `is_current` may begin before it is checked.

        Nobody said that something changed, and a look will do. A graph keeps what it reads, so a
        replay of one that is no longer true is only in vain.
        """
        is_told = self._heard != self._said or self._hooks_ever != hooks_ever()
        return not (is_told or self.tells_little or self.refusal is not None)

    def check_as(self, glance: Glance | None, request: Request | None) -> bool:
        """Whether a closer look shows the module as it was when `glance` was this watch's.

        Then `request` is checked; whoever asks has made sure that nothing else is in the way.
        """
        said, ended = self._said, self._last_pass
        if glance is None or glance is not self.glance or not glance.is_exactly_same():
            return False
        self._seen_pass = ended
        self._note_checked(request, said)
        return True

    def doubt(self) -> None:
        """A pass went by unlooked: the next call is looked at whatever its request."""
        self._checked = []

    def note_pass(self) -> None:
        """The forward ran eagerly, to its end or not: it may have changed the module."""
        self.ran_eager = True
        self._last_pass = next(self._passes)

    @property
    def has_unseen_pass(self) -> bool:
        """Whether the forward ran since the last look, so that a look may show what it left."""
        return self._last_pass != self._seen_pass

    @property
    def is_quiet(self) -> bool:
        """Whether the last passes changed nothing, so that one more need not be looked at."""
        return self._quiet_passes >= _QUIET

    def expect_changes(self) -> None:
        """A pass did change something, wherever that lies."""
        self._quiet_passes = 0

    @property
    def tells_little(self) -> bool:
        """Whether a look shows changes again and again, where a sweep may find none."""
        glance = self.glance
        return glance is None or glance.is_blind or self._in_vain >= _TIRED

    def forget(self) -> None:
        """The next call looks at everything again, whatever its request."""
        self._said += 1
        self._checked = []

    def has_moved(self) -> bool:
        """Whether weights lie elsewhere than at the last sweep; nothing is remembered of it."""
        return self._base is not None and weight_keys(self.module) != self._base.weights

    def restless(self) -> Restless:
        """What the attributes hold now that changed too often to be part of the key."""
        return restless_values(self.module, self._volatile) if self._volatile else ()

    def restless_storages(self, device: torch.device) -> dict[str, frozenset[int]]:
        """The memory of those among them that hold tensors, all of this device."""
        return restless_storages(self.module, self._volatile, device) if self._volatile else {}

    def is_key(self, names: frozenset[str]) -> bool:
        """Whether any of these attributes is part of the key."""
        return not names <= self._volatile

    def keep_in_key(self, names: frozenset[str]) -> None:
        """These attributes decide what calls compute: they belong to the key, for good."""
        self._kept |= names
        self._volatile -= names
        self.glance = None  # it looks past them
        self.forget()

    @property
    def state_id(self) -> int:
        """The number of the current Python state: equal states, equal numbers."""
        return self._id

    def refresh(
        self, request: Request | None, drop: Callable[[Change], object] = _nothing
    ) -> Change | None:
        """Looks at everything; says whether weights moved or only caches and plain state did.

        `drop` is told so before another thread's call can be signed for the new state: after it, no
        graph serves any longer that is not true of that.
        """
        said, self._hooks_ever, self._seen_pass = self._said, hooks_ever(), self._last_pass
        self._is_watched = request is not None and request.is_watched
        now, glance = self._state()
        change = _worse(self._pending, self._change(now))
        self.refusal = _refusal(now)
        if change is not None:
            drop(change)
            self.expect_changes()
            self.was_misled |= self.ran_eager
        if said == self._said:  # else it is told again by whoever looks next
            self._pending = None
        self._adopt(now, glance)
        self._note_checked(request, said)
        return change

    def _note_checked(self, request: Request | None, said: int) -> None:
        """The module was looked at after `said` changes had been told of."""
        self._heard, self.ran_eager, self._is_fresh = said, False, True
        if request is not None:
            self._checked = [*self._checked[-_KEPT_REQUESTS:], request.number]
        if said != self._said:  # meanwhile, by another thread
            self._checked = []

    def _state(self, *, exactly: bool = True) -> tuple[ModuleState, Glance | None]:
        """The module's state now: the last one where a glance shows it, else what a sweep finds.

        With the glance that goes with it.
        """
        before, glance = self._base, self.glance
        if glance is not None and before is not None and _shows(glance, exactly):
            return before, glance
        # not right after a change, which seldom comes alone
        is_settled = before is not None and glance is None and self._in_vain < _TIRED
        # first the glance: what changes between the two shows in the next one
        is_wanted = self._is_watched or is_settled
        made = Glance(self.module, self._volatile) if is_wanted else None
        now = sweep(self.module, self._volatile)
        if glance is not None and now == before:  # something is made anew, again and again alike
            self._in_vain += 1
        return now, made

    def _adopt(self, now: ModuleState, glance: Glance | None) -> None:
        """From here on `glance` stands for `now`; a call that reads it reads no older number."""
        if now is not self._base:
            self.glance = None
            self._base = now
            self._id = self._ids.pop(now.python, 0) or next(self._numbers)
            self._ids[now.python] = self._id
            if len(self._ids) > _KEPT_STATES:
                self._ids.popitem(last=False)
            self.glance = glance

    def _change(self, now: ModuleState) -> Change | None:
        before = self._base
        if before is None or now is before:
            return None
        if now.weights != before.weights:
            return "weights"
        if now.caches == before.caches:
            return None
        # only what a forward that ran eagerly *added* may be its own doing
        is_added = set(before.caches) <= set(now.caches)
        return "caches" if self.ran_eager and is_added else "weights"

    def is_as_adopted(self, restless: Restless) -> bool:
        """Whether the module is as it was last adopted, its restless attributes included.

        The look leaves no trace: the next one finds the same changes.
        """
        now, _ = self._state(exactly=False)
        return now == self._base and self.restless() == restless

    def before_pass(self) -> None:
        """An eager pass is about to run whose own changes `adopt_changes` will look for."""
        self._found = self.restless()
        if self._is_fresh or self._base is None:
            return
        now, glance = self._state()
        self._pending = _worse(self._pending, self._change(now))
        if self._pending is not None or now.python != self._base.python:
            self.forget()  # what somebody changed is honoured by the next call
        self._adopt(now, glance)

    def _count_changes(self, before: ModuleState, now: ModuleState) -> None:
        """A pass changed the module; counted is only what it found as the pass before left it.

        What the user turns between calls, or sets back for the forward to fill anew, must never
        leave the key.
        """
        mine, theirs = before.by_name(), now.by_name()
        for name in now.changed_attributes(before):
            stood = mine.get(name)
            self._changes[name] += self._left.get(name, stood) == stood
            self._left[name] = theirs.get(name)

    def adopt_changes(
        self,
        is_return: Callable[[], bool] = _always,
        doubt: Callable[[Exchange], object] = _nothing,
    ) -> tuple[Reason, str] | None:
        """After an eager pass: what the forward itself changed is the module's state now.

        `is_return`: whether such a call was made before; what a first one sets may grow with it.
        `doubt` is told of exchanged tensors before any other thread's call can be signed for the
        new state, as `drop` is in `refresh`.
        Returns a reason where weights keep moving inside the call, so that no graph can work.
        """
        self._seen_pass = self._last_pass
        # not exactly: a forward may move a weight, but makes no other view of it in its place
        before, (now, glance) = self._base, self._state(exactly=False)
        self._is_fresh, self.exchange = False, Exchange()
        self.moved_weights = False
        self.changed = frozenset(each[0] for each in set(self._found) ^ set(self.restless()))
        if before is None or now is before:
            self._quiet_passes += 1
            return None
        self.expect_changes()
        self.exchange = before.exchanged(now)
        self.changed |= now.changed_attributes(before)
        doubt(self.exchange)
        if is_return():
            self._count_changes(before, now)
        often = {name for name, count in self._changes.items() if count >= _TIRED} - self._kept
        # what is not found without a sweep stays in the key: no call could ask what it holds
        restless = {n for n in often - self._volatile if can_find(self.module, n)}
        if restless:
            self._volatile |= restless
            self.glance = None  # it looks at them
            now, glance = self._state()
        self.moved_weights = has_moved = now.weights != before.weights
        if has_moved:  # told of before another thread's call can be signed for the new state
            self._pending = "weights"  # graphs of other signatures read the old ones
            self.forget()
            self._moved += 1
        self._adopt(now, glance)
        if now.placeless() is not None:
            return _refusal(now)
        if not has_moved or self._moved < 2:
            return None
        return Reason.OFFLOAD, "weights change their address during the call"


def _shows(glance: Glance, exactly: bool) -> bool:
    return glance.is_exactly_same() if exactly else glance.is_same() and glance.has_classes()


def _worse(one: Change | None, other: Change | None) -> Change | None:
    return "weights" if "weights" in (one, other) else one or other


def _refusal(state: ModuleState) -> tuple[Reason, str] | None:
    devices = {device for device in state.devices if device.type != "meta"}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        return Reason.OTHER_DEVICE, f"weights lie on {names}"
    if torch.device("meta") in state.devices:
        return Reason.OFFLOAD, "weights are on the meta device"
    layout = state.placeless()
    if layout is not None:
        return Reason.UNSUPPORTED_MODEL, f"it holds a tensor without one place in memory ({layout})"
    if state.compiled:
        return Reason.COMPILED, f"{state.compiled[0]} is compiled"
    if state.hooked:
        return Reason.HOOKS, f"on {state.hooked[0]}"
    return None
