"""Owns how a prompt becomes a pass that can be captured: masks decided, padding chosen.

Must never know graphs. The surprising fact: with a ladder a ragged batch is laid out in one of two
ways, whichever is smaller: dense rows padded on the left, or all prompts behind each other in one
row, where padding is a few tokens of nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from dit_graphs.config import GraphConfig
from dit_graphs.errors import Reason
from dit_graphs.llm.buckets import batch_bucket, prompt_bucket
from dit_graphs.llm.kv import SlotCache
from dit_graphs.llm.prefill import PromptStore

from .caches import SlotView
from .causal_lm import CausalLM
from .masks import (
    MaskArgument,
    build_masks,
    cache_argument,
    is_all_ones,
    mask_decisions_as_eager,
)
from .packed import pack

__all__ = ["PromptForm", "PromptPass"]

_PLAIN = frozenset({"attention_mask", "position_ids", "use_cache", "logits_to_keep"})
# numbers the positions of pictures; without any, transformers has numbered the text already
_OF_PICTURES = "mm_token_type_ids"

Ready = dict[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class PromptPass:
    """One prompt to read. `run()` reads it as transformers does; returns logits [B, vocabulary]."""

    ids: Tensor
    kwargs: Mapping[str, object]
    store: PromptStore
    run: Callable[[], Tensor]
    pad: int
    lengths: tuple[int, ...]


class PromptForm:
    """What one model's prompts need; turns each into the call that a graph serves."""

    def __init__(
        self, model: CausalLM, config: GraphConfig, slots: Callable[[], SlotCache]
    ) -> None:
        self.model = model
        self.module = model.module
        self.config = config
        self._slots = slots

    def read(self, prompt: PromptPass) -> Ready | tuple[Reason, str]:
        """The call a graph serves, or why there is none."""
        given = {n: v for n, v in prompt.kwargs.items() if v is not None and not _is_empty(v)}
        if "position_ids" in given:
            given.pop(_OF_PICTURES, None)
        kinds = given.pop("token_type_ids", None) if _builds_masks(self.module) else None
        other = sorted(set(given) - _PLAIN - {self.model.cache_name})
        if other:
            return Reason.GENERATE_ARGUMENT, ", ".join(other)
        limit = (self.config.max_size or {}).get("prefill")
        if limit is not None and prompt.ids.shape[1] > limit:
            detail = f"{prompt.ids.shape[1]} tokens, max_size['prefill'] is {limit}"
            return Reason.ABOVE_MAX_SIZE, detail
        if not isinstance(kinds, Tensor):
            packed = self._pack(prompt, given)
            if packed is not None:
                return packed
        ready, mask = self._dense(prompt, given)
        try:
            if isinstance(kinds, Tensor):
                masks = self._masks_with(kinds, mask, prompt)
            else:
                masks = self._masks(self._pad(ready, mask, prompt))
        except (ValueError, AttributeError, TypeError) as error:
            return Reason.UNSUPPORTED_MODEL, str(error)
        if masks is not None:
            ready["attention_mask"] = masks
        return ready

    def _dense(self, prompt: PromptPass, given: Mapping[str, object]) -> tuple[Ready, object]:
        device = self.model.device
        ready: Ready = {"input_ids": prompt.ids.to(device), "write_at": prompt.store.positions}
        positions = given.get("position_ids")
        if isinstance(positions, Tensor):
            ready["position_ids"] = positions.to(device)
        if "logits_to_keep" in given:
            ready["logits_to_keep"] = 1
        return ready, given.get("attention_mask")

    def _pack(self, prompt: PromptPass, given: Mapping[str, object]) -> Ready | None:
        """With a ladder: all prompts in one row, where that is smaller than dense rows."""
        ladder, positions = self.config.prompt_buckets, given.get("position_ids")
        rows, columns = prompt.ids.shape
        if ladder is None or rows == 1 or "logits_to_keep" not in given:
            return None
        tokens = prompt_bucket(sum(prompt.lengths), ladder)
        dense = rows * (prompt_bucket(columns, ladder) or columns)
        requests = batch_bucket(rows, max(rows, self._slots().slots))
        if tokens is None or tokens >= dense or requests is None:
            return None
        if not isinstance(positions, Tensor):
            return None
        return pack(
            prompt.ids.to(self.model.device), positions, prompt.lengths, pad=prompt.pad,
            tokens=tokens, requests=requests, trash=self._slots().trash,
        )  # fmt: skip

    def _masks(self, mask: object) -> MaskArgument:
        if not isinstance(mask, Tensor) or is_all_ones(mask):
            return None
        return build_masks(self.module, mask.to(self.model.device), is_encoder=False)

    def _masks_with(self, kinds: Tensor, mask: object, prompt: PromptPass) -> MaskArgument:
        """Masks of a model in which some tokens see each other both ways (pictures of Gemma 3)."""
        build = cast(Any, self.module).create_masks_for_generate
        rows, tokens = prompt.ids.shape
        dtype = cast(torch.dtype, self.module.dtype)
        arguments = {
            "config": self.module.config,
            "inputs_embeds": torch.empty((rows, tokens, 0), dtype=dtype, device=self.model.device),
            "attention_mask": mask.to(self.model.device) if isinstance(mask, Tensor) else None,
            "token_type_ids": kinds.to(self.model.device),
            "position_ids": None,
            "is_first_iteration": True,
            cache_argument(build) or "cache": SlotView(prompt.store),
        }
        with mask_decisions_as_eager():
            return cast(MaskArgument, build(**arguments))

    def _pad(self, ready: dict[str, object], mask: object, prompt: PromptPass) -> object:
        """With a ladder: more padding on the left, up to its next rung."""
        tokens = prompt.ids.shape[1]
        ladder = self.config.prompt_buckets
        bucket = prompt_bucket(tokens, ladder) if ladder is not None else tokens
        if bucket is None or bucket == tokens:
            return mask
        extra = bucket - tokens
        ids = cast(Tensor, ready["input_ids"])
        ready["input_ids"] = functional.pad(ids, (extra, 0), value=prompt.pad)
        trash = self._slots().trash
        ready["write_at"] = functional.pad(prompt.store.positions, (extra, 0), value=trash)
        positions = ready.get("position_ids")
        if isinstance(positions, Tensor):
            ready["position_ids"] = functional.pad(positions, (extra, 0))
        if not isinstance(mask, Tensor):
            mask = torch.ones_like(ids)
        return functional.pad(mask.to(self.model.device), (extra, 0))


def _builds_masks(module: object) -> bool:
    return callable(getattr(type(module), "create_masks_for_generate", None))


def _is_empty(value: object) -> bool:
    return isinstance(value, dict) and not value
