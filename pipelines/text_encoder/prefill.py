"""Owns `PrefillRunner`: a prompt read into slots from a graph.

Must never know how texts go on. The surprising fact: the prompt's positions in the slots are an
input like its tokens, so one graph serves every padding of its shape.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

from torch import Tensor

from dit_graphs.cache import State
from dit_graphs.config import GraphConfig
from dit_graphs.errors import FallbackError
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
from .masks import mask_decisions_as_eager
from .packed import run_packed
from .prompt_form import PromptForm, PromptPass

__all__ = ["PrefillRunner", "PromptPass"]

_AS_MADE = "as_made"


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
        self._prompts = PromptForm(model, config, slots)
        self._generation = -1

    @staticmethod
    def _unused(**_: object) -> None:
        """The runner's own `call_eager` replaces it."""

    def _check_module(self, request: Request | None) -> bool:
        """The decode has just looked at the module; what it found counts here too."""
        change, self.change = self.change, None
        if self.device != self.model.device:
            self._leave_device()
            self._settle_on(self.model.device)
        elif change == "weights":
            self.drop_graphs()
        elif change == "caches":
            for entry in self.cache.held():
                entry.state = State.CAPTURED
        return False

    def read(self, prompt: PromptPass) -> Tensor:
        """The slots hold the prompt; logits [B, vocabulary] of its last tokens."""
        if self._generation != self._slots().generation:
            self.drop_graphs()  # they write into slots that are gone
            self._generation = self._slots().generation
        before = self.stats.replays
        ready = self._prompts.read(prompt)
        if isinstance(ready, tuple):
            self.stats.count_eager(*ready)
            if self.config.strict:
                raise FallbackError(*ready)
            logits = prompt.run()
            self._watch.adopt_changes()
        else:
            logits = cast(Tensor, self(**ready, **{_AS_MADE: prompt}))[: len(prompt.lengths)]
        rows, tokens = prompt.ids.shape
        what = f"prefill {rows} × {tokens} tokens{_layout(ready)}"
        log_pass(
            self.stats.component, ForwardMode.EXTEND, what,
            from_graph=self.stats.replays > before, device=self.device, level=logging.INFO,
        )  # fmt: skip
        return logits

    def call_eager(self, *args: object, **kwargs: object) -> object:
        """The prompt as transformers reads it; on a graph's own buffers, what is captured."""
        prompt = kwargs.pop(_AS_MADE, None)
        if isinstance(prompt, PromptPass) and kwargs["input_ids"] is prompt.ids:
            return prompt.run()
        if "slot_of" in kwargs:
            return run_packed(self.model, self._slots(), cast("dict[str, Tensor]", kwargs))
        store = PromptStore(self._slots(), cast(Tensor, kwargs.pop("write_at")))
        kwargs[self.model.cache_name] = SlotView(store)
        with mask_decisions_as_eager():
            outputs = self.module.forward(**kwargs, use_cache=True, return_dict=True)
        return cast(Tensor, outputs.logits)[:, -1].float()


def _layout(ready: object) -> str:
    """How the prompts lie where a ladder chose it: " (…)"."""
    if not isinstance(ready, dict):
        return ""
    columns = ready["input_ids"].shape[1]
    if "slot_of" in ready:
        slots = ready["last"].shape[0]
        return f" (one row of {columns}, {slots} request slots)"
    return f" (bucket {columns})"


def _describe(signature: Signature) -> str:
    rows, tokens = signature.tensors[0].shape
    return f"prefill {rows} × {tokens} tokens"
