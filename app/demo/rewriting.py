"""Owns the step from a short prompt to a longer one, shown while it is being written.

Must never write differently from `dit_graphs.rewrite_prompt`: it calls it. The surprising fact: the
words are overheard. The pipeline's language model is handed over inside a thin module that adds a
listener to its `generate`, so prompt, sampling and seed are those of every other rewrite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from diffusers import DiffusionPipeline
from torch import nn

import dit_graphs
from dit_graphs import ConfigError
from dit_graphs.pipelines.text_encoder.head import can_write, with_head

__all__ = ["can_rewrite", "rewrite"]

_MAX_NEW_TOKENS = 96


def can_rewrite(pipe: DiffusionPipeline) -> bool:
    """Whether a language model among the pipeline's parts can write a prompt."""
    return bool(_writers(pipe.components))


def rewrite(
    pipe: DiffusionPipeline,
    prompt: str,
    *,
    seed: int = 0,
    on_text: Callable[[str], None] = lambda text: None,
) -> str:
    """What `rewrite_prompt` returns. `on_text` gets the text so far and may raise to stop.

    Raises `ConfigError` for a pipeline without a language model.
    """
    parts = dict(pipe.components)
    for name, module in _writers(parts).items():
        listener = _Listener(_tokenizer_of(parts, name), on_text)
        parts[name] = _Overheard(module, listener)
    return dit_graphs.rewrite_prompt(parts, prompt, _MAX_NEW_TOKENS, seed)


def _writers(parts: Mapping[str, object]) -> dict[str, nn.Module]:
    """The parts that write, each with a head where it came without one."""
    found: dict[str, nn.Module] = {}
    for name, part in parts.items():
        if not isinstance(part, nn.Module) or not ("encoder" in name or can_write(part)):
            continue
        try:
            found[name] = with_head(part)
        except (ConfigError, AttributeError):  # encodes only, or is no language model at all
            continue
    return found


def _tokenizer_of(parts: Mapping[str, object], name: str) -> Any:
    names = (name.replace("text_encoder", "tokenizer"), f"{name}_tokenizer", "tokenizer")
    found = next((parts[n] for n in names if parts.get(n) is not None and n != name), None)
    return getattr(found, "tokenizer", found)


class _Overheard(nn.Module):
    """A language model whose `generate` tells every token to a listener as well."""

    def __init__(self, model: nn.Module, listener: _Listener) -> None:
        super().__init__()
        self.model = model
        self.generation_config = cast(Any, model).generation_config
        self._listener = listener

    def can_generate(self) -> bool:
        """A model that writes, to whoever asks."""
        return True

    def generate(self, **arguments: object) -> object:
        """The model's own `generate`."""
        return cast(Any, self.model).generate(**arguments, streamer=self._listener)


class _Listener:
    """What `generate` hands its tokens to."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._on_text = on_text
        self._tokens: list[int] = []
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """One more token, or the prompt itself, which comes first."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self._tokens += value.flatten().tolist()
        words = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        self._on_text(" ".join(str(words).split()))

    def end(self) -> None:
        """No more tokens."""
