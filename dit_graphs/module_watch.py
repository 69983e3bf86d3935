"""Owns the question "is the module still what its graphs were captured from?".

Must never know graphs. The surprising fact: forwards change their own module (rope tables filled
on first use, last shapes remembered), and such changes must not look like the user's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Literal

import torch
from torch import nn

from .errors import Reason
from .glance import Glance, hooks_ever
from .module_state import ModuleState, sweep, weight_keys
from .request_scope import Request

__all__ = ["Change", "ModuleWatch"]

Change = Literal["weights", "caches"]
_KEPT_REQUESTS = 16
_TIRED = 3  # an attribute the forward changed this often is no longer part of the key


class ModuleWatch:
    """Sweeps a module tree once per request, or once it changes, and numbers its Python states."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.refusal: tuple[Reason, str] | None = None
        self.ran_eager = False
        self._is_fresh = False
        self._base: ModuleState | None = None
        self._ids: dict[Hashable, int] = {}
        self._id = 0
        self._checked: list[int] = []
        self._volatile: frozenset[str] = frozenset()
        self._changes: Counter[str] = Counter()
        self._moved = 0
        self._pending: Change | None = None
        self._hooks_ever = 0
        self._glance: Glance | None = None

    @property
    def device(self) -> torch.device | None:
        """Where the weights lay at the last sweep; None where there are none or several places."""
        devices = self._base.devices if self._base is not None else frozenset()
        return next(iter(devices)) if len(devices) == 1 else None

    def is_current(self, request: Request | None) -> bool:
        """Whether this request was checked and nothing said, or shows, that it changed since."""
        if request is None or request.number not in self._checked:
            return False
        current = self._hooks_ever == hooks_ever()
        if current and request.is_watched:
            current = self._glance is not None and self._glance.is_same()
        if current:
            self._is_fresh = False
        return current

    def forget(self) -> None:
        """The next call sweeps again, whatever its request."""
        self._checked.clear()

    def keep_glance(self, request: Request | None) -> None:
        """A watched request is current as long as the module holds what it holds now."""
        if request is not None and request.is_watched:
            self._glance = Glance(self.module)
            request.at_end(self, self._forget_glance)  # it keeps alive what the module held

    def _forget_glance(self) -> None:
        self._glance = None

    def has_moved(self) -> bool:
        """Whether weights lie elsewhere than at the last sweep; nothing is remembered of it."""
        return self._base is not None and weight_keys(self.module) != self._base.weights

    @property
    def state_id(self) -> int:
        """The number of the current Python state: equal states, equal numbers."""
        return self._id

    def refresh(self, number: int | None) -> Change | None:
        """Sweeps; says whether weights moved or only cached tensors and plain state did."""
        self._hooks_ever = hooks_ever()
        now = sweep(self.module, self._volatile)
        change = _worse(self._pending, self._change(now))
        self._base, self._pending = now, None
        self._id = self._number(now.python)
        self.ran_eager = False
        self._is_fresh = True
        self.refusal = _refusal(self._base)
        if number is not None:
            self._checked = [*self._checked[-_KEPT_REQUESTS:], number]
        return change

    def _change(self, now: ModuleState) -> Change | None:
        before = self._base
        if before is None:
            return None
        if now.weights != before.weights:
            return "weights"
        if now.caches == before.caches:
            return None
        # only what a forward that ran eagerly *added* may be its own doing
        is_added = set(before.caches) <= set(now.caches)
        return "caches" if self.ran_eager and is_added else "weights"

    def _number(self, python: Hashable) -> int:
        return self._ids.setdefault(python, len(self._ids))

    def before_pass(self) -> None:
        """An eager pass is about to run whose own changes `adopt_changes` will look for."""
        if self._is_fresh or self._base is None:
            return
        now = sweep(self.module, self._volatile)
        self._pending = _worse(self._pending, self._change(now))
        if self._pending is not None or now.python != self._base.python:
            self._checked.clear()  # what somebody changed is honoured by the next call
        self._base = now
        self._id = self._number(now.python)

    def adopt_changes(self) -> tuple[Reason, str] | None:
        """After an eager pass: what the forward itself changed is the module's state now.

        Returns a reason where weights keep moving inside the call, so that no graph can work.
        """
        before, now = self._base, sweep(self.module, self._volatile)
        self._is_fresh = False
        if before is None:
            return None
        # counted inside passes only: a scale that the user turns must never leave the key
        self._changes.update(now.changed_attributes(before))
        restless = {name for name, count in self._changes.items() if count >= _TIRED}
        if not restless <= self._volatile:
            self._volatile |= restless
            now = sweep(self.module, self._volatile)
        self._base = now
        self._id = self._number(now.python)
        if now.weights == before.weights:
            return None
        self._pending = "weights"  # graphs of other signatures read the old ones
        self._checked.clear()
        self._moved += 1
        if self._moved < 2:
            return None
        return Reason.OFFLOAD, "weights change their address during the call"


def _worse(one: Change | None, other: Change | None) -> Change | None:
    return "weights" if "weights" in (one, other) else one or other


def _refusal(state: ModuleState) -> tuple[Reason, str] | None:
    devices = {device for device in state.devices if device.type != "meta"}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        return Reason.OTHER_DEVICE, f"weights lie on {names}"
    if torch.device("meta") in state.devices:
        return Reason.OFFLOAD, "weights are on the meta device"
    if state.compiled:
        return Reason.COMPILED, f"{state.compiled[0]} is compiled"
    if state.hooked:
        return Reason.HOOKS, f"on {state.hooked[0]}"
    return None
