"""Owns the small words of the page: escaped text, milliseconds, bytes, tables.

Must never hold state. The surprising fact: every string that came from a user or a library passes
`text` before it meets a tag; markup is never assembled from anything else.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence

from PIL import Image

__all__ = ["bytes_words", "data_uri", "millis", "plural", "table", "text"]


def text(value: object) -> str:
    """`value` as text that is safe between tags and inside attributes."""
    return html.escape(str(value), quote=True)


def millis(value: float | None) -> str:
    """`0.42 ms`, `42 ms`, `1.24 s`; a dash where it was not measured."""
    if value is None:
        return "–"
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2f} ms"


def bytes_words(value: int) -> str:
    """`512 KiB`, `72.4 MiB`, `1.02 GiB`."""
    if value >= 1 << 30:
        return f"{value / (1 << 30):.2f} GiB"
    if value >= 1 << 20:
        return f"{value / (1 << 20):.1f} MiB"
    return f"{value / (1 << 10):.0f} KiB"


def plural(number: int, word: str) -> str:
    """`1 call`, `2 calls`."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in a box that scrolls, also by keyboard; cells are markup already."""
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in heads)
    body = "".join(
        "<tr>" + "".join(_cell(index, cell) for index, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="dg-scroll" role="region" tabindex="0" aria-label="{text(caption)}">'
        f'<table class="dg-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _cell(index: int, cell: str) -> str:
    return f'<th scope="row">{cell}</th>' if index == 0 else f"<td>{cell}</td>"


def data_uri(picture: Image.Image, *, is_small: bool = False) -> str:
    """The picture inside the page itself; `is_small` trades detail for bytes."""
    buffer = io.BytesIO()
    if is_small:
        picture.convert("RGB").save(buffer, format="WEBP", quality=70)
        kind = "webp"
    else:
        picture.save(buffer, format="PNG")
        kind = "png"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
