"""Owns the slots: static keys and values of every layer, one slot per row, at fixed addresses.

Must never know models or graphs. The surprising fact: the last position of a slot is trash. Rows
that pad a bucket and left padding of a prompt write there, and no text is long enough to read it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import GraphError

__all__ = ["LayerLayout", "SlotCache"]

_generations = itertools.count(1)


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """What one layer keeps of a token."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value."""
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class SlotCache:
    """Keys and values [slots, heads, length, dim] of every layer.

    `generation` is another number for each allocation of any cache: graphs of an older one read
    memory that is no longer ours.
    """

    def __init__(self, layout: Sequence[LayerLayout], device: torch.device) -> None:
        self.layout = tuple(layout)
        self.device = device
        self.slots = 0
        self.length = 0
        self.generation = next(_generations)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._slots: Tensor | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return sum(layer.token_bytes for layer in self.layout)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot at the present length."""
        return self.token_bytes * self.length

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_bytes

    @property
    def trash(self) -> int:
        """The position nobody reads."""
        return self.length - 1

    @property
    def capacity(self) -> int:
        """Tokens one slot can hold."""
        return max(self.length - 1, 0)

    def allocate(self, slots: int, length: int) -> None:
        """Every slot is new and empty. Raises `torch.OutOfMemoryError` with nothing allocated."""
        self.release()
        try:
            with torch.inference_mode(False):
                # zeros: a masked position still enters the product, and 0 × NaN is NaN
                for layer in self.layout:
                    shape = (slots, layer.heads, length)
                    self._keys.append(self._zeros((*shape, layer.key_dim), layer.dtype))
                    self._values.append(self._zeros((*shape, layer.value_dim), layer.dtype))
                self._slots = torch.arange(slots, device=self.device)
        except torch.OutOfMemoryError:
            self.release()
            raise
        self.slots, self.length = slots, length

    def extend(self, length: int) -> None:
        """Slots are longer and hold what they held; the trash position moves to the new end.

        Raises `torch.OutOfMemoryError`: old and new slots exist side by side for a moment.
        """
        keys, values, slots, kept = self._keys, self._values, self.slots, self.length
        self._keys, self._values = [], []
        try:
            self.allocate(slots, length)
        except torch.OutOfMemoryError:
            self._keys, self._values, self.slots, self.length = keys, values, slots, kept
            self._slots = torch.arange(slots, device=self.device)
            raise
        for new, old in zip((*self._keys, *self._values), (*keys, *values), strict=True):
            new[:, :, :kept].copy_(old)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def release(self) -> None:
        """All memory is given back; graphs over it must be gone already."""
        self._keys.clear()
        self._values.clear()
        self._slots = None
        self.slots = self.length = 0
        self.generation = next(_generations)

    def write(
        self,
        layer: int,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        *,
        slots: Tensor | None = None,
    ) -> None:
        """Row i's new keys and values lie in slot i at its `positions`, int64 [B, tokens].

        `keys`, `values`: [B, heads, tokens, dim]. `slots`: int64 [B, tokens], where they differ
        from token to token.
        Raises `GraphError` for a layer the layout does not have.
        """
        if layer >= len(self._keys) or self._slots is None:
            raise GraphError(
                f"layer {layer} of {len(self._keys)}: the slots were laid out for less"
            )
        rows = self._slots[: positions.shape[0], None] if slots is None else slots
        self._keys[layer][rows, :, positions] = keys.transpose(1, 2)
        self._values[layer][rows, :, positions] = values.transpose(1, 2)

    def view(self, layer: int, rows: int, context: int) -> tuple[Tensor, Tensor]:
        """The first `context` positions of the first `rows` slots; views, nothing is copied."""
        return self._keys[layer][:rows, :, :context], self._values[layer][:rows, :, :context]

    def at(self, positions: Tensor) -> list[Tensor]:
        """Copies of what the slots hold at `positions` [B], of every layer."""
        assert self._slots is not None
        rows = self._slots[: positions.shape[0]]
        return [tensor[rows, :, positions] for tensor in (*self._keys, *self._values)]

    def poison(self, positions: Tensor) -> None:
        """The slots hold NaN at `positions` [B]; whoever attends there without writing shows it."""
        assert self._slots is not None
        rows = self._slots[: positions.shape[0]]
        for tensor in (*self._keys, *self._values):
            tensor[rows, :, positions] = float("nan")
