"""Owns adapter strengths that stay at their address, so that turning one needs no new graph.

Must never know graphs. The surprising fact: after `enable_lora_hotswap` peft keeps each strength in
a device tensor, but `set_adapters` puts a plain float in its place, which a graph would bake. The
float is written into the tensor instead, where both give the same bits: a bfloat16 layer rounds the
tensor's 0.3 but not the float's, so that one stays a float and gets a graph of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

__all__ = ["Strengths"]

_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


class Strengths:
    """The strength tensors of one model's adapter layers, as far as they were seen."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tensors: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A strength set inside goes into the tensor that held it before, where bits allow."""
        layers = [module for module in self._model.modules() if _scaling(module) is not None]
        for layer in layers:
            found = {n: t for n, t in (_scaling(layer) or {}).items() if isinstance(t, Tensor)}
            if found:
                self._tensors.setdefault(layer, {}).update(found)
        yield
        for layer, tensors in list(self._tensors.items()):
            scaling = _scaling(layer)
            for name, tensor in tensors.items():
                value = scaling.get(name) if scaling is not None else None
                if isinstance(value, float) and _is_same(value, tensor, _dtype(layer, name)):
                    assert scaling is not None
                    tensor.fill_(value)
                    scaling[name] = tensor


def _scaling(module: nn.Module) -> dict[str, object] | None:
    found = getattr(module, "scaling", None)
    return found if isinstance(found, dict) and hasattr(module, "lora_B") else None


def _dtype(layer: nn.Module, adapter: str) -> torch.dtype:
    """What a strength is multiplied with: the second projection's result."""
    projections = cast("dict[str, nn.Module]", layer.lora_B)
    if adapter not in projections:  # an embedding's adapter keeps bare parameters
        return torch.float32
    return next(projections[adapter].parameters()).dtype


def _is_same(value: float, tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a product with the tensor has the bits of one with the float."""
    as_tensor = torch.tensor(value, dtype=tensor.dtype).to(dtype)
    as_float = torch.tensor(value, dtype=_WIDER.get(dtype, dtype))
    return bool(as_tensor.to(as_float.dtype) == as_float)
