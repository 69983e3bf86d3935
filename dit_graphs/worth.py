"""Owns what a graph is worth, in words: times that were measured, never a guess.

Must never know how graphs are made. The surprising fact: most of a large model's time is spent in
kernels that a graph cannot shorten; then the honest answer is that the graph is not kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["MOSTLY_EAGER", "Worth", "expected_speedup"]

MOSTLY_EAGER = 0.80  # a graph that captured less than this share of the launches is called so
_HARDLY_ANY = 1.05


@dataclass(frozen=True, slots=True)
class Worth:
    """One call measured both ways on the device; `nbytes`: what the graph added to memory."""

    eager_ms: float
    replay_ms: float
    nbytes: int

    @property
    def speedup(self) -> float:
        """How many times faster the call is from the graph."""
        return self.eager_ms / max(self.replay_ms, 1e-6)

    def __str__(self) -> str:
        gain = f"{self.speedup:.2f}x" if self.speedup < 2.0 else f"{self.speedup:.1f}x"
        says = "compute-bound:" if self.speedup < _HARDLY_ANY else "expect"
        return f"{says} {gain}, +{self.nbytes / 2**30:.1f} GiB"


def expected_speedup(graphs: Iterable[tuple[Worth, int]]) -> float | None:
    """Of a mix of calls, each with how often it came; None where nothing was measured."""
    eager = replay = 0.0
    for worth, uses in graphs:
        eager += worth.eager_ms * uses
        replay += worth.replay_ms * uses
    return eager / replay if replay else None
