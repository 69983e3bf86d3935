"""Owns the counters of a decode beyond graphs: tokens, first-token time, padding.

Must never know how tokens are made. The surprising fact: padding has two kinds with two prices.
Padded prompt columns cost a dense pass over tokens nobody reads; padded rows cost empty slots.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from ..counters import RunnerStats

__all__ = ["DecodeStats"]

_KEPT_CALLS = 256


@dataclass(slots=True)
class DecodeStats(RunnerStats):
    """What one decode runner did since it was made."""

    calls: int = 0
    new_tokens: int = 0
    first_token_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_CALLS))
    real_rows: int = 0
    bucket_rows: int = 0
    prompt_tokens: int = 0
    prompt_columns: int = 0

    def finish(
        self, first_token_ms: float | None, *, rows: int, bucket: int, lengths: tuple[int, ...],
        width: int, new_tokens: int,
    ) -> None:  # fmt: skip
        """One call has written `new_tokens` per row."""
        self.calls += 1
        self.new_tokens += new_tokens * rows
        if first_token_ms is not None:
            self.first_token_ms.append(first_token_ms)
        self.real_rows += rows
        self.bucket_rows += bucket
        self.prompt_tokens += sum(lengths)
        self.prompt_columns += width * rows

    def as_dict(self) -> dict[str, object]:
        """Plain, JSON-serialisable counters."""
        times = self.first_token_ms
        return {
            **RunnerStats.as_dict(self),
            "calls": self.calls,
            "new_tokens": self.new_tokens,
            "first_token_ms": median(times) if times else None,
            "prompt_padding": self.prompt_columns / max(self.prompt_tokens, 1),
            "row_padding": self.bucket_rows / max(self.real_rows, 1),
        }
