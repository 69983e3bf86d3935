"""Two pages of docs keep their word: each problem in the list and each line of the table has tests.

Reads text only. The surprising fact: the list is checked both ways, so a test named after a row
that nobody wrote down fails as well.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NUM_ROWS = 71
ROW = re.compile(
    r"^\| (?P<row>B\d\d) \| (?P<what>.+?) \| (?P<where>.+?) \| (?P<tests>.+?) \|$", re.M
)
NAMED = re.compile(r"^\s*(?:async )?def (test_\w+)\(", re.M)


@cache
def _tests() -> dict[str, set[str]]:
    """Test function -> the files that define it, relative to tests/."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in NAMED.findall(path.read_text()):
            found.setdefault(name, set()).add(path.relative_to(ROOT / "tests").as_posix())
    return found


def _files_of(row: str) -> set[str]:
    """Where tests named after this row are; a name may hold several rows."""
    number = row.lower()
    names = [name for name in _tests() if re.match(rf"test_(b\d\d_)*{number}_", name)]
    return {file for name in names for file in _tests()[name]}


def _rows() -> dict[str, str]:
    text = (ROOT / "docs" / "known-problems.md").read_text()
    return {match["row"]: match["tests"] for match in ROW.finditer(text)}


def test_every_known_problem_is_in_the_list_once() -> None:
    text = (ROOT / "docs" / "known-problems.md").read_text()
    found = [match["row"] for match in ROW.finditer(text)]
    assert len(found) == len(set(found)) == NUM_ROWS
    assert found == sorted(found)


@pytest.mark.parametrize("row", sorted(_rows()))
def test_a_row_names_the_files_of_its_tests_or_says_why_there_is_none(row: str) -> None:
    cell = _rows()[row]
    if cell.startswith("not yet: "):
        assert not _files_of(row), "there is a test now: name its file"
        return
    assert set(re.findall(r"`([^`]+)`", cell)) == _files_of(row)


def test_no_test_is_named_after_a_row_that_is_not_in_the_list() -> None:
    named = {row for name in _tests() for row in re.findall(r"(?<=_)b\d\d(?=_)", name)}
    assert named <= {row.lower() for row in _rows()}


def test_every_line_of_the_compatibility_page_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    lines = [line for line in lines if not re.match(r"\| (what|order|setting|kernel)\b", line)]
    assert len(lines) >= 40
    for line in lines:
        names = re.findall(r"`(test_\w+)`", line)
        assert names, f"no test: {line}"
        assert set(names) <= set(_tests()), f"unknown test: {line}"
    everywhere = set(re.findall(r"`(test_\w+)`", text))
    assert everywhere <= set(_tests()), everywhere - set(_tests())
