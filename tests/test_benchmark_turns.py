"""Benchmark processes that share a device: side by side while preparing, alone while measuring."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from benchmarks.turns import Turns

SECONDS = 20


def _run(*bodies) -> None:
    errors: list[BaseException] = []

    def guarded(body) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "somebody waits for ever"
    assert not errors, errors


def test_nobody_prepares_while_somebody_measures(tmp_path: Path) -> None:
    """And somebody measures although others prepare all the time."""
    active: list[str] = []
    seen: set[tuple[str, ...]] = set()
    measured = threading.Event()

    def inside(kind: str) -> None:
        active.append(kind)
        for _ in range(5):
            seen.add(tuple(sorted(active)))
            time.sleep(0.001)
        active.remove(kind)

    def prepares() -> None:
        turns = Turns(tmp_path / "turns")
        end = time.monotonic() + SECONDS
        while not measured.is_set():
            assert time.monotonic() < end, "nobody came to measure"
            with turns.preparing():
                inside("prepare")

    def measures() -> None:
        turns = Turns(tmp_path / "turns")
        time.sleep(0.02)
        for _ in range(5):
            with turns.measuring():
                inside("measure")
        measured.set()

    _run(prepares, prepares, prepares, measures)
    assert ("prepare", "prepare") in seen
    assert {kinds for kinds in seen if "measure" in kinds} == {("measure",)}


def test_an_error_gives_the_turn_back(tmp_path: Path) -> None:
    turns = Turns(tmp_path / "turns")
    for turn in (turns.preparing, turns.measuring):
        with pytest.raises(KeyError), turn():
            raise KeyError

    def measures() -> None:
        with Turns(tmp_path / "turns").measuring():
            pass

    _run(measures)


def test_without_a_file_nobody_waits() -> None:
    turns = Turns()
    with turns.measuring(), turns.measuring(), turns.preparing():
        pass
