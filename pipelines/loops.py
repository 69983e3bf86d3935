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
    """The objects whose `progress_bar` a call of the pipeline may show."""
    if callable(getattr(type(target), "progress_bar", None)):
        yield target
    blocks = vars(target).get("_blocks")
    if blocks is not None:
        yield from bar_owners(blocks)
    inner = vars(target).get("sub_blocks")
    if isinstance(inner, Mapping):
        for block in inner.values():
            yield from bar_owners(block)


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
