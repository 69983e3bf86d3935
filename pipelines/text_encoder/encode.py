"""Owns `EncodeRunner`: prompts encoded from graphs, equal to the unmodified encoder's.

Must never know which pipeline asks. The surprising fact: what is captured is not the call that was
made. The mask is read once on the host and either dropped or built beforehand, no KV cache is
made and only the last token's logits are computed; each new graph is compared with the call as
it was made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import cast

from torch import Tensor, nn
from transformers.utils import ModelOutput

from dit_graphs.config import GraphConfig
from dit_graphs.counters import log
from dit_graphs.errors import Reason
from dit_graphs.llm.forward_mode import ForwardMode, log_pass
from dit_graphs.module_watch import Change, ModuleWatch
from dit_graphs.request_scope import Request
from dit_graphs.runner import GraphRunner, RunnerOptions
from dit_graphs.signature import Signature

from .caches import PassingCache
from .encode_call import KV_LAYOUT, EncodeCall, EncoderForm, cut, without_cache
from .masks import mask_decisions_as_eager

__all__ = ["EncodeRunner", "EncoderWatch", "passing_through"]

_passing: ContextVar[bool] = ContextVar("dit_graphs_encode_passing", default=False)
_AS_MADE = "as_made"


@contextmanager
def passing_through() -> Iterator[None]:
    """Inside, calls of encoders go straight to the model (a decode's own passes)."""
    token = _passing.set(True)
    try:
        yield
    finally:
        _passing.reset(token)


# What generate() leaves on image models; read only behind a filled cache or for embeddings, and
# neither is ever captured.
_LEFT_BY_GENERATE = ("rope_deltas", "_cached_decode_position_ids", "_prefill_len")


class EncoderWatch(ModuleWatch):
    """A module watch to which transformers' own output-collecting hooks are no hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._volatile = frozenset(
            f"{path}.{name}" for path, _ in module.named_modules() for name in _LEFT_BY_GENERATE
        )

    def refresh(self, request: Request | None, *drop: Callable[[Change], object]) -> Change | None:
        change = super().refresh(request, *drop)
        if self.refusal is not None and self.refusal[0] is Reason.HOOKS and self._collects_only():
            self.refusal = None
        return change

    def _collects_only(self) -> bool:
        return all(
            getattr(hook, "__module__", "") == "transformers.utils.output_capturing"
            for module in self.module.modules()
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        )


class EncodeRunner(GraphRunner):
    """Serves `model(input_ids, attention_mask, …)` of a text encoder from graphs.

    The KV cache is left out of the output, and logits are the last token's. With `prompt_buckets`
    a prompt is padded to the ladder: its hidden states deviate by rounding, which is measured and
    logged once per bucket.
    """

    def __init__(
        self,
        module: nn.Module,
        eager: Callable[..., object],
        config: GraphConfig,
        options: RunnerOptions,
    ) -> None:
        options = replace(options, ignore=(_AS_MADE,), describe=_describe)
        super().__init__(module, eager, config, options)
        self._watch = EncoderWatch(module)
        self._encoder = EncoderForm(module, config.prompt_buckets)
        self.deviations: dict[int, float] = {}

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The encoder's output."""
        if _passing.get():
            return self.eager(*args, **kwargs)
        call = self._encoder.read(args, kwargs) if self._bypass() is None else None
        if call is None:
            return super().__call__(*args, **kwargs)
        limit = (self.config.max_size or {}).get("prefill")
        if limit is not None and call.tokens > limit:
            detail = f"{call.tokens} tokens, max_size['prefill'] is {limit}"
            return self._fall_back(Reason.ABOVE_MAX_SIZE, detail, args, kwargs)
        before = self.stats.replays
        result = super().__call__(**call.ready, **{_AS_MADE: call})
        if call.is_padded:
            result = cut(result, call.tokens, call.bucket)
            self._measure(call, result)
        log_pass(
            self.stats.component, ForwardMode.EXTEND,
            f"encode {call.ids.shape[0]} × {call.tokens} tokens"
            f"{f' (bucket {call.bucket})' if call.is_padded else ''}",
            from_graph=self.stats.replays > before, device=self.device, level=logging.INFO,
        )  # fmt: skip
        return result

    def call_eager(self, *args: object, **kwargs: object) -> object:
        """The call as it was made; on a graph's own buffers, the call that is captured."""
        call = kwargs.pop(_AS_MADE, None)
        if call is None:
            return self.eager(*args, **kwargs)
        assert isinstance(call, EncodeCall)
        if kwargs["input_ids"] is call.ids:
            return without_cache(self.eager(*call.args, **call.kwargs))
        layout = kwargs.pop(KV_LAYOUT)
        if layout is not None and self._encoder.cache_name is not None:
            kwargs[self._encoder.cache_name] = PassingCache(as_stored=layout == "stored")
        with mask_decisions_as_eager():
            return without_cache(self.eager(**kwargs))

    def _measure(self, call: EncodeCall, result: object) -> None:
        """Once per bucket: how far padding moves the hidden states."""
        if call.bucket in self.deviations:
            return
        exact = _states(without_cache(self.eager(*call.args, **call.kwargs)))
        padded = _states(result)
        assert exact is not None and padded is not None
        if call.mask is not None:  # what stands at padded positions means nothing
            real = (call.mask != 0).unsqueeze(-1)
            exact, padded = exact * real, padded * real
        difference = (exact.float() - padded.float()).abs().max()
        deviation = float(difference / exact.float().abs().max())  # sync: once per bucket
        self.deviations[call.bucket] = deviation
        log.info(
            "%s: %d tokens padded to %d: hidden states deviate by at most %.1e of their largest",
            self.stats.component, call.tokens, call.bucket, deviation,
        )  # fmt: skip

    def report(self) -> dict[str, object]:
        """As every runner's, with the deviation of each prompt bucket."""
        measured = {str(bucket): value for bucket, value in self.deviations.items()}
        return {**super().report(), "deviation": measured}


def _describe(signature: Signature) -> str:
    rows, tokens = signature.tensors[0].shape
    padded = "padded" if len(signature.tensors) > 1 else "no padding"
    return f"encode {rows} × {tokens} tokens, {padded}"


def _states(output: object) -> Tensor | None:
    """The last hidden state an encoder returned: [B, T, D]."""
    assert isinstance(output, ModelOutput)
    states = output.get("hidden_states")
    last = states[-1] if states else output.get("last_hidden_state")
    return cast("Tensor | None", last)
