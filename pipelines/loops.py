"""Owns where a pipeline loops: who shows the progress bar, and in which frame the call runs.

Must never know graphs. The surprising fact: a modular pipeline has no bar of its own. Its loops
are blocks somewhere in a tree of blocks, and each shows its own.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from types import FrameType

__all__ = ["bar_owners", "opening_frame"]


def bar_owners(target: object) -> Iterator[object]:
    """The objects whose `progress_bar` a call of the pipeline may show: itself, and what it holds.

    A modular pipeline holds blocks, a combined one (Kandinsky's) the pipelines it is made of.
    """
    waiting = [target]
    seen: set[int] = set()
    for owner in waiting:
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        if callable(getattr(type(owner), "progress_bar", None)):
            yield owner
        inner = vars(owner).get("sub_blocks")
        blocks = inner.values() if isinstance(inner, Mapping) else ()
        waiting.extend(part for part in (*vars(owner).values(), *blocks) if _may_loop(part))


def _may_loop(part: object) -> bool:
    has_bar = callable(getattr(type(part), "progress_bar", None))
    return has_bar or "sub_blocks" in getattr(part, "__dict__", ())


def opening_frame(target: object) -> FrameType:
    """The pipeline call that is running here; where none is, whoever called us."""
    call = inspect.unwrap(type(target).__call__) if callable(target) else None
    code = getattr(call, "__code__", None)
    outside: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return frame
        if outside is None and not _is_of_this_package(frame):
            outside = frame
        frame = frame.f_back
    return outside if outside is not None else sys._getframe(1)


def _is_of_this_package(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] == __name__.partition(".")[0]
