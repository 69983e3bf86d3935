"""Owns the packed prefill: several prompts behind each other in one row, one slot per prompt.

Must never know buckets or graphs. The surprising fact: the number of prompts is fixed in the graph,
their lengths are not. Request slots without a prompt have length zero and tokens without a prompt
belong to nobody; both are inputs, written anew on every replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dit_graphs.llm.kv import SlotCache

from .causal_lm import CausalLM

__all__ = ["pack", "run_packed"]


def pack(
    ids: Tensor, positions: Tensor, lengths: Sequence[int],
    *, pad: int, tokens: int, requests: int, trash: int,
) -> dict[str, object]:  # fmt: skip
    """The real tokens of a left-padded batch in one row of `tokens`, as arguments of `run_packed`.

    `ids`: [B, T]. `positions`: [B or 1, T] or [P, B or 1, T]. Row i goes to request slot i of
    `requests`; slots behind the last row are empty.
    """
    rows, width = ids.shape
    starts = [width - length for length in lengths]
    host = torch.device("cpu")  # by name: the default device may be any
    counts = torch.tensor(list(lengths), device=host)
    columns = torch.cat([torch.arange(s, width, device=host) for s in starts])
    owners = torch.repeat_interleave(torch.arange(rows, device=host), counts)
    extra = tokens - len(columns)
    ends = counts.cumsum(0) - 1
    device = ids.device

    def filled(values: Tensor, value: int) -> Tensor:
        return torch.nn.functional.pad(values, (0, extra), value=value)

    at, row = columns.to(device), owners.to(device)
    numbers = positions.to(device)
    numbers = numbers.expand(*numbers.shape[:-2], rows, width)[..., row, at]
    return {
        "input_ids": filled(ids[row, at], pad)[None],
        "position_ids": filled(numbers, 0).unsqueeze(-2),
        "slot_of": filled(owners, -1).to(device)[None],
        "write_at": filled(columns - (width - counts)[owners], trash).to(device)[None],
        "last": torch.nn.functional.pad(ends, (0, requests - rows)).to(device),
    }


class _PackedStore:
    """Stores each token's keys and values in its own prompt's slot; attention sees this pass."""

    def __init__(self, cache: SlotCache, slots: Tensor, positions: Tensor) -> None:
        self.cache = cache
        self.slots = slots
        self.positions = positions

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps them; returns them as they are."""
        self.cache.write(layer, keys, values, self.positions, slots=self.slots)
        return keys, values


def run_packed(model: CausalLM, cache: SlotCache, call: Mapping[str, Tensor]) -> Tensor:
    """Logits [requests, vocabulary] of each prompt's last token; see `pack`."""
    slot_of, write_at = call["slot_of"], call["write_at"]
    # tokens of nobody write to the trash position of the first slot
    store = _PackedStore(cache, slot_of.clamp(min=0), write_at)
    span = torch.arange(slot_of.shape[1], device=slot_of.device)
    same = slot_of[0, :, None] == slot_of[0, None, :]
    seen = same & (span[None, :] <= span[:, None])
    allowed = {}
    for kind, window in model.windows.items():
        near = seen if window is None else seen & (span[None, :] > span[:, None] - window)
        allowed[kind] = near[None, None]
    logits = model.step(call["input_ids"], call["position_ids"], allowed, store, keep=call["last"])
    return logits[0].float()
