"""Result files: what was measured, by which code, on which machine, with every raw sample.

Owns the format, its provenance and the merging of runs. Knows nothing of what the rows mean. The
surprising fact: a run may happen where there is no git (an unpacked copy on the GPU machine); then
the commit is given on the command line, and the hashes of the sources stored beside it let
`python -m benchmarks.check` prove or refute it later.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "results"
MEASURED = ("dit_graphs", "pipelines")
_PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "triton")


class DirtyTree(RuntimeError):
    """The sources are not those of a commit, so the numbers would belong to nothing."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """The commit that a run measured; `is_dirty` when its sources had changes."""

    commit: str
    is_dirty: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options every benchmark has."""
    parser.add_argument("--output", help="file under benchmarks/results, or absolute; merged")
    parser.add_argument("--allow-dirty", action="store_true", help="measure uncommitted sources")
    parser.add_argument("--commit", help="the commit of these sources, where there is no git")


def provenance(*, commit: str | None = None, allow_dirty: bool = False) -> Provenance:
    """Which commit the sources are. Raises DirtyTree when of none, unless that is allowed."""
    found = _git("rev-parse", "HEAD")
    if found is None:
        if commit is None and not allow_dirty:
            raise DirtyTree("no git here: give the commit of these sources with --commit HASH")
        return Provenance(commit or "unknown", is_dirty=commit is None)
    if commit is not None and commit != found:
        raise DirtyTree(f"--commit: expected {found} (HEAD), got {commit}")
    changes = _git("status", "--porcelain", "--", *MEASURED, "benchmarks/*.py")
    if changes and not allow_dirty:
        raise DirtyTree(f"uncommitted changes; commit them or pass --allow-dirty:\n{changes}")
    return Provenance(found, is_dirty=bool(changes))


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def sources(root: Path = ROOT) -> dict[str, str]:
    """Path -> git blob id of every Python file that a benchmark runs, relative to the root."""
    return {
        in_repository(path.relative_to(root).as_posix()): blob_id(path.read_bytes())
        for name in (*MEASURED, "benchmarks")
        for path in sorted((root / name).rglob("*.py"))
    }


def in_repository(path: str) -> str:
    """Where a source lies in the repository: pipelines and app are installed in dit_graphs."""
    for name in ("pipelines", "app"):
        if path.startswith(f"dit_graphs/{name}/"):
            return path.removeprefix("dit_graphs/")
    return path


def _arguments() -> list[str]:
    """The command line without the folders of the machine it ran on."""
    return [Path(text).name if text.startswith("/") else text for text in sys.argv[1:]]


def blob_id(content: bytes) -> str:
    """The name git gives this content, computed without git."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def machine() -> dict[str, object]:
    """GPU, driver, versions. Empty GPU fields where there is none."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    found: dict[str, object] = {
        "python": platform.python_version(),
        "versions": versions,
        "cuda": torch.version.cuda,
        "cpus": os.cpu_count(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "num_gpus": torch.cuda.device_count(),
            "gpu_memory_bytes": properties.total_memory,
            "driver": _driver(),
        }
    return found


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None


def run_record(
    script: str,
    rows: list[dict[str, object]],
    *,
    provenance: Provenance,
    clocks: dict[str, object] | None = None,
) -> dict[str, object]:
    """One run as it stands in a file. `script` is the module's path, e.g. benchmarks/forward.py."""
    return {
        "script": script,
        "argv": _arguments(),
        "commit": provenance.commit,
        "is_dirty": provenance.is_dirty,
        "sources": sources(),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "clocks": clocks or {},
        "rows": rows,
    }


def write(name: Path, run: dict[str, object]) -> Path:
    """Adds the run to benchmarks/results/NAME (or to an absolute path) and returns the path.

    Every row needs a `key`. A row of the same key by an older run is replaced, and a run whose rows
    are all replaced leaves the file: what stands there was measured last.
    """
    path = FOLDER / name
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"runs": merged(runs, run)}, indent=1) + "\n")
    return path


def merged(runs: list[dict[str, object]], new: dict[str, object]) -> list[dict[str, object]]:
    """The runs with those rows of older ones dropped that the new one measured again."""
    keys = {row["key"] for row in _rows(new)}
    kept = []
    for run in runs:
        rows = [row for row in _rows(run) if row["key"] not in keys]
        if rows:
            kept.append({**run, "rows": rows})
    return [*kept, new]


def _rows(run: dict[str, object]) -> list[dict[str, object]]:
    rows = run["rows"]
    assert isinstance(rows, list)
    return rows
