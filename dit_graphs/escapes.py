"""Owns the question "what has a forward left behind?": tensors it made and somebody still holds.

Must never know graphs. The surprising fact: a list in a closure, a global, a cache of another
object are out of reach of any look at the module, yet a tensor in one of them would lie in a
graph's memory after a capture, and no replay would put the next one there.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection

from torch import Tensor

from .watch import storage_key

__all__ = ["Escapes"]

_HANDED_OVER = "aten::alias"  # arguments and results of breaks reach a watched forward by this op


class Escapes:
    """The tensors that the ops of one forward made, none of them kept alive."""

    def __init__(self) -> None:
        self._made: list[tuple[weakref.ref[Tensor], str]] = []

    def note(self, tensor: Tensor, op: str) -> None:
        """The op made this tensor, or another view of what an op made."""
        self._made.append((weakref.ref(tensor), op))

    def has_left(self) -> bool:
        """Whether any is alive, be it in a cycle that nobody can reach."""
        return any(made() is not None for made, _ in self._made)

    def left(self, explained: Collection[int]) -> str | None:
        """What is held in none of the explained storages, in words."""
        gc.collect()  # cycles keep tensors that nobody can reach
        for made, op in self._made:
            tensor = made()
            if tensor is not None and storage_key(tensor) not in explained:
                shape = "x".join(map(str, tensor.shape)) or "0-dim"
                whose = "it was given" if op == _HANDED_OVER else f"{op} made"
                return f"a {shape} tensor that {whose} is still held after the forward"
        return None
