"""What the language-model tests share: a tiny model with a recorded runner, and transformers' text.

Knows no expectations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import tiny_llms
import torch
from torch import nn

from dit_graphs import GraphConfig
from dit_graphs.pipelines.text_encoder.generate import TextGenerator


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def recorded() -> Callable[..., TextGenerator]:
    """`recorded(model, **config)`: `generate` of the model over the CPU recorder."""

    def make(model: nn.Module, **config: object) -> TextGenerator:
        return TextGenerator(model, model.generate, GraphConfig(backend="recorded", **config))

    return make


@pytest.fixture(scope="module")
def qwen3() -> nn.Module:
    """One tiny Qwen3 for a module of tests; nobody changes it."""
    return tiny_llms.build("qwen3")


def new_tokens(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What was written behind the prompts."""
    return output[:, batch["input_ids"].shape[1] :]
