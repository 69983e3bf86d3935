"""Whether a graph pays, in numbers that a reader can follow. Times are milliseconds."""

from __future__ import annotations

import pytest

from dit_graphs import GraphConfig
from dit_graphs.admission import Admission
from dit_graphs.cache import Entry, StructurePlan
from dit_graphs.request_scope import Request
from dit_graphs.signature import sign
from dit_graphs.watch import BreakPolicy

# One call takes Python 10. A replay saves at most 0.5 * 1.15 * 10 = 5.75; where the device takes 10
# as well, 5. A first capture is expected to cost 7 * 10 and its compare 10: 80 in all.
_HOST = 10.0


class _Clock:
    """The device's time of one call, which is known only to who waits for it."""

    def __init__(self, took: float) -> None:
        self.took = took
        self.waits = 0

    def stop(self) -> None:
        pass

    def elapsed_ms(self, *, wait: bool = False) -> float | None:
        self.waits += wait
        return self.took if self.waits else None


def _seen(admission: Admission, took: float = 10.0) -> tuple[Entry, _Clock]:
    entry, clock = Entry(sign("call", None, None, []), StructurePlan(BreakPolicy())), _Clock(took)
    admission.note_eager(entry, clock, _HOST)
    return entry, clock


@pytest.fixture
def admission() -> Admission:
    return Admission(GraphConfig(), "auto")


@pytest.mark.parametrize(
    ("left", "is_admitted", "waits"),
    [
        (14, False, 0),  # 13 * 5.75 = 74.75
        (15, False, 1),  # 14 * 5.75 = 80.5, but 14 * 5 = 70
        (17, False, 1),  # 16 * 5 = 80
        (18, True, 1),  # 17 * 5 = 85
    ],
)
def test_the_device_is_waited_for_only_where_it_decides(
    admission: Admission, left: int, is_admitted: bool, waits: int
) -> None:
    entry, clock = _seen(admission)
    assert admission.admits(entry, Request(left)) == is_admitted and clock.waits == waits


@pytest.mark.parametrize(
    ("left", "lost", "calls"),
    [
        (5, 0, 5),  # 80 / 5.75 = 13 calls could come
        (5, 12, 1),  # 80 - 12 * 5.75 = 11
        (14, 12, 1),
        (15, 0, 0),  # 14 * 5.75 = 80.5: the next one is to be asked
    ],
)
def test_calls_are_put_off_for_as_long_as_none_can_be_admitted(
    admission: Admission, left: int, lost: int, calls: int
) -> None:
    entry, _ = _seen(admission)
    entry.lost_calls = lost
    assert admission.hopeless_calls(entry, Request(left)) == calls


@pytest.mark.parametrize(
    ("is_known", "left", "is_admitted"),
    [
        (False, 13, False),  # 12 * 5 = 60 = 20 + 30 + 10
        (False, 14, True),
        (True, 7, False),  # 6 * 5 = 30 = 20 + 10: this code path needs no pass
        (True, 8, True),
    ],
)
def test_a_capture_costs_what_the_last_one_did(
    admission: Admission, is_known: bool, left: int, is_admitted: bool
) -> None:
    admission.note_pass(30.0)
    admission.note_capture(20.0)
    entry, _ = _seen(admission)
    entry.plan.is_simple = entry.plan.has_captured = is_known
    assert admission.admits(entry, Request(left)) == is_admitted


def test_what_calls_lost_pays_for_a_capture_in_the_end(admission: Admission) -> None:
    entry, clock = _seen(admission)
    entry.uses, clock.waits = 3, 1
    for _ in range(15):  # with the first one 5 each, 80 together
        admission.note_lost(entry)
        assert not admission.admits(entry, None)
    admission.note_lost(entry)
    assert admission.admits(entry, None)


def test_one_call_that_was_disturbed_pays_for_nothing(admission: Admission) -> None:
    """A pause of the collector in a timed call, taken for what each of its kind loses."""
    entry, clock = _seen(admission, took=200.0)
    entry.host_ms = entry.clock_host_ms = 200.0
    entry.uses, clock.waits = 9, 1
    for _ in range(3):
        admission.note_lost(entry)
    assert not admission.admits(entry, None)
    again = _Clock(10.0)
    again.waits = 1
    admission.note_eager(entry, again, _HOST)
    assert not admission.admits(entry, None), "5 * 5, and not 4 * 100 that the first one said"
    assert (entry.eager_ms, entry.host_ms) == (10.0, _HOST)
    disturbed = _Clock(300.0)
    disturbed.waits = 1
    admission.note_eager(entry, disturbed, 300.0)
    assert not admission.admits(entry, None) and (entry.eager_ms, entry.host_ms) == (10.0, _HOST)
