"""Owns pauses: calls of a request that can teach nothing, known by a glimpse at their arguments.

Must never know graphs. The surprising fact: a glimpse may take one call for another, for it is no
signature, and that does no harm: whatever it lets pass runs eagerly, as it would without us.
Whoever adds a pause makes sure that no graph would have served such a call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from torch import Tensor, nn

from .ambient import outside_modes
from .cache import Entry
from .errors import Reason
from .glance import hooks_ever
from .request_scope import Request
from .tree import PLAIN

__all__ = ["FOR_GOOD", "Pause", "Pauses"]

FOR_GOOD = 1 << 30  # calls
_MANY = 64
_MOST_VALUES = 256
_ORDINARY = (Tensor, nn.Parameter)
_FLOATING = frozenset({float, complex})
_SIMPLE = frozenset(PLAIN) - {slice}  # which has no hash


@dataclass(slots=True)
class Pause:
    """The next `calls` of a signature in this request run eagerly and are not looked up.

    `hooks`: how many this process had registered when that was found; `setting`: what the
    signature had besides arguments and module.
    """

    request: Request
    entry: Entry
    reason: Reason
    detail: str
    calls: int
    hooks: int
    setting: Hashable


class Pauses:
    """Those of the request a runner serves now."""

    def __init__(self) -> None:
        self._request = 0
        self._known: dict[Hashable, Pause] = {}

    def find(
        self,
        request: Request | None,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        setting: Callable[[], Hashable],
    ) -> Pause | None:
        """The pause this call falls into, one call shorter; None where it must be looked up."""
        if not self._known or request is None or request.number != self._request:
            return None
        pause = self._known.get(_glimpse(args, kwargs))
        if pause is None or pause.calls < 1 or pause.hooks != hooks_ever():
            return None
        if pause.setting != setting():
            return None
        pause.calls -= 1
        return pause

    def add(
        self,
        request: Request,
        given: tuple[tuple[object, ...], dict[str, object]],
        entry: Entry,
        why: tuple[Reason, str],
        calls: int,
        setting: Hashable,
    ) -> None:
        """The next `calls` of `request` that look like this one are not looked up."""
        if request.number != self._request:
            self.clear()
            self._request = request.number
        seen = _glimpse(*given)
        if seen is not None and len(self._known) < _MANY:
            self._known[seen] = Pause(request, entry, *why, calls, hooks_ever(), setting)

    def clear(self) -> None:
        """Something changed: every call is looked up."""
        self._known = {}


@outside_modes
def _glimpse(args: tuple[object, ...], kwargs: dict[str, object]) -> Hashable:
    """What a call looks like; None where that takes more than a glimpse, or says too little."""
    found: list[Hashable] = [tuple(kwargs)]
    waiting: list[object] = [*args, *kwargs.values()]
    for value in waiting:
        kind = type(value)
        if kind in _SIMPLE:
            # 0.0 equals -0.0, and may not stand for it
            found.append((kind, repr(value) if kind in _FLOATING else value))
        elif kind in _ORDINARY and isinstance(value, Tensor) and not value.is_nested:
            found.append((value.shape, value.dtype))
        elif isinstance(value, (list, tuple)) and kind in (list, tuple):
            found.append((kind, len(value)))
            waiting.extend(value[:_MOST_VALUES])
        elif isinstance(value, dict) and kind is dict and _is_by_name(value):
            found.append(tuple(value))
            waiting.extend(value.values())
        else:
            return None
        if len(waiting) >= _MOST_VALUES:
            return None
    return tuple(found)


def _is_by_name(value: dict[object, object]) -> bool:
    return len(value) < _MOST_VALUES and all(type(key) is str for key in value)
