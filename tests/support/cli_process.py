"""How the tests of the command line run it: as a real process, or many calls in one real process.

Importing torch and diffusers costs several seconds, so `run_many` gives one process a list of
command lines and gets each one's exit code and output; it calls the same `main` the script calls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_OTHER = os.environ.get("DIT_GRAPHS_TEST_MODEL")
MODEL: tuple[str, ...] = ("--model", _OTHER, "--backend", "recorded") if _OTHER else ()

_DRIVER = """
import contextlib, io, json, os, shutil, sys
from dit_graphs.app.cli import main

def call(arguments):
    if arguments[0] == "!copy":
        shutil.copy(*arguments[1:])
        return {"code": 0, "out": "", "err": ""}
    if arguments[0] == "!remove":
        os.remove(arguments[1])
        return {"code": 0, "out": "", "err": ""}
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = stop.code
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}

results = [call(arguments) for arguments in json.load(sys.stdin)]
json.dump(results, sys.stdout)
"""


@dataclass(frozen=True)
class Done:
    """Exit code and output of one command line."""

    code: int
    out: str
    err: str


def run(*arguments: str, cwd: Path, timeout: float = 180) -> Done:
    """`dit-graphs ARGUMENTS` in the folder `cwd`, as a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "dit_graphs.app", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def run_many(commands: list[list[str]], cwd: Path, timeout: float = 240) -> list[Done]:
    """Every command line, one after the other, in one process of its own.

    `["!copy", source, target]` and `["!remove", file]` change files between two of them.
    """
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER],
        cwd=cwd,
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Done(r["code"], r["out"], r["err"]) for r in json.loads(done.stdout.splitlines()[-1])]
