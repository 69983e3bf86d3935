"""What every test may rely on: no network, tests/support importable, nothing that cannot run here.

Owns the selection by marker. A test marked `gpu`, `multigpu` or `browser` is deselected (not
skipped) where its hardware is missing, so that a summary without skips stays readable; `slow` tests
run only when the -m expression names them.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_PROCESSES = 4
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

# Before any test imports transformers or diffusers: a test that reaches for a hub fails at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Processes side by side share the cores: with a core's worth of threads each, they only wait for
# one another. The commands that tests start inherit it.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    share = max((os.cpu_count() or 1) // int(workers), 1)
    os.environ["OMP_NUM_THREADS"] = str(min(int(os.environ.get("OMP_NUM_THREADS", share)), share))

# The root makes `benchmarks` importable: plain `pytest` does not add the folder it runs in.
for folder in (ROOT, ROOT / "tests" / "support"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Processes of a run without `-n`: at most one per core and four, none for single files.

    A process holds some 1.5 GiB, and importing torch takes it longer than most files take to run.
    """
    paths = [Path(str(argument).partition("::")[0]) for argument in config.args]
    if all(path.suffix == ".py" for path in paths):
        return 0
    return min(os.cpu_count() or 1, MAX_PROCESSES)


def _missing_hardware() -> set[str]:
    """The markers whose tests cannot run on this machine."""
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    missing = set()
    if devices < 1:
        missing.add("gpu")
    if devices < 2:
        missing.add("multigpu")
    if not any(shutil.which(name) for name in BROWSERS):
        missing.add("browser")
    return missing


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    """A test of a class that the installed diffusers is too old for says so."""
    try:
        return (yield)
    except LookupError as missing:  # by name: this file imports nothing that takes long
        if type(missing).__name__ == "UnknownClass":
            pytest.skip(str(missing))
        raise


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what this machine cannot run, and slow tests unless they were asked for."""
    unwanted = _missing_hardware()
    if "slow" not in (config.option.markexpr or ""):
        unwanted.add("slow")
    kept, dropped = [], []
    for item in items:
        bucket = dropped if any(item.get_closest_marker(name) for name in unwanted) else kept
        bucket.append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
