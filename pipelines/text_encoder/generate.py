"""Owns `TextGenerator`: `model.generate()` written from graphs, everything else by transformers.

Must never know pipelines. The surprising fact: transformers prepares the whole call as always and
hands its decoding loop to us through `custom_generate`; where we cannot write it, its own loop gets
exactly what it would have got.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.generation.utils import GENERATION_MODES_MAPPING

from dit_graphs.ambient import foreign_mode
from dit_graphs.config import GraphConfig
from dit_graphs.errors import CaptureAborted, FallbackError, Reason
from dit_graphs.llm import DecodeRunner, Prompt
from dit_graphs.llm.prefill import PromptStore
from dit_graphs.watch import BreakPolicy

from .arguments import Asked, Refused, read, refused_before
from .caches import SlotView
from .causal_lm import CausalLM, why_not
from .encode import EncoderWatch, passing_through
from .positions import decode_positions
from .prefill import PrefillRunner, PromptPass

__all__ = ["TextGenerator"]

Eager = Callable[..., object]


class TextGenerator:
    """Serves `model.generate(...)`. The runner keeps slots, graphs and counters."""

    def __init__(
        self,
        module: nn.Module,
        eager: Eager,
        config: GraphConfig,
        *,
        label: str = "decode",
        guard: Callable[[], tuple[Reason, str] | None] | None = None,
        policy: BreakPolicy | None = None,
    ) -> None:
        self.module = module
        self.eager = eager
        self.config = config
        self._guard = guard
        self.model = CausalLM(module)
        watch = EncoderWatch(module)
        self.runner = DecodeRunner(self.model, config, label=label, watch=watch, policy=policy)
        prefill = label.replace("decode", "prefill", 1)
        self.prefill = PrefillRunner(
            self.model, config, self.runner.slots, label=prefill, watch=watch, policy=policy
        )

    def __call__(self, *args: object, **kwargs: object) -> object:
        """What `generate` returns: from graphs, or transformers' own with a counted reason."""
        with passing_through():
            reason = self._refusal(kwargs)
            if reason is None and len(args) > 1:
                reason = Reason.GENERATE_ARGUMENT, "arguments by position"
            if reason is not None:
                self._count(*reason)
                return self.eager(*args, **kwargs)
            # transformers keeps the streamer from loops that are not its own
            loop = partial(self._loop, streamer=kwargs.get("streamer"))
            return self.eager(*args, **{**kwargs, "custom_generate": loop})

    def _refusal(self, kwargs: Mapping[str, object]) -> tuple[Reason, str] | None:
        with torch.no_grad():
            foreign = foreign_mode(self.runner.device)
        if foreign is not None:
            return foreign, ""
        found = self.runner.refusal()
        self.prefill.change = self.runner.change
        if found is None and self._guard is not None:
            found = self._guard()
        if found is not None:
            return found
        unsupported = why_not(self.module)
        if unsupported is not None:
            return Reason.UNSUPPORTED_MODEL, unsupported
        argument = refused_before(kwargs, self.module.generation_config)
        return (Reason.GENERATE_ARGUMENT, argument) if argument is not None else None

    def _count(self, reason: Reason, detail: str) -> None:
        self.runner.stats.count_eager(reason, detail)
        if self.config.strict and not reason.is_asked_for:
            raise FallbackError(reason, detail)

    def _loop(
        self,
        model: nn.Module,
        input_ids: Tensor,
        logits_processor: Sequence[object],
        stopping_criteria: Sequence[object],
        generation_config: object,
        synced_gpus: bool = False,
        streamer: object | None = None,
        **model_kwargs: object,
    ) -> object:
        """The decoding loop that transformers calls with everything prepared."""
        reader = _Reader(streamer) if streamer is not None else None
        try:
            asked = read(
                input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
            )
            return self._write(input_ids, asked, generation_config, model_kwargs, reader)
        except (Refused, CaptureAborted) as refusal:
            if reader is not None and reader.has_begun:
                raise  # the text cannot begin once more
            self._count(refusal.reason, refusal.detail)
        return self._transformers_loop(
            input_ids=input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            streamer=streamer,
            **model_kwargs,
        )

    def _transformers_loop(self, **arguments: object) -> object:
        mode = arguments["generation_config"].get_generation_mode(None)  # type: ignore[attr-defined]
        method = getattr(type(self.module), GENERATION_MODES_MAPPING[mode])
        return cast(Eager, method)(self.module, **arguments)

    def _write(
        self,
        input_ids: Tensor,
        asked: Asked,
        generation_config: object,
        model_kwargs: Mapping[str, object],
        reader: _Reader | None,
    ) -> Tensor:
        width = input_ids.shape[1]
        table = decode_positions(self.module, model_kwargs, asked, width)
        prompt = Prompt(
            lengths=asked.lengths,
            width=width,
            table=table.read,
            table_shape=table.shape,
            is_flat=table.is_flat,
            seen=self._seen(input_ids, asked),
        )
        large = self.runner.too_large(len(asked.lengths), prompt.reserved(asked.max_new_tokens))
        if large is not None:
            raise Refused(*large)

        def prefill(store: PromptStore) -> Tensor:
            given = {**model_kwargs, self.model.cache_name: SlotView(store)}

            def run() -> Tensor:
                outputs = cast(Any, self.module)._prefill(input_ids, generation_config, given)
                return cast(Tensor, outputs.logits[:, -1].float())

            return self.prefill.read(
                PromptPass(input_ids, model_kwargs, store, run, asked.pad, asked.lengths)
            )

        tokens = self.runner.generate(
            prompt,
            prefill,
            max_new_tokens=asked.max_new_tokens,
            sampling=asked.sampling,
            eos=asked.eos,
            pad=asked.pad,
            on_tokens=reader.put if reader is not None else None,
        )
        if reader is not None:
            reader.end()
        return torch.cat([input_ids, tokens.to(input_ids.device)], dim=-1)

    def _seen(self, input_ids: Tensor, asked: Asked) -> Tensor | None:
        """The prompt's tokens, as the repetition penalty counts them: bool [B, vocabulary]."""
        if asked.penalty is None:
            return None
        vocabulary = self.model.vocabulary
        ignored = getattr(asked.penalty, "prompt_ignore_length", None)
        ids = input_ids.to(self.runner.device)
        if isinstance(ignored, int):
            ids = ids[:, ignored:]
        elif isinstance(ignored, Tensor):
            columns = torch.arange(ids.shape[1], device=ids.device)
            ids = ids.masked_fill(columns[None, :] < ignored.to(ids.device)[:, None], vocabulary)
        shape = (ids.shape[0], vocabulary + 1)
        seen = torch.zeros(shape, dtype=torch.bool, device=ids.device)
        return seen.scatter_(1, ids.clamp(max=vocabulary), True)[:, :vocabulary]

    def installed_runners(self) -> dict[str, DecodeRunner | PrefillRunner]:
        """Both runners, by the labels of their counters."""
        runners = (self.runner, self.prefill)
        return {runner.stats.component: runner for runner in runners}

    def close(self) -> None:
        """All memory of both runners is given back."""
        self.prefill.close()
        self.runner.close()


class _Reader:
    """A streamer of transformers that remembers whether it has heard anything."""

    def __init__(self, streamer: object) -> None:
        self._streamer = cast(Any, streamer)
        self.has_begun = False

    def put(self, tokens: Tensor) -> None:
        self.has_begun = True
        self._streamer.put(tokens)

    def end(self) -> None:
        self._streamer.end()
