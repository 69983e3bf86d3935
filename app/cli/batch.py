"""Owns `dit-graphs batch`: one request per line of a file, resumed where it was left.

Must never stop for one bad line, nor end well with one. The surprising fact: flags are the
defaults of every line, so a file may hold nothing but prompts.
"""

from __future__ import annotations

import inspect
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dit_graphs.pipelines.generate import GenerateRequest, InputError

from .codes import FAILED
from .flags import Flag, Given, graph_flags, model_flags, request_flags
from .generate import OUTPUT, OUTPUTS

if TYPE_CHECKING:
    from dit_graphs.pipelines.generate import Failure, Item

    from .session import Session

__all__ = ["ARGUMENTS", "file_lines", "flags", "run"]

ARGUMENTS = [
    inspect.Parameter(
        "file",
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        annotation=Annotated[str, typer.Argument(metavar="FILE.jsonl", show_default=False)],
    )
]


def flags() -> list[Flag]:
    """The flags of this command."""
    return [OUTPUT, *request_flags(), *model_flags(), *graph_flags()]


def run(given: Given) -> int:
    """Make every line of FILE.jsonl, a JSON object with the words of the flags.

    Flags are the defaults of every line. What already lies complete in --output is not made again;
    a line that fails is named, the others are made, and the exit code is 1.
    """
    since = time.perf_counter()
    given.check()
    path = Path(str(given.value("file")))
    texts = file_lines(path)
    from dit_graphs.pipelines.generate import (
        BatchReport,
        check_output,
        generate_batch,
        read_lines,
    )

    from .report import announce, listing_finished
    from .session import completed, open_session

    lines = read_lines(texts, given.request(None))
    if not lines:
        raise InputError("file", f"{str(path)!r} holds no line")
    folder = given.folder("output") or OUTPUTS
    check_output(folder)
    requests = [line for line in lines.values() if isinstance(line, GenerateRequest)]
    session = open_session(given, requests, since=since, checks=False)
    report, finished, begun = BatchReport(), list[Path](), set[int]()

    def on_item(number: int, item: Item) -> None:
        finished.extend(item.files)
        request = lines[number]
        if isinstance(request, GenerateRequest):
            if number not in begun:
                print(f"line {number} of {max(lines)}{_class(item, session)}")
            begun.add(number)
            announce(item, completed(session, request), session.loaded.device)

    def on_failure(failure: Failure) -> None:
        print(f"line {failure.number}: {_sentence(failure.error)}", file=sys.stderr, flush=True)

    session.loaded.pipe.set_progress_bar_config(disable=not sys.stderr.isatty(), leave=False)
    with listing_finished(finished):
        generate_batch(
            session.loaded,
            lines,
            output=folder,
            graphs=session.graphs,
            name=session.name,
            on_item=on_item,
            on_failure=on_failure,
            report=report,
        )
    failed = ", ".join(str(failure.number) for failure in report.failures)
    print(
        f"{len(report.items)} made, {report.num_skipped} already there, "
        f"{len(report.failures)} failed" + (f" (line {failed})" if failed else "")
    )
    return FAILED if report.failures else 0


def _class(item: Item, session: Session) -> str:
    """The class that drew a line, where another one draws most: lines may mix both kinds."""
    name = str(item.record["pipeline"])
    return "" if name == type(session.loaded.pipe).__name__ else f"  {name}"


def file_lines(path: Path) -> list[str]:
    """The lines of a text file; unlike `splitlines`, a separator inside a JSON text ends none."""
    if not path.exists() or path.is_dir():
        raise InputError("file", f"no such file: {str(path)!r}")
    try:
        with path.open(encoding="utf-8-sig") as file:  # some editors begin with a byte order mark
            return list(file)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("file", f"{str(path)!r} cannot be read: {error}") from error


def _sentence(error: Exception) -> str:
    if isinstance(error, InputError) and error.option == "line":
        return error.problem
    if isinstance(error, InputError):
        return f"{error.option}: {error.problem}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
