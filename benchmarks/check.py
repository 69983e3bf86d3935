"""Every number that README and docs take from a measurement stands in its result file.

Owns the two marks that tie prose to a file, and nothing else of the prose:

- a link to a file, `[2.29x](benchmarks/results/forward.json#z-image 512)`: every number in the text
  of the link; the part after `#` (percent-encoded or in <>) restricts the search to rows whose key
  contains it;
- a comment line `<!-- results: forward.json pipeline.json -->` straight above a table: every number
  in the table's cells, the header row and the first column aside.

The surprising fact: a number is compared at the precision it is written with, so "2.3x" stands for
anything that rounds to it, and rows measured on uncommitted sources count for nothing.

    python -m benchmarks.check

Exits 1 on a number without a row, and on a run whose sources are not those of the commit it names.
Lists the runs whose sources have changed since; that is no failure.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from benchmarks import results

LINK = re.compile(r"\[(?P<text>[^\]]*)\]\(<?(?P<path>[^)#>]*?)(?:#(?P<row>[^)>]*))?>?\)")
TABLE = re.compile(r"^<!-- results: (?P<names>[^>]+?) -->\n(?P<table>(?:\|.*\n?)+)", re.M)
# Not part of a word, a version, a picture size (512², 256x448) or a longer number.
NUMBER = re.compile(
    r"(?<![\w.,×²-])(?P<number>\d[\d,]*(?:\.\d+)?)(?![\d²]|\.\d|[x×]\d)"
    r"\s*(?P<unit>GiB|MiB|GB|MB|ms|µs|s\b|x\b|×|%)?"
)
SCALES: dict[str, tuple[float, ...]] = {
    "%": (100.0,),
    "GiB": (2.0**-30,),
    "MiB": (2.0**-20,),
    "GB": (1e-9,),
    "MB": (1e-6,),
    "µs": (1e3,),
    "s": (1.0, 1e-3),
}


@dataclass(frozen=True, slots=True)
class Claim:
    """A number in a text and where it should come from."""

    where: str
    number: str
    unit: str
    files: tuple[str, ...]
    row: str = ""

    def __str__(self) -> str:
        source = " or ".join(self.files) + (f" row {self.row!r}" if self.row else "")
        return f"{self.where}: {self.number}{self.unit} is not in {source}"


def claims(path: Path, text: str) -> Iterator[Claim]:
    """Every number of the text that is marked as measured."""
    for link in LINK.finditer(text):
        folder, _, name = link["path"].rpartition("/")
        if folder.endswith("benchmarks/results") and name.endswith(".json"):
            where = f"{path}:{text.count(chr(10), 0, link.start()) + 1}"
            for found in NUMBER.finditer(link["text"]):
                row = unquote(link["row"] or "")
                yield Claim(where, found["number"], found["unit"] or "", (name,), row)
    for block in TABLE.finditer(text):
        names = tuple(block["names"].split())
        first_line = text.count("\n", 0, block.start("table")) + 1
        for offset, line in enumerate(block["table"].splitlines()[2:], start=2):
            cells = line.strip().strip("|").split("|")[1:]
            for found in (match for cell in cells for match in NUMBER.finditer(cell)):
                where = f"{path}:{first_line + offset}"
                yield Claim(where, found["number"], found["unit"] or "", names)


def is_in(claim: Claim, runs: list[dict[str, object]]) -> bool:
    """Whether a row of a clean run holds the number, at the precision it is written with."""
    wanted = float(claim.number.replace(",", ""))
    decimals = len(claim.number.partition(".")[2])
    tolerance = 0.5 * 10**-decimals * (1 + 1e-9)
    return any(
        abs(value * scale - wanted) <= tolerance
        for run in runs
        if not run["is_dirty"]
        for row in _rows(run)
        if claim.row in str(row["key"])
        for value in _numbers(row)
        for scale in SCALES.get(claim.unit, (1.0,))
    )


def _rows(run: dict[str, object]) -> list[dict[str, object]]:
    rows = run["rows"]
    assert isinstance(rows, list)
    return rows


def _numbers(value: object) -> Iterator[float]:
    """Numbers anywhere in a row; lists are raw samples, among which anything could be found."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _numbers(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def changed_sources(run: dict[str, object], now: dict[str, str]) -> list[str]:
    """The measured files that differ now; other benchmarks than the run's own do not count."""
    then = run["sources"]
    assert isinstance(then, dict)
    measured = {path for path in {*then, *now} if path.startswith(results.MEASURED)}
    return sorted(
        path for path in {*measured, str(run["script"])} if then.get(path) != now.get(path)
    )


def misattributed(run: dict[str, object], root: Path) -> list[str]:
    """The sources of a clean run that its commit does not have; empty where it is unknown here."""
    if run["is_dirty"]:
        return []
    command = ["git", "-C", str(root), "ls-tree", "-r", str(run["commit"])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return []
    tree = {
        path: entry.split()[2]
        for entry, _, path in (line.partition("\t") for line in done.stdout.splitlines())
    }
    then = run["sources"]
    assert isinstance(then, dict)
    return sorted(
        path for path, blob in then.items() if tree.get(results.in_repository(path)) != blob
    )


def load(folder: Path) -> dict[str, list[dict[str, object]]]:
    """File name -> its runs."""
    return {
        path.name: json.loads(path.read_text())["runs"] for path in sorted(folder.glob("*.json"))
    }


def check(root: Path) -> tuple[list[str], list[str]]:
    """Failures and remarks, as lines to print."""
    files = load(root / "benchmarks" / "results")
    failures, remarks = [], []
    num_claims = 0
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        for claim in claims(path.relative_to(root), path.read_text()) if path.exists() else ():
            num_claims += 1
            missing = [name for name in claim.files if name not in files]
            if missing:
                failures.append(f"{claim.where}: there is no benchmarks/results/{missing[0]}")
            elif not any(is_in(claim, files[name]) for name in claim.files):
                failures.append(str(claim))
    now = results.sources(root)
    for name, runs in files.items():
        for run in runs:
            label = f"{name}, run of {run['finished']} at {str(run['commit'])[:12]}"
            if run["is_dirty"]:
                remarks.append(f"{label}: measured uncommitted sources")
            if wrong := misattributed(run, root):
                failures.append(f"{label}: that commit has another {wrong[0]}")
            if changed := changed_sources(run, now):
                remarks.append(f"{label}: stale, {len(changed)} changed since ({changed[0]}, …)")
    remarks.append(f"{num_claims} numbers checked against {len(files)} result files")
    return failures, remarks


def main() -> int:
    """Prints what was found; 1 when anything failed."""
    failures, remarks = check(results.ROOT)
    print("\n".join([*remarks, *(f"FAILED {line}" for line in failures)]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
