"""LoRA weights for tiny models, as a file would hold them: made on the spot, nothing is read.

Knows the naming of diffusers' files and nothing of pipelines or graphs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["lora"]

_TARGETS = ("to_q", "to_k", "to_v")


def lora(
    module: nn.Module, seed: int, rank: int = 4, *, prefix: str = "transformer", alpha: float = 0.0
) -> dict[str, Tensor]:
    """Weights of one adapter for the attention projections of `module`; `alpha` 0 means the rank.

    Strong enough that a strength of one half gives another picture.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for path, layer in module.named_modules():
        name = path.removesuffix(".base_layer")
        if not isinstance(layer, nn.Linear) or not name.endswith(_TARGETS):
            continue
        key, dtype = f"{prefix}.{name}", layer.weight.dtype
        down = torch.randn(rank, layer.in_features, generator=generator) * 0.5
        up = torch.randn(layer.out_features, rank, generator=generator) * 0.5
        found[f"{key}.lora_A.weight"], found[f"{key}.lora_B.weight"] = down.to(dtype), up.to(dtype)
        if alpha:
            found[f"{key}.alpha"] = torch.tensor(alpha)
    assert found, "no layer to adapt"
    return found
