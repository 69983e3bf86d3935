"""A case of the sweep that raises, dies or hangs is a failed row and takes no other with it."""

from __future__ import annotations

import os
import time

import pytest

from benchmarks import sweep_workers

Row = dict[str, object]


def _work(key: str) -> Row:
    if key == "raises":
        raise ValueError("no such weights")
    if key == "dies":
        os._exit(7)
    if key == "hangs":
        time.sleep(60)
    return {"key": key, "outcome": "full", "is_equal": True, "problems": []}


@pytest.mark.parametrize("workers", [1, 4])
def test_every_key_gets_a_row(workers: int) -> None:
    keys = ["good", "raises", "dies", "hangs", "also good"]
    rows: list[Row] = []
    started = time.monotonic()
    sweep_workers.run(keys, _work, rows.append, workers=workers, timeout=1.0)
    assert time.monotonic() - started < 30
    found = {str(row["key"]): row for row in rows}
    assert set(found) == set(keys) and len(rows) == len(keys)
    assert [key for key in keys if found[key]["is_equal"]] == ["good", "also good"]
    assert "ValueError: no such weights" in str(found["raises"]["problems"])
    assert found["dies"]["problems"] == ["the process died with status 7"]
    assert found["hangs"]["problems"] == ["timed out"]


def test_a_cpu_needs_no_new_processes() -> None:
    assert sweep_workers.start_for("cpu") == "fork"
