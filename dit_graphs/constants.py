"""Owns host-built constants: what a forward copies from Python to the device on every call.

Must never know modules or graphs. The surprising fact: constants are found again by source line,
occurrence and *bytes*, never by call order, because lazy caches make the second call shorter
than the first.
"""

from __future__ import annotations

import sys
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .errors import CaptureAborted, Reason
from .tree import map_tensors

__all__ = ["Constant", "ConstantTable", "Occurrences", "caller_location", "host_bytes"]

_SKIPPED = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def caller_location() -> str:
    """`file:line` of the innermost frame outside torch and this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def host_bytes(source: Tensor) -> bytes:
    """The bytes of a CPU tensor, in index order."""
    with _disable_current_modes():
        flat = source.detach().resolve_conj().contiguous().reshape(-1)
        return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


class Occurrences:
    """How often each source line built a constant in one pass."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def next(self, location: str) -> tuple[str, int]:
        """The key of the next constant built at `location`."""
        count = self._counts.get(location, 0)
        self._counts[location] = count + 1
        return (location, count)


@dataclass(slots=True)
class Constant:
    """One constant: the bytes it was made from and the device tensor it became."""

    source: bytes
    dtype: torch.dtype
    value: Tensor
    written: bool = False


@dataclass(slots=True)
class KnownRead:
    """What the observed pass read of values that the signature determines, and by which op."""

    name: str
    value: object
    written: bool = False


@dataclass(slots=True)
class ConstantTable:
    """Constants of one observed forward; filled by an observer, read by captures."""

    entries: dict[tuple[str, int], Constant] = field(default_factory=dict)
    reads: dict[tuple[str, int], KnownRead] = field(default_factory=dict)

    def record(self, key: tuple[str, int], source: Tensor, result: Tensor) -> None:
        """Remembers `result` (on the device) as built from `source` (on the host)."""
        raw = host_bytes(source)
        with _disable_current_modes():
            value = result.detach().clone()
        self.entries[key] = Constant(raw, result.dtype, value)

    def note_write(self, key: tuple[str, int]) -> None:
        """The forward writes into this constant: captures get a copy made inside the graph."""
        found = self.entries.get(key) or self.reads[key]
        found.written = True

    def recall(self, key: tuple[str, int], source: Tensor) -> Tensor:
        """The device tensor recorded under `key`.

        Raises `CaptureAborted` where none was recorded or `source` has other bytes now.
        """
        entry = self.entries.get(key)
        if entry is None:
            raise CaptureAborted(Reason.CONSTANT_CHANGED, f"not seen before: {key[0]}")
        if entry.source != host_bytes(source):
            raise CaptureAborted(Reason.CONSTANT_CHANGED, f"other bytes than observed: {key[0]}")
        return entry.value.clone() if entry.written else entry.value

    def record_read(self, key: tuple[str, int], name: str, value: object) -> None:
        """Remembers what op `name` read; `value` is copied."""
        self.reads[key] = KnownRead(name, _copied(value))

    def recall_read(self, key: tuple[str, int], name: str) -> object:
        """What op `name` read in the observed pass, for the caller to keep.

        Raises `CaptureAborted` where it read nothing there.
        """
        entry = self.reads.get(key)
        if entry is None or entry.name != name:
            raise CaptureAborted(Reason.CONSTANT_CHANGED, f"{name} not seen before: {key[0]}")
        return _copied(entry.value, clone=entry.written)


def _copied(value: object, *, clone: bool = True) -> object:
    """`value` in containers of its own, its tensors cloned or not."""
    if type(value).__module__ == "numpy":
        return copy(value)
    if not isinstance(value, (Tensor, tuple, list)):
        return value
    return map_tensors(value, Tensor.clone if clone else _same)


def _same(tensor: Tensor) -> Tensor:
    return tensor
