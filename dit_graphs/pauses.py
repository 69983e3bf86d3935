"""Owns pauses: calls of a request that can teach nothing, known by a glimpse at their arguments.

Must never know graphs. The surprising fact: a glimpse may take one call for another, for it is no
signature, and that does no harm: whatever it lets pass runs eagerly, as it would without us.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from .ambient import outside_modes
from .cache import Entry
from .errors import Reason
from .glance import hooks_ever
from .request_scope import Request
from .tree import PLAIN

__all__ = ["Pause", "Pauses"]

_MANY = 64
_HASHABLE = frozenset(PLAIN) - {slice}


@dataclass(slots=True)
class Pause:
    """The next `calls` of a signature in a request are eager whatever happens in it.

    `hooks`: how many this process had registered when that was found.
    """

    request: Request
    entry: Entry
    reason: Reason
    detail: str
    calls: int
    hooks: int


class Pauses:
    """Those of the request a runner serves now."""

    def __init__(self) -> None:
        self._request = 0
        self._known: dict[Hashable, Pause] = {}

    def find(
        self, request: Request | None, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Pause | None:
        """The pause this call falls into, one call shorter; None where it must be looked up."""
        if not self._known or request is None or request.number != self._request:
            return None
        pause = self._known.get(_glimpse(args, kwargs))
        if pause is None or pause.calls < 1 or pause.hooks != hooks_ever():
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
    ) -> None:
        """After this call of `request`, `calls` more like it need not be looked up."""
        if request.number != self._request:
            self.clear()
            self._request = request.number
        if len(self._known) < _MANY:
            self._known[_glimpse(*given)] = Pause(request, entry, *why, calls, hooks_ever())

    def clear(self) -> None:
        """Something changed: every call is looked up."""
        self._known = {}


@outside_modes
def _glimpse(args: tuple[object, ...], kwargs: dict[str, object]) -> Hashable:
    values = (*args, *kwargs.values())
    return tuple(kwargs), tuple([_shape(v) if isinstance(v, Tensor) else _seen(v) for v in values])


def _shape(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.dtype


def _seen(value: object) -> Hashable:
    kind = type(value)
    if kind in _HASHABLE:
        return kind, value
    if isinstance(value, Tensor):
        return _shape(value)
    if isinstance(value, dict) and len(value) <= _MANY:
        return tuple([(id(key), _seen(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)) and len(value) <= _MANY:
        return tuple([_seen(item) for item in value])
    return id(value)
