"""Owns where a tensor's values come from: the host's Python, the signature, or the device.

Must never know graphs. The surprising fact: a value on the device may be read on the host inside a
recorded forward where the signature determines it. What is read then is the same on every replay,
so the observed pass reads it and a capture is handed what was read.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from torch import Tensor

from .op_traits import OpTraits, storage_key

__all__ = ["Origin", "Origins"]


class Origin(IntEnum):
    """What determines a tensor's values; of several inputs the largest counts."""

    DEVICE = 0  # inputs, weights, random numbers: another value on every call
    HOST = 1  # Python alone
    KNOWN = 2  # arguments whose part in it is in the signature, and Python


_FRESH = ("aten::lift_fresh", "aten::lift_fresh_copy")
# They take a tensor for its layout only.
_FILLED = frozenset(
    f"aten::{name}"
    for name in ("full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like")
)


class Origins:
    """The origins of the storages one watched forward has touched."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[int, Origin] = {}

    def of(self, tensor: Tensor) -> Origin:
        """The origin of this tensor's storage; DEVICE for one never seen."""
        key = storage_key(tensor)
        if not key:  # no memory of its own: nothing to read, or a wrapper whose parts have it
            return Origin.DEVICE if tensor.numel() else Origin.HOST
        return self._found.get(key, Origin.DEVICE)

    def set(self, tensor: Tensor, origin: Origin) -> None:
        """The tensor's values have this origin from now on."""
        key = storage_key(tensor)
        if origin is Origin.DEVICE:
            self._found.pop(key, None)
        elif key:
            self._found[key] = origin

    def of_all(self, tensors: Iterable[Tensor]) -> Origin:
        """What determines all these tensors together."""
        found = Origin.HOST
        for tensor in tensors:
            origin = self.of(tensor)
            if origin is Origin.DEVICE:
                return Origin.DEVICE
            found = max(found, origin)
        return found

    def note(
        self,
        traits: OpTraits,
        given: Iterable[Tensor],
        written: Iterable[Tensor],
        made: Iterable[Tensor],
    ) -> None:
        """The op has run: its outputs, new or written in place, have its inputs' origin."""
        if traits.name in _FRESH or traits.name in _FILLED:
            origin = Origin.HOST
        elif traits.is_random:
            origin = Origin.DEVICE
        else:
            origin = self.of_all(given)
        for tensor in made:
            self.set(tensor, origin)
        for tensor in written:
            self.set(tensor, origin)
