"""Owns `PrefillRunner`: a prompt read into slots from a graph.

Must never know how texts go on. The surprising fact: the prompt's positions in the slots are an
input like its tokens, so one graph serves every padding of its shape.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from dit_graphs.cache import State
from dit_graphs.config import GraphConfig
from dit_graphs.errors import CaptureAborted, Reason
from dit_graphs.llm.buckets import prompt_bucket
from dit_graphs.llm.forward_mode import ForwardMode, log_pass
from dit_graphs.llm.kv import SlotCache
from dit_graphs.llm.prefill import PromptStore
from dit_graphs.module_watch import Change, ModuleWatch
from dit_graphs.request_scope import Request
from dit_graphs.runner import GraphRunner, RunnerOptions
from dit_graphs.signature import Signature
from dit_graphs.watch import BreakPolicy

from .caches import SlotView
from .causal_lm import CausalLM
from .masks import (
    MaskArgument,
    build_masks,
    cache_argument,
    is_all_ones,
    mask_decisions_as_eager,
)

__all__ = ["PrefillRunner", "PromptPass"]

_AS_MADE = "as_made"
_PLAIN = frozenset({"attention_mask", "position_ids", "use_cache", "logits_to_keep"})
# numbers the positions of pictures; without any, transformers has numbered the text already
_OF_PICTURES = "mm_token_type_ids"


@dataclass(frozen=True, slots=True, eq=False)
class PromptPass:
    """One prompt to read. `run()` reads it as transformers does; returns logits [B, vocabulary]."""

    ids: Tensor
    kwargs: Mapping[str, object]
    store: PromptStore
    run: Callable[[], Tensor]
    pad: int


class PrefillRunner(GraphRunner):
    """Reads prompts of one model into the slots of one decode."""

    def __init__(
        self,
        model: CausalLM,
        config: GraphConfig,
        slots: Callable[[], SlotCache],
        *,
        label: str,
        watch: ModuleWatch,
        policy: BreakPolicy | None = None,
    ) -> None:
        self.model = model
        self._slots = slots
        self.change: Change | None = None
        options = RunnerOptions(
            component="prefill",
            label=label,
            key=lambda: slots().generation,
            ignore=(_AS_MADE,),
            policy=policy if policy is not None else BreakPolicy(),
            describe=_describe,
        )
        super().__init__(model.module, self._unused, config, options)
        self._watch = watch
        self._generation = -1

    @staticmethod
    def _unused(**_: object) -> None:
        """The runner's own `call_eager` replaces it."""

    def _check_module(self, request: Request | None) -> None:
        """The decode has just looked at the module; what it found counts here too."""
        change, self.change = self.change, None
        if self.device != self.model.device:
            self.drop_graphs()
            self._settle_on(self.model.device)
        elif change == "weights":
            self.drop_graphs()
        elif change == "caches":
            for entry in self.cache.held():
                entry.state = State.CAPTURED

    def read(self, prompt: PromptPass) -> Tensor:
        """The slots hold the prompt; logits [B, vocabulary] of its last tokens."""
        if self._generation != self._slots().generation:
            self.drop_graphs()  # they write into slots that are gone
            self._generation = self._slots().generation
        before = self.stats.replays
        ready = self._ready(prompt)
        if isinstance(ready, tuple):
            self.stats.count_eager(*ready)
            logits = prompt.run()
            self._watch.adopt_changes()
        else:
            logits = cast(Tensor, self(**ready, **{_AS_MADE: prompt}))
        rows, tokens = prompt.ids.shape
        log_pass(
            self.stats.component, ForwardMode.EXTEND, f"prefill {rows} × {tokens} tokens",
            from_graph=self.stats.replays > before, device=self.device, level=logging.INFO,
        )  # fmt: skip
        return logits

    def call_eager(self, *args: object, **kwargs: object) -> object:
        """The prompt as transformers reads it; on a graph's own buffers, what is captured."""
        prompt = kwargs.pop(_AS_MADE, None)
        if isinstance(prompt, PromptPass) and kwargs["input_ids"] is prompt.ids:
            return prompt.run()
        store = PromptStore(self._slots(), cast(Tensor, kwargs.pop("write_at")))
        kwargs[self.model.cache_name] = SlotView(store)
        with mask_decisions_as_eager():
            outputs = self.module.forward(**kwargs, use_cache=True, return_dict=True)
        return cast(Tensor, outputs.logits)[:, -1].float()

    def _ready(self, prompt: PromptPass) -> dict[str, object] | tuple[Reason, str]:
        """The pass a graph serves, or why there is none."""
        given = {n: v for n, v in prompt.kwargs.items() if v is not None and not _is_empty(v)}
        if "position_ids" in given:
            given.pop(_OF_PICTURES, None)
        kinds = given.pop("token_type_ids", None) if _builds_masks(self.module) else None
        other = sorted(set(given) - _PLAIN - {self.model.cache_name})
        if other:
            return Reason.UNSUPPORTED_ARGUMENT, ", ".join(other)
        limit = (self.config.max_size or {}).get("prefill")
        if limit is not None and prompt.ids.shape[1] > limit:
            detail = f"{prompt.ids.shape[1]} tokens, max_size['prefill'] is {limit}"
            return Reason.ABOVE_MAX_SIZE, detail
        ready: dict[str, object] = {
            "input_ids": prompt.ids.to(self.device),
            "write_at": prompt.store.positions,
        }
        positions, mask = given.get("position_ids"), given.get("attention_mask")
        if isinstance(positions, Tensor):
            ready["position_ids"] = positions.to(self.device)
        if "logits_to_keep" in given:
            ready["logits_to_keep"] = 1
        try:
            if isinstance(kinds, Tensor):
                masks = self._masks_with(kinds, mask, prompt)
            else:
                masks = self._masks(self._pad(ready, mask, prompt))
        except (ValueError, AttributeError, TypeError, CaptureAborted) as error:
            return Reason.UNSUPPORTED_MODEL, str(error)
        if masks is not None:
            ready["attention_mask"] = masks
        return ready

    def _masks(self, mask: object) -> MaskArgument:
        if not isinstance(mask, Tensor) or is_all_ones(mask):
            return None
        return build_masks(self.module, mask.to(self.device), is_encoder=False)

    def _masks_with(self, kinds: Tensor, mask: object, prompt: PromptPass) -> MaskArgument:
        """Masks of a model in which some tokens see each other both ways (pictures of Gemma 3)."""
        build = cast(Any, self.module).create_masks_for_generate
        rows, tokens = prompt.ids.shape
        dtype = cast(torch.dtype, self.module.dtype)
        arguments = {
            "config": self.module.config,
            "inputs_embeds": torch.empty((rows, tokens, 0), dtype=dtype, device=self.device),
            "attention_mask": mask.to(self.device) if isinstance(mask, Tensor) else None,
            "token_type_ids": kinds.to(self.device),
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
        return functional.pad(mask.to(self.device), (extra, 0))


def _builds_masks(module: object) -> bool:
    return callable(getattr(type(module), "create_masks_for_generate", None))


def _describe(signature: Signature) -> str:
    rows, tokens = signature.tensors[0].shape
    return f"prefill {rows} × {tokens} tokens"


def _is_empty(value: object) -> bool:
    return isinstance(value, dict) and not value
