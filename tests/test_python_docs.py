"""docs/python.md names what `dit_graphs` offers, and its example runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import dit_graphs

DOCS = (Path(__file__).parent.parent / "docs" / "python.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", dit_graphs.__all__)
def test_every_public_name_is_explained(name: str) -> None:
    assert re.search(rf"`@?{name}\b", DOCS)


def test_no_row_of_the_table_names_what_is_not_there() -> None:
    rows = re.findall(r"^\| `@?(\w+)", DOCS, re.M)
    assert rows
    assert set(rows) <= set(dit_graphs.__all__)


def test_the_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCS, re.S)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "9/13" in done.stdout
