"""Owns what is proposed for a word that is no option or command.

Must never guess silently: nothing is run, a name is only offered. The surprising fact: people
shorten. `--steps` and `--max` are parts of a name and far from it letter by letter, so whole parts
count before likeness.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

__all__ = ["similar", "unknown_option"]

_MOST = 3
_CUTOFF = 0.7


def similar(word: str, names: Collection[str]) -> list[str]:
    """Up to three of `names` that `word` may stand for, likeliest first."""
    wanted = _parts(word)
    by_parts = [name for name in names if wanted and _holds(_parts(name), wanted)]
    by_parts.sort(key=lambda name: (not _holds(_parts(name)[: len(wanted)], wanted), name))
    by_letters = difflib.get_close_matches(word, sorted(names), n=_MOST, cutoff=_CUTOFF)
    return list(dict.fromkeys([*by_parts, *by_letters]))[:_MOST]


def unknown_option(word: str, names: Collection[str]) -> str:
    """The sentence about an option that does not exist; text is a prompt that looks like one."""
    if " " in word:
        return f"No such option: {word} (a PROMPT that begins with - goes after --)"
    found = similar(word, names)
    return f"No such option: {word}" + (f" (did you mean {' or '.join(found)}?)" if found else "")


def _parts(name: str) -> list[str]:
    return [part for part in name.strip("-").replace("_", "-").split("-") if part]


def _holds(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether every wanted part begins, or is begun by, one of `parts`: `step` and `steps`."""
    return all(any(part.startswith(w) or w.startswith(part) for part in parts) for w in wanted)
