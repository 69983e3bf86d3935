"""Owns `EncodeRunner`: prompts encoded from graphs, equal to the unmodified encoder's.

Must never know which pipeline asks. The surprising fact: what is captured is not the call that was
made. The mask is read once on the host and either dropped or built beforehand, no KV cache is
made and only the last token's logits are computed; each new graph is compared with the call as
it was made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor, nn
from transformers.utils import ModelOutput

from dit_graphs.config import GraphConfig
from dit_graphs.errors import Reason
from dit_graphs.module_watch import Change, ModuleWatch
from dit_graphs.runner import GraphRunner, RunnerOptions

from .caches import PassingCache
from .masks import build_masks, cache_argument, is_all_ones, mask_decisions_as_eager

__all__ = ["EncodeRunner", "EncoderWatch", "passing_through"]

_passing: ContextVar[bool] = ContextVar("dit_graphs_encode_passing", default=False)
_KV = "kv_layout"  # not an argument of any model: how the passing cache lays out keys
_AS_MADE = "as_made"
_CACHES = ("cache", "past_key_values")
_PLAIN = frozenset(
    {"input_ids", "attention_mask", "output_hidden_states", "output_attentions", "return_dict"}
    | {"use_cache", "position_ids"}
)


@contextmanager
def passing_through() -> Iterator[None]:
    """Inside, calls of encoders go straight to the model (a decode's own passes)."""
    token = _passing.set(True)
    try:
        yield
    finally:
        _passing.reset(token)


class EncoderWatch(ModuleWatch):
    """A module watch to which transformers' own output-collecting hooks are no hooks."""

    def refresh(self, number: int | None) -> Change | None:
        change = super().refresh(number)
        if self.refusal is not None and self.refusal[0] is Reason.HOOKS and self._collects_only():
            self.refusal = None
        return change

    def _collects_only(self) -> bool:
        return all(
            getattr(hook, "__module__", "") == "transformers.utils.output_capturing"
            for module in self.module.modules()
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        )


@dataclass(frozen=True, slots=True, eq=False)
class AsMade:
    """The caller's call; `ids` is how a pass is recognised as one on the caller's own tensors."""

    args: tuple[object, ...]
    kwargs: dict[str, object]
    ids: Tensor


class EncodeRunner(GraphRunner):
    """Serves `model(input_ids, attention_mask, …)` of a text encoder from graphs."""

    def __init__(
        self,
        module: nn.Module,
        eager: Callable[..., object],
        config: GraphConfig,
        options: RunnerOptions,
    ) -> None:
        super().__init__(module, eager, config, replace(options, ignore=(_AS_MADE,)))
        self._watch = EncoderWatch(module)
        self._names = tuple(inspect.signature(type(module).forward).parameters)[1:]
        self._cache_name = cache_argument(type(module).forward)
        self._is_encoder = type(module).__name__.endswith("EncoderModel")

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The encoder's output; its KV cache is left out and its logits are the last token's."""
        if _passing.get():
            return self.eager(*args, **kwargs)
        if self._bypass() is None:
            ready = self._prepare(args, kwargs)
            if ready is not None:
                return super().__call__(**ready)
        return super().__call__(*args, **kwargs)

    def call_eager(self, *args: object, **kwargs: object) -> object:
        """The call as it was made; on a graph's own buffers, the call that is captured."""
        made = kwargs.pop(_AS_MADE, None)
        if made is None:
            return self.eager(*args, **kwargs)
        assert isinstance(made, AsMade)
        if kwargs["input_ids"] is made.ids:
            return _without_cache(self.eager(*made.args, **made.kwargs))
        layout = kwargs.pop(_KV)
        if layout is not None and self._cache_name is not None:
            kwargs[self._cache_name] = PassingCache(as_stored=layout == "stored")
        with mask_decisions_as_eager():
            return _without_cache(self.eager(**kwargs))

    def _prepare(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> dict[str, object] | None:
        """The call a graph serves; None where this call is not a plain encode."""
        if len(args) > len(self._names):
            return None
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        plain = {name: value for name, value in given.items() if value is not None}
        ids, mask = plain.get("input_ids"), plain.get("attention_mask")
        if not set(plain) <= _PLAIN or not isinstance(ids, Tensor) or ids.dim() != 2:
            return None
        if plain.get("use_cache") or not isinstance(mask, (Tensor, type(None))):
            return None
        made = dict(kwargs)
        if "logits_to_keep" in self._names and plain.get("output_hidden_states"):
            made["logits_to_keep"] = plain["logits_to_keep"] = 1
        ready = {name: value for name, value in plain.items() if name != "attention_mask"}
        if mask is not None and not self._add_masks(ready, mask):
            return None
        ready[_KV] = self._kv_layout(plain)
        if self._cache_name is not None:
            ready["use_cache"] = False
        ready[_AS_MADE] = AsMade(args, made, ids)
        return ready

    def _add_masks(self, ready: dict[str, object], mask: Tensor) -> bool:
        if mask.dim() != 2:
            return False
        if is_all_ones(mask):
            return True
        try:
            ready["attention_mask"] = build_masks(self.module, mask, is_encoder=self._is_encoder)
        except (ValueError, AttributeError, TypeError):
            return False
        return True

    def _kv_layout(self, plain: dict[str, object]) -> str | None:
        """How the unmodified encoder would lay out keys: "stored" where it fills a cache."""
        if self._cache_name is None:
            return None
        default = getattr(self.module.config, "use_cache", None)
        text = getattr(self.module.config, "text_config", None)
        default = getattr(text, "use_cache", default) if text is not None else default
        return "stored" if plain.get("use_cache", default) else "plain"


def _without_cache(output: object) -> object:
    """A model's output without its KV cache, which no pipeline reads."""
    if not isinstance(output, ModelOutput) or not any(name in output for name in _CACHES):
        return output
    kept = {name: value for name, value in output.items() if name not in _CACHES}
    return cast(object, type(output)(**kept))
