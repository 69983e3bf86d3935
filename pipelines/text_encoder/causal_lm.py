"""Owns `CausalLM`: a transformers model as `dit_graphs.llm` wants it, one step over slots.

Must never know graphs. The surprising fact: nothing of the model is re-implemented. A step is the
model's own forward with a cache object and masks that are ready, so heads, soft caps, rotary
tables and image models around the text part are the model's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import cast

import torch
from torch import Tensor, nn

from dit_graphs.errors import CaptureAborted, Reason
from dit_graphs.llm import LayerLayout
from dit_graphs.llm.model import KeyValueStore

from .attention import one_token_attention
from .caches import SlotView
from .masks import cache_argument, layer_windows, mask_decisions_as_eager, text_config

__all__ = ["CausalLM", "why_not"]

_ATTENTION = ("sdpa", "eager")


def why_not(module: nn.Module) -> str | None:
    """Why this model cannot be decoded over slots, in words; None where it can."""
    config = text_config(module)
    kind = type(module).__name__
    if getattr(module.config, "is_encoder_decoder", False):
        return f"{kind} is an encoder-decoder"
    if cache_argument(type(module).forward) is None:
        return f"{kind} takes no KV cache"
    if layer_windows(config) is None:
        return f"attention types {sorted(set(getattr(config, 'layer_types', ())))}"
    if getattr(config, "attention_chunk_size", None):
        return "attention in chunks"
    if getattr(config, "use_bidirectional_attention", None):
        return "text attention is bidirectional"
    attention = getattr(config, "_attn_implementation", None)
    if attention not in _ATTENTION:
        return f"attention {attention!r}; sdpa and eager can be decoded over slots"
    if _drops_out(module):
        return f"{kind} is in training mode with dropout, which depends on padding; call its eval()"
    if torch.is_autocast_enabled(next(module.parameters()).device.type):
        return "under autocast keys and values have several types"
    return None


def _drops_out(module: nn.Module) -> bool:
    """Whether a pass draws what it leaves out: other numbers for another width of the batch."""
    owners: list[object] = [text_config(module)] if module.training else []
    owners += (child for child in module.modules() if child.training)
    for owner in owners:
        rates = {name: rate for name, rate in vars(owner).items() if "drop" in name}
        if isinstance(owner, nn.modules.dropout._DropoutNd):
            rates["p"] = owner.p
        if any(isinstance(rate, (int, float)) and rate > 0 for rate in rates.values()):
            return True
    return False


class _LayoutProbe:
    """Stores nothing; remembers the layout of every layer's keys and values."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerLayout] = {}

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.layers[layer] = LayerLayout(
            keys.shape[1], keys.shape[-1], values.shape[-1], keys.dtype
        )
        return keys, values


class CausalLM:
    """One transformers model with a language-model head. See `llm.LanguageModel`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.cache_name = cache_argument(type(module).forward) or "past_key_values"
        self._layout: tuple[LayerLayout, ...] | None = None
        self._vocabulary = 0

    @property
    def windows(self) -> Mapping[str, int | None]:
        """The sliding window of each attention type, as the model's config says now."""
        return layer_windows(text_config(self.module)) or {}

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return next(self.module.parameters()).device

    @property
    def vocabulary(self) -> int:
        """Width of the logits."""
        self.layout()
        return self._vocabulary

    def layout(self) -> tuple[LayerLayout, ...]:
        """What each layer keeps, found by one pass of one token.

        Raises `CaptureAborted` for a model whose layers share keys and values.
        """
        if self._layout is None:
            probe = _LayoutProbe()
            token = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
            itself = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.device)
            with torch.no_grad():
                logits = self.step(token, token, dict.fromkeys(self.windows, itself), probe)
            config = text_config(self.module)
            expected = getattr(config, "num_hidden_layers", len(probe.layers))
            if sorted(probe.layers) != list(range(expected)):
                raise CaptureAborted(
                    Reason.UNSUPPORTED_MODEL,
                    f"{len(probe.layers)} of {expected} layers keep keys and values",
                )
            self._layout = tuple(probe.layers[index] for index in range(expected))
            self._vocabulary = logits.shape[-1]
        return self._layout

    def forget_layout(self) -> None:
        """The weights are others, perhaps of another type or number."""
        self._layout = None

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        allowed: Mapping[str, Tensor],
        store: KeyValueStore,
        *,
        keep: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, T, vocabulary] of `tokens` [B, T]; see `llm.LanguageModel`.

        `keep`: int64 [n], the columns whose logits are wanted: [B, n, vocabulary].
        """
        masks = {kind: self._ready(mask) for kind, mask in allowed.items()}
        # one mask fits every forward; only models with several kinds of layers take a mapping
        mask = next(iter(masks.values())) if len(masks) == 1 else masks
        arguments: dict[str, object] = {
            "input_ids": tokens,
            "position_ids": positions,
            "attention_mask": mask,
            "use_cache": True,
            "return_dict": True,
            self.cache_name: SlotView(store),
        }
        if keep is not None:
            arguments["logits_to_keep"] = keep
        steady = one_token_attention() if tokens.shape[1] == 1 else nullcontext()
        with mask_decisions_as_eager(), steady:
            return cast(Tensor, self.module.forward(**arguments).logits)

    def _ready(self, allowed: Tensor) -> Tensor:
        """The mask in the form this model's attention adds or applies."""
        if getattr(text_config(self.module), "_attn_implementation", None) != "eager":
            return allowed
        dtype = cast(torch.dtype, self.module.dtype)
        added = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return added.masked_fill_(~allowed, torch.finfo(dtype).min)
