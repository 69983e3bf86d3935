"""Owns the settings inside a film: the record as one box more at the end of its MP4.

Must never touch what is played. The surprising fact: an MP4 is a row of boxes, and a player skips
those it does not know (ISO/IEC 14496-12, 4.2: `uuid` boxes are for everybody's own use), so a film
that is passed on keeps its settings as a PNG does, and no second file is needed.
"""

from __future__ import annotations

import json
import os
import struct
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from dit_graphs.pipelines.generate import InputError, Json

__all__ = ["SUFFIX", "record_text", "stamp"]

SUFFIX = ".mp4"
_OURS = uuid.uuid5(uuid.NAMESPACE_URL, "dit-graphs:record").bytes
_SHORT = struct.Struct(">I4s")  # size of the box with this head, kind
_LONG = struct.Struct(">Q")  # the size, where the short one is 1
_MAX_BOXES = 10_000
_MAX_RECORD_BYTES = 1 << 20


def stamp(path: Path, record: Mapping[str, Json]) -> None:
    """The MP4 at `path` ends with `record`; equal records give equal bytes."""
    data = _OURS + json.dumps(record, ensure_ascii=False).encode()
    with path.open("ab") as file:
        file.write(_SHORT.pack(_SHORT.size + len(data), b"uuid") + data)


def record_text(path: Path) -> str:
    """The JSON that `stamp` wrote, "" where there is none. Raises `InputError` for a broken file.

    Box after box is skipped, not read: a file may claim any size, and only ours is looked at.
    """
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(0)
        for _ in range(_MAX_BOXES):
            start = file.tell()
            if start >= end:
                return ""
            kind, body, after = _box(file, start, end)
            if kind == b"uuid" and file.read(len(_OURS)) == _OURS:
                num_bytes = after - body - len(_OURS)
                if num_bytes > _MAX_RECORD_BYTES:
                    raise InputError("from", "the record in this file is damaged")
                return file.read(num_bytes).decode("utf-8", errors="strict")
            file.seek(after)
    raise InputError("from", "this file is no MP4 that can be read")


def _box(file: BinaryIO, start: int, end: int) -> tuple[bytes, int, int]:
    """(kind, where its body starts, where the next box starts) of the box at `start`."""
    head = file.read(_SHORT.size)
    if len(head) == _SHORT.size:
        size, kind = _SHORT.unpack(head)
        if size == 1:
            wide = file.read(_LONG.size)
            size = _LONG.unpack(wide)[0] if len(wide) == _LONG.size else 0
        elif size == 0:  # "to the end of the file"
            size = end - start
        body = file.tell()
        if body <= start + size <= end:
            return kind, body, start + size
    raise InputError("from", "this file is no MP4 that can be read")
