"""Owns the request boundary: one generation, from its first denoising step to its last.

Must never know pipelines or graphs. The surprising fact: the current request is a ContextVar,
so worker threads and async tasks each have their own and nothing global is shared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .errors import ConfigError

__all__ = ["Request", "begin_request", "current_request", "end_request", "request"]

_numbers = itertools.count(1)
_current: ContextVar[Request | None] = ContextVar("dit_graphs_request", default=None)


class Request:
    """One generation: `number` names it, `total_steps` is how many steps it will take, if known.

    What was checked once (weights, hooks) stays checked until the request ends.
    """

    __slots__ = ("_at_end", "calls", "number", "total_steps")

    def __init__(self, total_steps: int | None) -> None:
        self.number = next(_numbers)
        self.total_steps = total_steps
        self.calls: dict[object, int] = {}
        self._at_end: dict[object, Callable[[], None]] = {}

    def at_end(self, owner: object, action: Callable[[], None]) -> None:
        """`action` runs once when the request ends; one per `owner`."""
        self._at_end.setdefault(owner, action)

    def close(self) -> None:
        """Runs and forgets the end actions."""
        actions, self._at_end = self._at_end, {}
        for action in actions.values():
            action()

    def count(self, key: object) -> int:
        """Counts one call under `key`; returns how many there were, this one included."""
        self.calls[key] = total = self.calls.get(key, 0) + 1
        return total

    def steps_left(self, key: object) -> int | None:
        """A lower bound of the calls still to come under `key`; None where unknown."""
        if self.total_steps is None:
            return None
        return max(self.total_steps - self.calls.get(key, 0), 0)


def current_request() -> Request | None:
    """The request this thread or task is in, or None."""
    return _current.get()


def begin_request(total_steps: int | None = None) -> Request:
    """Starts a request that lasts until `end_request` or the next one; returns it."""
    end_request()
    started = Request(total_steps)
    _current.set(started)
    return started


def end_request(started: Request | None = None) -> None:
    """Ends the current request (or only `started`, if that is the current one)."""
    running = _current.get()
    if running is not None and (started is None or running is started):
        _current.set(None)
        running.close()


@contextmanager
def request(total_steps: int | None = None) -> Iterator[Request]:
    """One generation: weights and hooks are checked once, admission knows the steps to come.

    Raises `ConfigError` for a negative number of steps.
    """
    if total_steps is not None and (isinstance(total_steps, bool) or total_steps < 0):
        raise ConfigError(f"total_steps: expected a number ≥ 0 or None, got {total_steps!r}")
    inner = Request(total_steps)
    token = _current.set(inner)
    try:
        yield inner
    finally:
        inner.close()
        _current.reset(token)
