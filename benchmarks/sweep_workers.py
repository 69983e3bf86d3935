"""Cases in processes of their own, several at once: a case that dies takes nothing with it.

Owns processes and timeouts. Knows nothing of models or graphs. The surprising fact: the processes
are forked from one that has imported everything and touched no device, which saves the ten seconds
of imports a case would otherwise cost, and still gives each case a CUDA context of its own. Where
an import has touched the device after all, forked children cannot use it, and new processes start.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Literal

import torch

__all__ = ["Start", "run", "start_for"]

Start = Literal["fork", "spawn"]

Tree = dict[str, object]
Work = Callable[[str], Tree]


@dataclass(frozen=True, slots=True)
class _Running:
    key: str
    process: BaseProcess
    results: Connection
    deadline: float


def start_for(device: str) -> Start:
    """How processes for this device may start: forked if a forked one can use it."""
    if device == "cpu":
        return "fork"
    probe = multiprocessing.get_context("fork").Process(target=_touch, args=(device,))
    probe.start()
    probe.join()
    return "fork" if probe.exitcode == 0 else "spawn"


def _touch(device: str) -> None:
    torch.zeros(1, device=device)


def run(
    keys: list[str],
    work: Work,
    done: Callable[[Tree], None],
    *,
    workers: int,
    timeout: float,
    start: Start = "fork",
) -> None:
    """Calls `done(work(key))` for every key, or with a row of outcome "failed" that says why.

    `timeout`: seconds one case may take before its process is ended. To spawn, `work` is pickled.
    """
    waiting = list(keys)
    running: list[_Running] = []
    while waiting or running:
        while waiting and len(running) < workers:
            running.append(_start(waiting.pop(0), work, timeout, start))
        for one in list(running):
            row = _finished(one)
            if row is not None:
                running.remove(one)
                done(row)
        time.sleep(0.01)


def _start(key: str, work: Work, timeout: float, start: Start) -> _Running:
    context = multiprocessing.get_context(start)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(key, work, sender), daemon=True)
    process.start()
    sender.close()
    return _Running(key, process, receiver, time.monotonic() + timeout)


def _work(key: str, work: Work, results: Connection) -> None:
    try:
        row = work(key)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{last.filename.rpartition('site-packages/')[2]}:{last.lineno}"
        row = _failure(key, f"{type(error).__name__}: {error} at {place}")
    results.send(row)
    results.close()


def _finished(one: _Running) -> Tree | None:
    if one.results.poll():
        try:
            row = one.results.recv()
        except EOFError:
            one.process.join()
            return _failure(one.key, f"the process died with status {one.process.exitcode}")
        one.process.join()
        assert isinstance(row, dict)
        return row
    if time.monotonic() > one.deadline:
        one.process.kill()
        one.process.join()
        return _failure(one.key, "timed out")
    return None


def _failure(key: str, why: str) -> Tree:
    return {"key": key, "outcome": "failed", "is_equal": False, "problems": [why[:500]]}
