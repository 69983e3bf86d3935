"""Owns attention masks of transformers models: read once on the host, built outside the capture.

Must never know graphs. The surprising fact: transformers asks "is a stream being captured?" while
it builds a mask, and skips an all-ones mask only where none is. Left alone, a capture would take
another attention kernel than the eager call it must equal.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import cast

import torch
import transformers.masking_utils as mask_code
from torch import Tensor, nn

__all__ = [
    "MaskArgument",
    "build_masks",
    "cache_argument",
    "is_all_ones",
    "layer_windows",
    "mask_decisions_as_eager",
    "text_config",
]

MaskArgument = Tensor | dict[str, Tensor | None] | None

_decided: ContextVar[bool] = ContextVar("dit_graphs_masks_decided", default=False)
_patching = threading.Lock()


@contextmanager
def mask_decisions_as_eager() -> Iterator[None]:
    """Inside, this thread's mask code decides as it would outside a capture."""
    _install()
    token = _decided.set(True)
    try:
        yield
    finally:
        _decided.reset(token)


def _install() -> None:
    """transformers' "am I tracing?" test asks this module first, from the first use on."""
    with _patching:
        original = getattr(mask_code, "is_tracing", None)
        if original is None or hasattr(original, "asks_dit_graphs"):
            return

        def is_tracing(tensor: object = None) -> bool:
            # a compiler, which never runs a pass of ours, sees transformers' own code
            decided = not torch.compiler.is_compiling() and _decided.get()
            return False if decided else bool(original(tensor))

        is_tracing.asks_dit_graphs = True  # type: ignore[attr-defined]
        mask_code.is_tracing = is_tracing


def text_config(model: nn.Module) -> object:
    """The configuration of the model's text part."""
    config = model.config
    read = getattr(config, "get_text_config", None)
    return read(decoder=True) if callable(read) else config


def cache_argument(forward: Callable[..., object]) -> str | None:
    """What this forward calls its KV cache; None where it takes none."""
    names = inspect.signature(forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in names), None)


def is_all_ones(mask: Tensor) -> bool:
    """Whether no token is padded."""
    return bool((mask != 0).all())  # sync: once per encode; it decides which kernel attends


def layer_windows(config: object) -> dict[str, int | None] | None:
    """For each attention type the sliding window (None: full); None for a type not known here."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if not types:
        return {"full_attention": None} if window is None else {"sliding_attention": window}
    known = {"full_attention": None, "sliding_attention": window}
    if not set(types) <= set(known):
        return None
    return {kind: known[kind] for kind in dict.fromkeys(types)}


def build_masks(model: nn.Module, mask: Tensor, *, is_encoder: bool) -> MaskArgument:
    """What transformers builds from the 2-D `mask` of a first pass, as the forward takes it ready.

    `mask`: [B, T], 1 for tokens. A tensor [B, 1, T, T] (or None where transformers skips it), or
    one per attention type.
    """
    config = model.config if is_encoder else text_config(model)
    rows, tokens = mask.shape
    dtype = cast(torch.dtype, model.dtype)
    shaped = torch.empty((rows, tokens, 0), dtype=dtype, device=mask.device)
    arguments: dict[str, object] = {
        "config": config,
        "inputs_embeds": shaped,
        "attention_mask": mask,
    }
    if is_encoder:
        return _call(mask_code.create_bidirectional_mask, arguments)
    arguments[cache_argument(mask_code.create_causal_mask) or "cache"] = None
    windows = layer_windows(config)
    if windows is None:
        raise ValueError(f"unknown attention types {getattr(config, 'layer_types', None)}")
    built = {kind: _call(_builder(kind), arguments) for kind in windows}
    return next(iter(built.values())) if len(built) == 1 else cast(MaskArgument, built)


def _builder(kind: str) -> Callable[..., Tensor | None]:
    if kind == "sliding_attention":
        return cast(Callable[..., "Tensor | None"], mask_code.create_sliding_window_causal_mask)
    return cast(Callable[..., "Tensor | None"], mask_code.create_causal_mask)


def _call(build: Callable[..., Tensor | None], arguments: Mapping[str, object]) -> Tensor | None:
    with mask_decisions_as_eager():
        return build(**arguments)
