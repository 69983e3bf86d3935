"""Owns the words that tell two signatures of one name apart.

Must never rename a graph elsewhere: the command line and logs keep the short name. The surprising
fact: calls that look the same to a reader may differ in strides or settings, which no name holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

__all__ = ["told_apart"]

_MAX_WORDS = 120


def told_apart(names: Sequence[str], differ: Callable[[int, int], Sequence[str]]) -> list[str]:
    """`names`, each one only once: of equal ones, the number and what differs from the first.

    `differ(first, other)` gives the differences of two positions in words.
    """
    times, seen = Counter(names), Counter[str]()
    first: dict[str, int] = {}
    found = []
    for index, name in enumerate(names):
        if times[name] == 1:
            found.append(name)
            continue
        seen[name] += 1
        start = first.setdefault(name, index)
        words = "; ".join(differ(start, index)) if start != index else ""
        short = words if len(words) <= _MAX_WORDS else f"{words[:_MAX_WORDS]}…"
        found.append(f"{name} ({seen[name]} of {times[name]}{f': {short}' if short else ''})")
    return found
