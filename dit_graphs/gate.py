"""Owns the gate of a device: many calls at once, or one capture.

Must never know devices or graphs. The surprising fact: a capture that finds calls inside gives up
instead of waiting, because its caller has a result to deliver; only after several in a row does one
wait, and then those who arrive wait with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

from .errors import CaptureAborted, Reason

__all__ = ["CaptureGate", "Held"]


class CaptureGate:
    """Wrapped calls pass shared; a capture needs the gate alone.

    A capture does not wait where another thread's call is inside, it is put off. After
    `MAX_PUT_OFF` of them in a row the next one does wait: calls that arrive wait with it until
    those inside have left, or for `PATIENCE_S` at most. Constant load cannot keep it out for ever.
    A forward may wait for a call that a thread of its own makes, so a call that can do without the
    gate waits for a capture no longer than `CALLS_PATIENCE_S`, and after one that did so none does.
    """

    MAX_PUT_OFF = 4
    PATIENCE_S = 2.0
    CALLS_PATIENCE_S = 10.0

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._inside: dict[int, int] = {}
        self._owner: int | None = None
        self._waiting: int | None = None
        self._put_off = 0
        self._is_in_vain = False  # to wait for the capture that is made now
        self._shared = Held(self.enter, self.leave)

    def shared(self) -> AbstractContextManager[None]:
        """Held for one wrapped call; waits while another thread captures or is about to."""
        return self._shared

    def enter(self) -> None:
        """A call of this thread begins; see `shared`."""
        me = threading.get_ident()
        with self._lock:
            self._lock.wait_for(lambda: self._may_enter(me))
            self._note_inside(me)

    def enter_soon(self) -> None:
        """As `enter`; raises `CaptureAborted` where a capture does not end."""
        me = threading.get_ident()
        with self._lock:
            if not self._may_enter(me) and not self._got_in(me):
                self._is_in_vain = True
                raise CaptureAborted(Reason.CAPTURE_GATE_BUSY, "a capture does not end")
            self._note_inside(me)

    def _note_inside(self, me: int) -> None:
        self._inside[me] = self._inside.get(me, 0) + 1

    def _may_enter(self, me: int) -> bool:
        is_closed = self._waiting is not None or self._owner not in (None, me)
        return me in self._inside or not is_closed

    def _got_in(self, me: int) -> bool:
        self._lock.wait_for(lambda: self._may_enter(me) or self._is_in_vain, self.CALLS_PATIENCE_S)
        return self._may_enter(me)

    def leave(self) -> None:
        """That call is over."""
        me = threading.get_ident()
        with self._lock:
            self._inside[me] -= 1
            if not self._inside[me]:
                del self._inside[me]
            if self._waiting is not None:  # only a capture waits for calls to leave
                self._lock.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Held for one capture. Raises `CaptureAborted` while another thread's call is inside."""
        me = threading.get_ident()
        with self._lock:
            if not self._is_free_for(me) and not self._waited(me):
                raise CaptureAborted(Reason.CAPTURE_GATE_BUSY, "another thread is in a call")
            self._put_off = 0
            self._owner = me
        try:
            yield
        finally:
            with self._lock:
                self._owner, self._is_in_vain = None, False
                self._lock.notify_all()

    def _is_free_for(self, thread: int) -> bool:
        return self._owner is None and not any(other != thread for other in self._inside)

    def _waited(self, me: int) -> bool:
        """Whether it was worth waiting: the others left while those who arrived were held back."""
        self._put_off += 1
        if (
            self._put_off <= self.MAX_PUT_OFF
            or self._waiting is not None
            or self._owner is not None
        ):
            return False  # two that wait for each other would both wait in vain
        self._put_off = 0
        self._waiting = me
        try:
            return self._lock.wait_for(lambda: self._is_free_for(me), self.PATIENCE_S)
        finally:
            self._waiting = None
            self._lock.notify_all()

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Yields whether no call is inside, of any thread; if so, none begins until the exit."""
        me = threading.get_ident()
        with self._lock:
            is_alone = self._owner is None and not self._inside
            if is_alone:
                self._owner = me
        try:
            yield is_alone
        finally:
            if is_alone:
                with self._lock:
                    self._owner = None
                    self._lock.notify_all()


class Held(AbstractContextManager[None]):
    """`begin` on entry, `end` on exit; reusable. Not a generator: every step passes through two."""

    __slots__ = ("_begin", "_end")

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin = begin
        self._end = end

    def __enter__(self) -> None:
        self._begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()
