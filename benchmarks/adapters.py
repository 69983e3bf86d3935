"""LoRA weights as a file would hold them, made on the spot: nothing is read or trained.

Knows the naming of diffusers' files and nothing of pipelines or graphs. The surprising fact: they
must be strong. An adapter near zero leaves the picture as it is, and then a swap that a graph
ignored would pass every comparison.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["lora"]

_TARGETS = ("to_q", "to_k", "to_v")


def lora(
    module: nn.Module, seed: int, rank: int = 4, *, prefix: str = "transformer", scale: float = 0.5
) -> dict[str, Tensor]:
    """Weights of one adapter for the attention projections of `module`, on the CPU.

    `scale` is the standard deviation of both factors. Raises ValueError where nothing fits.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for path, layer in module.named_modules():
        name = path.removesuffix(".base_layer")
        if not isinstance(layer, nn.Linear) or not name.endswith(_TARGETS):
            continue
        key, dtype = f"{prefix}.{name}", layer.weight.dtype
        down = torch.randn(rank, layer.in_features, generator=generator) * scale
        up = torch.randn(layer.out_features, rank, generator=generator) * scale
        found[f"{key}.lora_A.weight"], found[f"{key}.lora_B.weight"] = down.to(dtype), up.to(dtype)
    if not found:
        raise ValueError(f"{type(module).__name__} has no attention projections to adapt")
    return found
