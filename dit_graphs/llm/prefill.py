"""Owns how a pass stores keys and values: a prompt's into its slots, a step's at its positions.

Must never know models. The surprising fact: a prompt attends over its own pass, not over the
slots, so its kernels and bits are those of a pass without any cache; only what is stored differs:
left padding falls away and every row starts at position 0 of its slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .kv import SlotCache

__all__ = ["PromptStore", "StepStore", "prompt_positions"]


def prompt_positions(
    lengths: Sequence[int], width: int, trash: int, device: torch.device
) -> Tensor:
    """Where each column of a left-padded batch is stored: int64 [B, width]."""
    starts = torch.tensor([width - n for n in lengths], dtype=torch.int64, device="cpu")
    columns = torch.arange(width, device="cpu")[None, :] - starts[:, None]
    return torch.where(columns < 0, trash, columns).to(device)


class PromptStore:
    """Stores a prompt's keys and values; attention sees those of this pass."""

    def __init__(self, cache: SlotCache, positions: Tensor) -> None:
        self.cache = cache
        self.positions = positions

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps them; returns them laid out as a growing cache would."""
        self.cache.write(layer, keys, values, self.positions)
        return keys.contiguous(), values.contiguous()


class StepStore:
    """Stores the current tokens' keys and values; attention sees the first `context` positions."""

    def __init__(self, cache: SlotCache, positions: Tensor, context: int) -> None:
        self.cache = cache
        self.positions = positions
        self.context = context

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps them; returns views of the slots."""
        self.cache.write(layer, keys, values, self.positions)
        return self.cache.view(layer, self.positions.shape[0], self.context)
