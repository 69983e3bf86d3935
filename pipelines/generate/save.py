"""Owns how finished files appear: whole or not at all, under names that nothing else has.

Must never overwrite a file or leave half of one. The surprising fact: a name is taken by linking
the finished temporary file to it, which fails if another process was quicker.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import InputError
from .inputs import file_sha256
from .media import Medium
from .request import Json

__all__ = ["check_output", "save_media", "slug"]

_MEDIA_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".mp4", ".wav")
_MAX_SLUG = 48
_MAX_TRIES = 100_000


def check_output(folder: Path) -> None:
    """Files can be put into `folder`, which is made with the first of them.

    A file, a name like a file's, or a place that cannot be written to raises `InputError`.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError("output", f"expected a folder, and {str(folder)!r} is a file")
    if folder.is_symlink() and not folder.exists():
        raise InputError("output", f"expected a folder, and {str(folder)!r} is a link to nothing")
    if not folder.exists() and folder.suffix.lower() in _MEDIA_SUFFIXES:
        raise InputError("output", f"expected a folder, not a file name: {str(folder)!r}")
    place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not place.is_dir():
        raise InputError("output", f"expected a folder, and {str(place)!r} is a file")
    try:
        # Asked for by doing it: permissions say nothing of full, read-only and virtual disks.
        with tempfile.TemporaryDirectory(prefix=".", dir=place) as trial:
            (Path(trial) / "file").write_bytes(b"0")
    except OSError as error:
        why = error.strerror or str(error)
        raise InputError("output", f"{str(place)!r} cannot be written to: {why}") from error


def slug(text: str | None) -> str:
    """A file name's readable part: `A red  heart!` becomes `a-red-heart`."""
    words = re.sub(r"[^\w]+", "-", (text or "").lower()).strip("-")
    return words[:_MAX_SLUG].rstrip("-") or "item"


def save_media(
    media: Sequence[Medium],
    folder: Path,
    stem: str,
    *,
    fps: int,
    sample_rate: int,
    text: str,
    sidecar: Mapping[str, Json],
) -> tuple[list[Path], Path]:
    """(media files, sidecar) as they now lie in `folder`, named `stem` or `stem-2`, `stem-3`, …

    The sidecar is written last and names the files with their hashes: a file with a sidecar is
    complete. An error or an interrupt leaves nothing behind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(4)
    temporary = [folder / f".{stem}.{mark}{m.label}{m.suffix}" for m in media]
    note = folder / f".{stem}.{mark}.json"
    published: list[Path] = []
    complete = False
    try:
        for medium, path in zip(media, temporary, strict=True):
            medium.write(path, fps=fps, sample_rate=sample_rate, text=text)
        hashes = [file_sha256(path) for path in temporary]
        for number in range(1, _MAX_TRIES):
            name = stem if number == 1 else f"{stem}-{number}"
            finals = [folder / f"{name}{m.label}{m.suffix}" for m in media]
            final_note = folder / f"{name}.json"
            if any(path.exists() for path in (*finals, final_note)):
                continue
            files: list[Json] = [
                {"name": path.name, "sha256": digest, **medium.describe()}
                for path, digest, medium in zip(finals, hashes, media, strict=True)
            ]
            _write_json(note, {**sidecar, "files": files})
            if _publish([*zip(temporary, finals, strict=True), (note, final_note)], published):
                complete = True
                return finals, final_note
        raise InputError("output", f"{str(folder)!r} holds too many files called {stem}")
    finally:
        for path in (*temporary, note, *(() if complete else published)):
            path.unlink(missing_ok=True)


def _publish(pairs: Sequence[tuple[Path, Path]], published: list[Path]) -> bool:
    """Give every temporary file its final name, or none of them."""
    for source, target in pairs:
        if not _link(source, target):
            while published:
                published.pop().unlink(missing_ok=True)
            return False
        published.append(target)
    return True


def _link(source: Path, target: Path) -> bool:
    """Whether `target` now is `source`; False where the name was taken meanwhile."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError:
        # A file system without links: an empty file takes the name until the whole one is there.
        try:
            target.touch(exist_ok=False)
        except FileExistsError:
            return False
        try:
            os.replace(source, target)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
    return True


def _write_json(path: Path, value: Mapping[str, Json]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
        file.write("\n")
