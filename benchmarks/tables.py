"""The rows of a benchmark as aligned text. Knows nothing of what was measured.

The surprising fact: a value that was not measured is a dash and never a zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["Column", "table"]

Column = tuple[str, str, str]  # key of the row, title, format


def table(rows: Iterable[Mapping[str, object]], columns: Iterable[Column]) -> str:
    """One line per row under the titles; lists are joined by semicolons."""
    columns = tuple(columns)
    lines = [[title for _, title, _ in columns]]
    for row in rows:
        lines.append([_cell(row.get(key), form) for key, _, form in columns])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def _cell(value: object, form: str) -> str:
    if isinstance(value, list):
        value = "; ".join(map(str, value))
    return "-" if value in (None, "") else form.format(value)
