"""Owns how a function and its flags become a command of the typer application.

Must never know which commands there are. The surprising fact: Ctrl-C may arrive while a library is
imported, and the library then raises an error of its own around it.
"""

from __future__ import annotations

import inspect
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer

from .codes import INTERRUPTED
from .flags import Flag, Given

__all__ = ["command"]


def command(
    app: typer.Typer,
    name: str,
    run: Callable[[Given], int],
    arguments: Iterable[inspect.Parameter],
    flags: Iterable[Flag],
) -> None:
    """Add `run` to `app` as command `name`; its docstring is the help, its result the exit code."""

    def called(**values: Any) -> int:
        with _noting_interrupts() as interrupts:
            try:
                return run(Given(values))
            except typer.Exit:  # the command has said how it ends, Ctrl-C included
                raise
            except BaseException as error:  # the library under typer would end without a word
                if not (interrupts or _is_interrupt(error)):
                    raise
            print("interrupted; no file was finished", file=sys.stderr)
            return INTERRUPTED

    parameters = [*arguments, *(flag.parameter() for flag in flags)]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    # One line per paragraph: the terminal, not the source, decides where lines end.
    paragraphs = inspect.cleandoc(run.__doc__ or "").split("\n\n")
    called.__doc__ = "\n\n".join(" ".join(text.split()) for text in paragraphs)
    called.__annotations__ = {}
    app.command(name)(called)


@contextmanager
def _noting_interrupts() -> Iterator[list[int]]:
    """A list that each Ctrl-C inside makes longer: a library in C may lose the exception itself."""
    heard: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield heard
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if callable(before):
            before(number, frame)

    if callable(before):  # one that is ignored stays so
        signal.signal(signal.SIGINT, note)
    try:
        yield heard
    finally:
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, before)


def _is_interrupt(error: BaseException | None) -> bool:
    """Ctrl-C, also where it came while a library was imported that answers with its own error."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
