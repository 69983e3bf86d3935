"""Owns `rewrite_prompt`: a short prompt becomes a full description, by the pipeline's own model.

Must never know graphs: where the pipeline is accelerated, its `generate` is served from them. The
surprising fact: a rewrite leaves no trace in the random numbers of the pictures that follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from dit_graphs.errors import ConfigError

from ..acceleration import acceleration_of
from ..components import Component, parts_of
from .head import can_write, with_head

__all__ = ["rewrite_prompt"]

_INSTRUCTION = (
    "You write prompts for an image generator. Rewrite the user's prompt as one vivid, concrete "
    "description of the picture: keep every subject, number, colour and quoted text, and add "
    "setting, composition, light and style. Answer with the description only."
)
_WRITERS = ("text_encoder", "pe", "prompt_enhancer", "text_encoder_2", "text_encoder_3")
_TOKENIZERS = {"pe": "pe_tokenizer", "prompt_enhancer": "prompt_enhancer_tokenizer"}


@dataclass(frozen=True, slots=True)
class _Writer:
    """The model that writes, and the tokenizer it reads with."""

    module: nn.Module
    tokenizer: Any


def rewrite_prompt(
    pipe: object,
    text: str,
    max_new_tokens: int = 96,
    seed: int = 0,
    *,
    temperature: float = 0.7,
    top_p: float = 0.9,
) -> str:
    """`text` as the pipeline's language model describes it in full; the same for the same seed.

    `temperature` 0 writes the likeliest words. Returns `text` where the model answers nothing.
    Raises `ConfigError` for a pipeline without a language model, and for a list of prompts.
    """
    if not isinstance(text, str):  # a chat template would quote it
        raise ConfigError(f"text: expected one prompt, got {type(text).__name__}")
    writer = _writer_of(pipe)
    device = next(writer.module.parameters()).device
    inputs = _read(writer.tokenizer, text)
    with _seeded(seed, device), torch.no_grad():
        written = cast(Any, writer.module).generate(
            **{name: value.to(device) for name, value in inputs.items()},
            max_new_tokens=max_new_tokens,
            **_choice(temperature, top_p),
            **_ends(writer),
        )
    new = cast(Tensor, written)[0, inputs["input_ids"].shape[1] :]
    answer = writer.tokenizer.decode(new, skip_special_tokens=True)
    return " ".join(str(answer).split()) or text


def _writer_of(pipe: object) -> _Writer:
    if isinstance(pipe, nn.Module):
        raise ConfigError(
            f"expected a pipeline that has a language model, got the module {type(pipe).__name__}"
        )
    parts = parts_of(pipe)
    names = [name for name in _WRITERS if isinstance(parts.get(name), nn.Module)]
    names.sort(key=lambda name: not can_write(parts[name]))
    problem = "it has no text encoder"
    for name in names:
        tokenizer = _tokenizer_of(parts, name)
        if tokenizer is None:
            continue
        try:
            module = _with_graphs(pipe, name, cast(nn.Module, parts[name]))
        except ConfigError as error:
            problem = str(error)
            continue
        return _Writer(module, tokenizer)
    raise ConfigError(f"{type(pipe).__name__} cannot rewrite prompts: {problem}")


def _tokenizer_of(parts: Mapping[str, object], name: str) -> Any:
    """The tokenizer beside a text model; a processor's own where there is a processor."""
    beside = _TOKENIZERS.get(name, name.replace("text_encoder", "tokenizer"))
    found = parts.get(beside) or parts.get("tokenizer")
    inner = getattr(found, "tokenizer", None)
    return inner if inner is not None else found


def _with_graphs(pipe: object, name: str, module: nn.Module) -> nn.Module:
    """The model that writes; one with a head put back is served like any other part."""
    if can_write(module):
        return module
    acceleration = acceleration_of(pipe)
    if acceleration is None or "text_encoder" not in acceleration.config.components:
        return with_head(module)
    label = f"decode:{name}.head"
    known = acceleration.parts.get(label)
    if known is not None and cast(Any, known.module).base_model is module:
        return known.module
    part = Component("text_encoder", name, label, with_head(module), "generate")
    acceleration.adopt(part)
    return part.module


def _read(tokenizer: Any, text: str) -> dict[str, Tensor]:
    encoded = tokenizer(_chat(tokenizer, text), return_tensors="pt", add_special_tokens=False)
    kept = ("input_ids", "attention_mask")
    return {name: cast(Tensor, encoded[name]) for name in kept if name in encoded}


def _chat(tokenizer: Any, text: str) -> str:
    """The prompt as the model was taught to be asked."""
    if not getattr(tokenizer, "chat_template", None):
        return f"{_INSTRUCTION}\n\nPrompt: {text}\n\nDescription:"
    options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
    user = {"role": "user", "content": text}
    try:
        turns: Sequence[object] = [{"role": "system", "content": _INSTRUCTION}, user]
        return str(tokenizer.apply_chat_template(turns, **options))
    except Exception as error:  # templates raise what they like; Gemma's knows no system turn
        if "system" not in str(error).lower():
            raise
    turns = [{"role": "user", "content": f"{_INSTRUCTION}\n\n{text}"}]
    return str(tokenizer.apply_chat_template(turns, **options))


def _choice(temperature: float, top_p: float) -> dict[str, object]:
    if temperature <= 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}


def _ends(writer: _Writer) -> dict[str, object]:
    """End tokens of the model and of its tokenizer; transformers knows only the model's."""
    configured = getattr(getattr(writer.module, "generation_config", None), "eos_token_id", None)
    listed = configured if isinstance(configured, (list, tuple)) else [configured]
    ends = [e for e in dict.fromkeys([*listed, writer.tokenizer.eos_token_id]) if e is not None]
    pad = writer.tokenizer.pad_token_id
    return {
        "eos_token_id": ends or None,
        "pad_token_id": pad if pad is not None else (ends[0] if ends else None),
    }


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, default generators start at `seed`; afterwards they go on where they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
