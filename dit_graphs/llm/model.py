"""Owns `LanguageModel`: what a model must do to be decoded from graphs.

Must never know how. The surprising fact: the model builds no mask. Which positions a token may
attend to comes in ready, per attention type, because it depends on rows, not on the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from .kv import LayerLayout

__all__ = ["KeyValueStore", "LanguageModel"]


class KeyValueStore(Protocol):
    """Where one pass puts its keys and values, and what it attends over."""

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps [B, heads, tokens, dim]; returns the keys and values to attend over."""
        ...


class LanguageModel(Protocol):
    """A decoder-only model with slots of keys and values outside itself."""

    module: nn.Module

    @property
    def windows(self) -> Mapping[str, int | None]:
        """For each attention type how far back a token looks; None: to the beginning."""
        ...

    @property
    def device(self) -> torch.device: ...

    def layout(self) -> tuple[LayerLayout, ...]:
        """One entry per layer that keeps keys and values."""
        ...

    def forget_layout(self) -> None:
        """The weights are others: `layout` and `vocabulary` are found anew when asked for."""
        ...

    @property
    def vocabulary(self) -> int:
        """Width of the logits; known after `layout()`."""
        ...

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        allowed: Mapping[str, Tensor],
        store: KeyValueStore,
    ) -> Tensor:
        """Logits [B, T, vocabulary] of `tokens` [B, T].

        `positions`: [B, T], or [P, B, T] where the model has several kinds. `allowed`: for each
        attention type of `windows` a bool mask [B, 1, T, context].
        """
        ...
