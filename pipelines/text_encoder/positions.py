"""Owns how a model numbers the tokens it writes, ahead of time.

Must never know slots or graphs. The surprising fact: not every model counts by one. GLM-Image
writes pictures, and its tokens are numbered by row and column of a table it makes while it reads
the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from dit_graphs.errors import Reason

from .arguments import Asked, Refused

__all__ = ["PositionTable", "decode_positions"]


@dataclass(frozen=True, slots=True)
class PositionTable:
    """`read()`: int64 [P, B, n], valid once the prompt was read; see `llm.Prompt`."""

    shape: tuple[int, int]
    is_flat: bool
    read: Callable[[], Tensor]


def decode_positions(
    module: nn.Module, model_kwargs: Mapping[str, object], asked: Asked, width: int
) -> PositionTable:
    """The numbers of the tokens to be written after a prompt of `width` columns.

    Raises `Refused` where the given numbers are those of another batch.
    """
    rows = len(asked.lengths)
    inner = getattr(module, "model", None)
    if hasattr(inner, "_cached_decode_position_ids"):
        return PositionTable(
            (3, asked.max_new_tokens), False, lambda: _picture_table(inner, rows, width)
        )
    given = model_kwargs.get("position_ids")
    if not isinstance(given, Tensor):
        following = torch.tensor(asked.lengths, dtype=torch.int64, device="cpu")[None, :, None]
        return PositionTable((1, 1), True, lambda: following)
    is_flat = given.dim() == 2
    last = (given[None] if is_flat else given)[..., -1:] + 1
    if last.shape[1] not in (1, rows):
        raise Refused(Reason.GENERATE_ARGUMENT, "position ids of another number of rows")
    table = last.expand(last.shape[0], rows, 1)
    return PositionTable((table.shape[0], 1), is_flat, lambda: table)


def _picture_table(inner: object, rows: int, width: int) -> Tensor:
    cached = cast("Tensor | None", getattr(inner, "_cached_decode_position_ids", None))
    if cached is None:
        return torch.full((3, rows, 1), width, dtype=torch.int64, device="cpu")
    return cached.permute(1, 0, 2)
