"""Owns the counters of one component and the log lines about them.

Must never know how graphs work. The surprising fact: a replay logs nothing; each reason for an
eager call is warned about once, with the difference to the nearest signature, and counted always.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from .errors import Reason

__all__ = ["QUIET", "Mark", "RunnerStats", "counted", "log"]

Mark = tuple[int, Counter[Reason]]
log = logging.getLogger("dit_graphs")

QUIET = frozenset(
    {
        Reason.WARMING_UP,
        Reason.NOT_ADMITTED,
        Reason.DISABLED,
        Reason.KILL_SWITCH,
        Reason.CAPTURE_GATE_BUSY,
        Reason.NESTED_REPLAY,
        Reason.GRAD_ENABLED,
        Reason.NO_CUDA,
    }
)


def counted(number: int, noun: str) -> str:
    """`1 break`, `2 breaks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass(slots=True)
class RunnerStats:
    """What one component did since it was wrapped."""

    component: str
    captures: int = 0
    replays: int = 0
    eager_calls: int = 0
    evictions: int = 0
    invalidations: int = 0
    compares: int = 0
    fallbacks: Counter[Reason] = field(default_factory=Counter)
    details: dict[Reason, str] = field(default_factory=dict)
    timeline: list[str] = field(default_factory=list)
    has_estimate: bool = False  # what graphs are worth was said

    def count_replay(self) -> None:
        """One call was served by a graph."""
        self.replays += 1
        self._note("graph")

    def count_eager(self, reason: Reason, detail: str = "", differs: Sequence[str] = ()) -> None:
        """One call ran eagerly for `reason`; the first of its kind is logged."""
        self.eager_calls += 1
        self.fallbacks[reason] += 1
        self._note(reason.value)
        self.tell(reason, detail, differs)

    def is_news(self, reason: Reason) -> bool:
        """Whether `tell` would warn about it."""
        return reason not in self.details and reason not in QUIET

    def tell(self, reason: Reason, detail: str, differs: Sequence[str] = ()) -> None:
        """Logs a reason the first time it is met, whether or not a call was lost to it yet.

        `differs`: line by line, what tells the call from the nearest one that has a graph.
        """
        if reason in self.details:
            return
        self.details[reason] = detail
        level = logging.DEBUG if reason in QUIET else logging.WARNING
        text = reason.told(detail)
        if differs:
            text = f"{text}. From the nearest graph: {'; '.join(differs)}"
        log.log(level, "%s: eager (%s): %s", self.component, reason, text)

    def _note(self, what: str) -> None:
        self.timeline.append(what)
        if len(self.timeline) > 4096:
            del self.timeline[:2048]

    def line(self, since: Mark | None = None) -> str:
        """`16/18 (2 eager: warming_up)` over all calls, or since an earlier `mark()`."""
        replays, fallbacks = self.replays, Counter(self.fallbacks)
        if since is not None:
            replays -= since[0]
            fallbacks -= since[1]
        eager = sum(fallbacks.values())
        total = replays + eager
        if not eager:
            return f"{replays}/{total}"
        reasons = ", ".join(
            reason.value if count == eager else f"{count} {reason.value}"
            for reason, count in fallbacks.most_common()
        )
        return f"{replays}/{total} ({eager} eager: {reasons})"

    def mark(self) -> Mark:
        """The counters now, for `line`."""
        return self.replays, Counter(self.fallbacks)

    def as_dict(self) -> dict[str, object]:
        """Plain, JSON-serialisable counters."""
        return {
            "captures": self.captures,
            "replays": self.replays,
            "eager_calls": self.eager_calls,
            # lists first: a report may be asked for while other threads call
            "fallbacks": {reason.value: count for reason, count in list(self.fallbacks.items())},
            "details": {reason.value: text for reason, text in list(self.details.items())},
            "evictions": self.evictions,
            "invalidations": self.invalidations,
            "compares": self.compares,
        }
