"""The command line: `main()`, its commands, and how an error becomes one sentence and a code.

Must never import torch or diffusers before a command runs. The surprising fact: an unknown flag, a
value a pipeline refuses and a line of a file that makes no sense all end here, as exit code 2.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer

from dit_graphs.errors import GraphError
from dit_graphs.pipelines.generate import InputError
from dit_graphs.pipelines.generate.errors import is_out_of_memory

from . import batch, demo, doctor, generate, inspection
from .codes import BAD_INPUT, FAILED, INTERRUPTED
from .commands import command
from .flags import option_name, request_flags
from .suggest import unknown_option

__all__ = ["build_app", "main"]

COMMANDS = {
    "generate": generate,
    "batch": batch,
    "inspect": inspection,
    "doctor": doctor,
    "demo": demo,
}
# What every usage error of the command-line library derives from, whichever it is built on.
_UsageProblem: type[Exception] = typer.BadParameter.__mro__[2]
_ARGUMENTS = {
    "prompt": "PROMPT",
    "file": "FILE.jsonl",
    "request": "the request",
    "line": "line",
    "demo": "demo",
}


_PROMPT = {"prompt"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the result is the process's exit code."""
    if not sys.warnoptions:  # what a library tells its own developers
        warnings.simplefilter("ignore", FutureWarning)
    # said while it is imported, so no call could silence it in time; a user's own value counts
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if isinstance(sys.stdout, io.TextIOWrapper):  # paths and prompts go where ASCII alone does, too
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        code = build_app()(args=arguments, prog_name="dit-graphs", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except InputError as error:
        return _refuse(f"{_named(error.option)}: {_as_typed(error.problem)}")
    except _UsageProblem as error:
        return _refuse(_usage(error))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except GraphError as error:
        return _fail(str(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return _fail(f"out of memory: {error}")
    except BrokenPipeError:
        sys.stdout = None  # the reader has gone: nothing more can be said
        return FAILED
    except OSError as error:  # a disk that is full, or was taken away
        if error.errno == errno.ENAMETOOLONG:
            return _refuse(f"no file can have this name: {str(error.filename)!r:.60}…")
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def build_app() -> typer.Typer:
    """The typer application with every command."""
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        help="CUDA graphs for diffusers pipelines: same pixels, no compiler.",
    )

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", callback=_version, is_eager=True, help="print it")
        ] = False,
    ) -> None:
        """CUDA graphs for diffusers pipelines: same pixels, no compiler, memory under a budget."""

    for name, module in COMMANDS.items():
        command(app, name, module.run, module.ARGUMENTS, module.flags())
    return app


def _version(wanted: bool) -> None:
    if wanted:
        print(f"dit-graphs {metadata.version('dit-graphs')}")
        raise typer.Exit()


def _named(option: str) -> str:
    return ", ".join(_ARGUMENTS.get(name) or option_name(name) for name in option.split(", "))


def _as_typed(problem: str) -> str:
    """Where a pipeline's arguments are listed: each as it is typed here."""
    flags = {flag.name for flag in request_flags()}

    def typed(match: re.Match[str]) -> str:
        names = match[1].split(", ")
        own = ["PROMPT" if n == "prompt" else option_name(n) for n in names if n in flags | _PROMPT]
        others = [name for name in names if name not in flags | _PROMPT]
        by_set = f", and by --set KEY=JSON {', '.join(others)}" if others else ""
        return f"it takes {', '.join(own)}{by_set}"

    return re.sub(r"it takes (\w+(?:, \w+)*)", typed, problem)


def _usage(error: Exception) -> str:
    """The sentence of the command-line library, with our own proposals for an unknown word."""
    message = " ".join(error.format_message().split())  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    option = getattr(error, "option_name", None)
    if option is not None and context is not None and message.startswith("No such option"):
        shown = [p for p in context.command.params if not getattr(p, "hidden", False)]
        names = [name for p in shown for name in (*p.opts, *p.secondary_opts) if name[0] == "-"]
        return unknown_option(option, names)
    if message.startswith("No such command") and "Did you mean" not in message:
        return f"{message.removesuffix('.')}; there are {', '.join(COMMANDS)}"
    return message


def _fail(sentence: str) -> int:
    print(f"dit-graphs: {' '.join(sentence.split())}", file=sys.stderr)
    return FAILED


def _refuse(sentence: str) -> int:
    print(f"dit-graphs: {sentence}", file=sys.stderr)
    return BAD_INPUT
