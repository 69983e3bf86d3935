"""Owns the request boundary: one generation, from its first denoising step to its last.

Must never know pipelines or graphs. The surprising facts: the current request is a ContextVar,
so worker threads and async tasks each have their own and nothing global is shared. And code that
raises or forgets leaves its request open; so a request may be tied to the frame that opened it, and
counts only in calls made below that frame while it runs.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Integral
from types import FrameType

from .errors import ConfigError

__all__ = ["Request", "begin_request", "current_request", "end_request", "request"]

_numbers = itertools.count(1)
_current: ContextVar[Request | None] = ContextVar("dit_graphs_request", default=None)


class Request:
    """One generation: `number` names it, `total_steps` is how many steps it will take, if known.

    What was checked once (weights, hooks) stays checked until the request ends; `is_watched`, until
    it changes, because code of the user's runs between the calls. `outer` is the request it was
    opened in.
    """

    __slots__ = (
        "_at_end",
        "_frame",
        "_thread",
        "calls",
        "is_over",
        "is_watched",
        "number",
        "outer",
        "total_steps",
    )

    def __init__(
        self,
        total_steps: int | None,
        *,
        frame: FrameType | None = None,
        outer: Request | None = None,
        is_watched: bool = False,
    ) -> None:
        self.number = next(_numbers)
        self.total_steps = total_steps
        self.calls: dict[object, int] = {}
        self.outer = outer
        self.is_over = False
        self.is_watched = is_watched
        # not the frame itself, which would keep every local variable of the caller alive
        self._frame = id(frame) if frame is not None else None
        self._thread = threading.get_ident()
        self._at_end: dict[object, Callable[[], None]] = {}

    def at_end(self, owner: object, action: Callable[[], None]) -> None:
        """`action` runs once when the request ends; one per `owner`."""
        self._at_end.setdefault(owner, action)

    def close(self) -> None:
        """The request is over: runs and forgets the end actions."""
        self.is_over = True
        actions, self._at_end = self._at_end, {}
        for action in actions.values():
            action()

    def is_opened_by(self, frame: FrameType) -> bool:
        """Whether this very frame opened it."""
        return self._frame == id(frame)

    def reaches_here(self) -> bool:
        """Whether the calling code is part of it; closes it where the opener has returned."""
        if self.is_over or self._frame is None:
            return not self.is_over
        if self._thread != threading.get_ident():
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if id(frame) == self._frame:
                return True
            frame = frame.f_back
        self.close()
        return False

    def count(self, key: object) -> int:
        """Counts one call under `key`; returns how many there were, this one included."""
        self.calls[key] = total = self.calls.get(key, 0) + 1
        return total

    def uncount(self, key: object) -> None:
        """The last call counted under `key` was none."""
        if key in self.calls:  # another thread may have given the signature another key
            self.calls[key] -= 1

    def recount(self, key: object, now: object) -> None:
        """What was counted under `key` counts under `now`."""
        self.calls[now] = self.calls.get(now, 0) + self.calls.pop(key, 0)

    def steps_left(self, key: object) -> int | None:
        """A lower bound of the calls still to come under `key`; None where unknown."""
        if self.total_steps is None:
            return None
        return max(self.total_steps - self.calls.get(key, 0), 0)


def current_request() -> Request | None:
    """The request this thread or task is in, or None."""
    running = _current.get()
    while running is not None and not running.reaches_here():
        running = running.outer
    return running


def begin_request(
    total_steps: int | None = None, frame: FrameType | None = None, *, is_watched: bool = False
) -> Request:
    """Starts a request that lasts until `end_request`, the next one or the return of `frame`.

    Opened by another frame than the current request was, it lies inside that one.
    """
    outer = current_request()
    if outer is not None and (frame is None or outer.is_opened_by(frame)):
        end_request(outer)
        outer = outer.outer
    started = Request(total_steps, frame=frame, outer=outer, is_watched=is_watched)
    _current.set(started)
    return started


def end_request(started: Request | None = None) -> None:
    """Ends the current request (or only `started`, if that is the current one)."""
    running = current_request()
    if running is not None and (started is None or running is started):
        _current.set(running.outer)
        running.close()


@contextmanager
def request(total_steps: int | None = None) -> Iterator[Request]:
    """One generation: everything is checked once, admission knows the steps to come.

    Between its calls a look shows whether the module is still what was checked: weights, layers,
    hooks and attributes exchanged by hand count from the next call on; a function or attribute of
    a class, from the next request on.
    Raises `ConfigError` for what is no whole number of steps.
    """
    is_number = isinstance(total_steps, (int, Integral)) and not isinstance(total_steps, bool)
    if total_steps is not None and not (is_number and total_steps >= 0):
        raise ConfigError(f"total_steps: expected a whole number ≥ 0 or None, got {total_steps!r}")
    inner = Request(total_steps, outer=_current.get(), is_watched=True)
    _current.set(inner)
    try:
        yield inner
    finally:
        inner.close()
        _leave(inner)


def _leave(over: Request) -> None:
    """What was current before it is so again, unless a generator ends elsewhere than it began."""
    running = _current.get()
    while running is not None and running is not over:
        running = running.outer
    if running is not None:
        _current.set(over.outer)
