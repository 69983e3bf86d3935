"""Owns where a pipeline loops: who shows the progress bar, and in which frame the call runs.

Must never know graphs. The surprising fact: a modular pipeline has no bar of its own. Its loops
are blocks somewhere in a tree of blocks, and each shows its own.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType

__all__ = ["bar_owners", "opening_frame", "runs_foreign_code"]

_CALLBACKS = ("callback_on_step_end", "callback")


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
    code = _code_of_call(target)
    outside: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return frame
        if outside is None and not _is_of_this_package(frame):
            outside = frame
        frame = frame.f_back
    return outside if outside is not None else sys._getframe(1)


def runs_foreign_code(target: object, frame: FrameType) -> bool:
    """Whether others' code runs between the steps: a callback, or a loop that is not `target`'s.

    `frame`: where `target` was called. Asked below it; a class of the user's may hand the callback
    on to the pipeline's own `__call__`.
    """
    if frame.f_code is not _code_of_call(target):
        return True
    running: FrameType | None = sys._getframe(1)
    while running is not None:
        given = running.f_locals
        if any(given.get(name) is not None for name in _CALLBACKS):
            return True
        running = running.f_back if running is not frame else None
    return False


def _code_of_call(target: object) -> CodeType | None:
    call = inspect.unwrap(type(target).__call__) if callable(target) else None
    code = getattr(call, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _is_of_this_package(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] == __name__.partition(".")[0]
