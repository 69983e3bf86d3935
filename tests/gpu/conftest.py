"""GPU tests: each runs in the suite's process, or alone in a child process if it may poison it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # blocks.py

ALONE = "DIT_GRAPHS_TEST_ALONE"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test marked `alone` runs in a fresh process: a failed capture may ruin this one."""
    if pyfuncitem.get_closest_marker("alone") is None or os.environ.get(ALONE):
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "gpu"]
    node = f"{pyfuncitem.path}::{pyfuncitem.name}"
    child = subprocess.run(
        [*command, node],
        env={**os.environ, ALONE: "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    if child.returncode:
        pytest.fail(child.stdout[-3000:] + child.stderr[-2000:], pytrace=False)
    return True
