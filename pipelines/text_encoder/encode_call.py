"""Owns how a call of a text encoder becomes one that can be captured: `EncodeCall`.

Must never know graphs. The surprising fact: a bucketed call pads on the right whatever side the
tokenizer pads on. A causal token never looks right, so real tokens see what they saw.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.utils import ModelOutput

from dit_graphs.llm.buckets import prompt_bucket

from .masks import MaskArgument, build_masks, cache_argument, is_all_ones

__all__ = ["CACHES", "KV_LAYOUT", "EncodeCall", "EncoderForm", "cut", "without_cache"]

CACHES = ("cache", "past_key_values")
KV_LAYOUT = "kv_layout"  # an argument of no model: how the passing cache lays out keys
_PLAIN = frozenset(
    {"input_ids", "attention_mask", "position_ids", "use_cache", "return_dict"}
    | {"output_hidden_states", "output_attentions"}
)


@dataclass(frozen=True, slots=True, eq=False)
class EncodeCall:
    """One call: as it was made (`args`, `kwargs`) and as a graph serves it (`ready`).

    `tokens`: columns of the caller's batch; `bucket`: columns of the graph's, more where padded.
    """

    args: tuple[object, ...]
    kwargs: dict[str, object]
    ready: dict[str, object]
    ids: Tensor
    mask: Tensor | None
    tokens: int
    bucket: int

    @property
    def is_padded(self) -> bool:
        """Whether the graph's batch is wider than the caller's."""
        return self.bucket != self.tokens


class EncoderForm:
    """What one encoder's forward takes; turns calls into `EncodeCall`s."""

    def __init__(self, module: nn.Module, ladder: tuple[int, ...] | None) -> None:
        self.module = module
        self.cache_name = cache_argument(type(module).forward)
        self.is_encoder = type(module).__name__.endswith("EncoderModel")
        self.ladder = ladder if self.is_encoder or self.cache_name is not None else None
        self._names = tuple(inspect.signature(type(module).forward).parameters)[1:]

    def read(self, args: tuple[object, ...], kwargs: dict[str, object]) -> EncodeCall | None:
        """The call, ready; None where it is not a plain encode (pictures, embeddings, a cache)."""
        if len(args) > len(self._names):
            return None
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        plain = {name: value for name, value in given.items() if value is not None}
        ids, mask = plain.get("input_ids"), plain.pop("attention_mask", None)
        if not set(plain) <= _PLAIN or not isinstance(ids, Tensor) or ids.dim() != 2:
            return None
        if plain.get("use_cache") or not (mask is None or _is_mask(mask, ids)):
            return None
        if plain.get("return_dict") is False:  # a tuple does not say which part is the cache
            return None
        made, states = dict(kwargs), plain.get("output_hidden_states", False)
        if "logits_to_keep" in self._names and states is True:
            made["logits_to_keep"] = plain["logits_to_keep"] = 1
        tokens, given_mask = ids.shape[1], cast("Tensor | None", mask)
        has_states = "logits_to_keep" not in self._names or "logits_to_keep" in made
        # states may be chosen by number; attentions have padded rows and columns
        is_plain = isinstance(states, bool) and not plain.get("output_attentions")
        bucket = self._bucket(tokens) if has_states and is_plain else tokens
        mask = self._pad(plain, given_mask, bucket - tokens) if bucket != tokens else given_mask
        if mask is not None and not is_all_ones(mask):
            masks = self._masks(mask)
            if masks is None:
                return None
            plain["attention_mask"] = masks
        plain[KV_LAYOUT] = self._kv_layout(plain)
        if self.cache_name is not None:
            plain["use_cache"] = False
        return EncodeCall(args, made, plain, ids, given_mask, tokens, bucket)

    def _bucket(self, tokens: int) -> int:
        if self.ladder is None:
            return tokens  # exact mode keeps the pipeline's own padding
        return prompt_bucket(tokens, self.ladder) or tokens

    def _pad(self, plain: dict[str, object], mask: Tensor | None, extra: int) -> Tensor:
        """Ids and positions get `extra` columns on the right; returns the mask of all columns."""
        ids = cast(Tensor, plain["input_ids"])
        pad = getattr(self.module.config, "pad_token_id", None)
        plain["input_ids"] = functional.pad(
            ids, (0, extra), value=pad if isinstance(pad, int) else 0
        )
        positions = plain.get("position_ids")
        if isinstance(positions, Tensor):
            plain["position_ids"] = functional.pad(positions, (0, extra))
        if mask is None:
            mask = torch.ones_like(ids)
        return functional.pad(mask, (0, extra))

    def _masks(self, mask: Tensor) -> MaskArgument:
        try:
            return build_masks(self.module, mask, is_encoder=self.is_encoder)
        except (ValueError, AttributeError, TypeError):  # a model whose masks are its own
            return None

    def _kv_layout(self, plain: Mapping[str, object]) -> str | None:
        """How the unmodified encoder would lay out keys: "stored" where it fills a cache."""
        if self.cache_name is None:
            return None
        config = getattr(self.module.config, "text_config", None) or self.module.config
        return "stored" if plain.get("use_cache", getattr(config, "use_cache", None)) else "plain"


def _is_mask(mask: object, ids: Tensor) -> bool:
    return isinstance(mask, Tensor) and mask.shape == ids.shape


def without_cache(output: object) -> object:
    """A model's output without its KV cache, which no pipeline reads."""
    if not isinstance(output, ModelOutput):
        return output
    # not `name in output`: transformers 5.24 warns its user about the old name
    kept = {name: value for name, value in output.items() if name not in CACHES}
    return output if len(kept) == len(output) else cast(object, type(output)(**kept))


def cut(output: object, tokens: int, bucket: int) -> object:
    """A bucketed output for the caller's columns; logits, the padding's, are left out."""

    def columns(value: object) -> object:
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == bucket:
            return value[:, :tokens].contiguous()
        if isinstance(value, tuple):
            return tuple(map(columns, value))
        return value

    if isinstance(output, ModelOutput):
        kept = {n: columns(v) for n, v in output.items() if n not in ("logits", "attentions")}
        return cast(object, type(output)(**kept))
    return columns(output)
