"""Owns the language-model head of text encoders that come without one.

Must never know prompts. The surprising fact: Z-Image's and Sana's encoders are whole language
models whose head was only not loaded: it is tied to the embeddings, so it costs no memory to put
back.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from dit_graphs.errors import ConfigError

__all__ = ["can_write", "with_head"]


def can_write(module: object) -> bool:
    """Whether `module` has a `generate` that writes text."""
    ask = getattr(module, "can_generate", None)
    return callable(getattr(type(module), "generate", None)) and callable(ask) and bool(ask())


def with_head(module: nn.Module) -> nn.Module:
    """A model that writes with the weights of `module`: itself, or around it a head tied to it.

    Raises `ConfigError` where the head is not tied to the embeddings or the class is unknown.
    """
    if can_write(module):
        return module
    config = cast(Any, module).config
    name = type(module).__name__
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise ConfigError(f"{name} encodes only: no language model is known for {type(config)}")
    if not getattr(config, "tie_word_embeddings", False):
        raise ConfigError(f"{name} was loaded without its language-model head, which is not tied")
    with torch.device("meta"):
        shell = kind(config)
    setattr(shell, shell.base_model_prefix, module)
    shell.lm_head.weight = cast(Any, module).get_input_embeddings().weight
    shell.generation_config = GenerationConfig.from_model_config(config)
    return cast(nn.Module, shell.eval())
