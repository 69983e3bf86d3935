"""Owns which LoRA weights a page may use: those the demo was started with and those of one folder.

Must never make a path of what was typed: names are looked up in a list. The surprising fact: only
safetensors files are offered, because other weight files are programs that run when they are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from dit_graphs.pipelines.generate import Adapter, InputError

__all__ = ["LoraShelf"]

_SUFFIX = ".safetensors"
_MAX_LINES = 8
_MAX_SCALE = 100.0
_MAX_NAMED = 12


@dataclass(frozen=True, slots=True)
class LoraShelf:
    """`start` are the weights of the command line; `folder` holds more, None where it has none."""

    start: tuple[Adapter, ...] = ()
    folder: Path | None = None

    def places(self) -> dict[str, str]:
        """Each name that may be typed, and the place it stands for."""
        found: dict[str, str] = {}
        if self.folder is not None:
            for path in sorted(self.folder.rglob(f"*{_SUFFIX}")):
                if path.is_file():
                    found[path.relative_to(self.folder).as_posix()] = str(path)
        for adapter in self.start:
            found[self._name(adapter.path)] = adapter.path
        return found

    def _name(self, place: str) -> str:
        """A file's name without its folders, with one where two share it; a hub id as it is."""
        path = Path(place)
        if not path.exists():
            return place
        same = [other for other in self.start if Path(other.path).name == path.name]
        return path.name if len(same) == 1 else f"{path.parent.name}/{path.name}"

    def adapters(self, text: str) -> tuple[Adapter, ...]:
        """The weights of one `NAME:SCALE` per line. Raises `InputError` with the names."""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if len(lines) > _MAX_LINES:
            raise InputError("lora", f"expected at most {_MAX_LINES} lines, got {len(lines)}")
        places = self.places()
        return tuple(_adapter(line, places) for line in lines)

    def line(self, adapter: Adapter) -> str | None:
        """What is typed to get `adapter`; None where the page does not offer it."""
        for name, path in self.places().items():
            # compared as words: the adapter may come from a forged record
            if adapter.path in (path, _absolute(path)):
                return f"{name}:{adapter.scale:g}"
        return None

    def words(self) -> str:
        """One sentence for the field: what can be typed."""
        names = list(self.places())
        if not names:
            return _NO_FOLDER if self.folder is None else _EMPTY_FOLDER
        shown = ", ".join(names[:_MAX_NAMED])
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        return f"One NAME:SCALE per line. Offered: {shown}{more}."


_NO_FOLDER = "None offered: start the demo with --lora-dir to offer the files of a folder."
_EMPTY_FOLDER = f"None offered: the folder of --lora-dir holds no {_SUFFIX} files."


def _adapter(line: str, places: dict[str, str]) -> Adapter:
    name, colon, scale = line.rpartition(":")
    if line in places or not colon:
        name, scale = line, "1"
    name = name.strip()
    place = places.get(name) or places.get(name + _SUFFIX)
    if place is None:
        names = ", ".join(list(places)[:_MAX_NAMED])
        offered = f"expected one of {names}" if places else "no LoRA weights are offered here"
        raise InputError("lora", f"{offered}, got {line[:80]!r}")
    try:
        strength = float(scale)
    except ValueError:
        strength = math.nan
    if not abs(strength) <= _MAX_SCALE:
        raise InputError("lora", f"expected NAME:SCALE with a number as SCALE, got {line[:80]!r}")
    return Adapter(place, strength)


def _absolute(place: str) -> str:
    return str(Path(place).resolve()) if Path(place).exists() else place
