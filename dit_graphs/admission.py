"""Owns admission: whether a graph of a signature is expected to pay for itself.

Must never know how graphs are made. The surprising fact: most calls are decided without the
device's time, because even the most that a replay could save would not pay for the capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .cache import Entry, State
from .config import GraphConfig
from .memory import Stopwatch
from .request_scope import Request

__all__ = ["Admission"]

_WORTH_KEEPING = 0.97  # a replay slower than this share of eager is not kept under "auto"
_LAUNCH_BOUND = 1.15  # device time within this share of host time: the device waits for Python
_FIRST_CAPTURE = 7.0  # times the host's time for one call: seven to fourteen were measured
_SHARE_OF_LAUNCHES = 0.5  # of the time of such a call, until a replay was measured


class Admission:
    """Weighs what captures cost, of which it is told, against what replays would save."""

    def __init__(self, config: GraphConfig, backend: str) -> None:
        self.config = config
        self.backend = backend
        self.is_warming_up = False
        self._pass_ms = 0.0
        self._capture_ms: float | None = None

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Inside, every new signature is captured on its first call."""
        before, self.is_warming_up = self.is_warming_up, True
        try:
            yield
        finally:
            self.is_warming_up = before

    def note_eager(self, entry: Entry, clock: Stopwatch, host_ms: float) -> None:
        """Remembers how long an eager call took; read later, without waiting."""
        if entry.eager_ms is None:
            entry.host_ms = host_ms
        entry.clock, entry.clock_host_ms = clock, host_ms
        self.note_lost(entry)

    def note_lost(self, entry: Entry) -> None:
        """An eager call that nobody timed loses as much as those that were."""
        entry.lost_calls += 1

    def _read_clock(self, entry: Entry, *, wait: bool = False) -> None:
        """The shortest call counts: one that was disturbed would speak for all that came after."""
        elapsed = entry.clock.elapsed_ms(wait=wait) if entry.clock is not None else None
        if elapsed is None:
            return
        entry.clock = None
        if entry.eager_ms is None or elapsed < entry.eager_ms:
            entry.eager_ms, entry.host_ms = elapsed, entry.clock_host_ms

    def _saving_ms(self, entry: Entry) -> float:
        """What one replay would save, from what is known without waiting."""
        self._read_clock(entry)
        if entry.eager_ms is None:
            return 0.0
        if entry.replay_ms is not None:
            return max(entry.eager_ms - entry.replay_ms, 0.0)
        bound_by_device = entry.eager_ms > _LAUNCH_BOUND * max(entry.host_ms, 1e-6)
        return entry.eager_ms * (0.02 if bound_by_device else _SHARE_OF_LAUNCHES)

    def _hoped_ms(self, entry: Entry) -> float:
        """What a replay saves at most; until the device's time is known, of a call that waits for
        Python: where Python waits for the device, a graph saves next to nothing.
        """
        known = self._saving_ms(entry)
        if entry.eager_ms is not None:
            return known
        return _SHARE_OF_LAUNCHES * _LAUNCH_BOUND * entry.host_ms

    def admits(self, entry: Entry, request: Request | None) -> bool:
        """Whether a capture now is expected to pay for itself; always, except under "auto"."""
        if not self._is_choosy():
            return True
        left = request.steps_left(entry.signature) if request is not None else None
        if (left is None and entry.uses < 3) or not self._pays(entry, left, self._hoped_ms(entry)):
            return False
        if entry.eager_ms is None:
            self._read_clock(entry, wait=True)
        return self._pays(entry, left, self._saving_ms(entry))

    def _is_choosy(self) -> bool:
        is_asked = self.backend == "auto" and self.config.capture != "first_use"
        return is_asked and not self.is_warming_up

    def _pays(self, entry: Entry, left: int | None, saving: float) -> bool:
        ahead = max((left or 0) - 1, 0) * saving
        return max(ahead, entry.lost_calls * saving) > self._expected_cost_ms(entry)

    def hopeless_calls(self, entry: Entry, request: Request) -> int:
        """How many calls of `request` after this one will not be admitted, by what is known now."""
        left, hoped = request.steps_left(entry.signature), self._hoped_ms(entry)
        if not self._is_choosy() or left is None or self._pays(entry, left, hoped):
            return 0
        still = self._expected_cost_ms(entry) - entry.lost_calls * hoped
        return min(left, int(still / hoped)) if hoped > 0.0 else left

    def note_pass(self, took_ms: float) -> None:
        """What an observed pass took."""
        self._pass_ms = took_ms

    def note_capture(self, took_ms: float) -> None:
        """What a capture took, its pass not counted."""
        self._capture_ms = took_ms

    def _expected_cost_ms(self, entry: Entry) -> float:
        """Pass, capture and compare, as they were measured last."""
        compare_ms = entry.eager_ms or entry.host_ms
        if self._capture_ms is None:
            return _FIRST_CAPTURE * entry.host_ms + compare_ms
        is_known = entry.plan.is_simple and entry.plan.has_captured
        return self._capture_ms + (0.0 if is_known else self._pass_ms) + compare_ms

    def may_capture_now(self, entry: Entry, request: Request | None) -> bool:
        """Right after the plain first call: this code path needs no observed pass."""
        plan = entry.plan
        if not (plan.is_simple and plan.has_captured) or entry.state is not State.SEEN:
            return False
        if self.backend == "debug":  # nothing would tell that this call is not like the others
            return False
        left = request.steps_left(entry.signature) if request is not None else None
        return left is not None and left >= 3 and self.admits(entry, request)

    def is_worthless(self, entry: Entry) -> bool:
        """Under "auto": a graph that is no faster than eager is not kept."""
        if self.backend != "auto" or entry.eager_ms is None or entry.replay_ms is None:
            return False
        return entry.replay_ms > _WORTH_KEEPING * entry.eager_ms
