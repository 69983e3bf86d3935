"""Owns what a page keeps of its finished pictures: file, parameters and timeline, no pixels.

Must never hold a picture: the server keeps every open page's history, and a decoded film is
gigabytes. The surprising fact: how long a page may rest follows from how long files are kept. One
picture at a time, each at the last moment before the page is forgotten: none outlives its file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from .stage import details_html
from .studio import KEPT_SECONDS
from .trace import RunTrace
from .work import Finished

__all__ = ["SECONDS", "History", "Kept", "kept", "with_newest"]

_MAX_ENTRIES = 24
SECONDS = KEPT_SECONDS // _MAX_ENTRIES  # without a new picture


@dataclass(frozen=True, slots=True)
class Kept:
    """One picture of a page: the file it may show, its parameters as markup, and its timeline."""

    path: Path
    seed: int
    details: str
    trace: RunTrace


History: TypeAlias = "list[Kept]"


def kept(finished: Finished) -> Kept:
    """What stays of a finished picture that was saved."""
    assert finished.shown is not None
    return Kept(finished.shown, finished.item.seed, details_html(finished), finished.trace)


def with_newest(made: Sequence[Finished], history: History) -> History:
    """`made` before the pictures of `history` whose files are still there."""
    entries = [*map(kept, made), *(entry for entry in history if entry.path.is_file())]
    return entries[:_MAX_ENTRIES]
