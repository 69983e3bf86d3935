"""Owns HiDream: its mixture of experts stays eager, and only that.

Must never know graphs. The surprising fact: computing all experts for all tokens would need no read
on the host and is mathematically the same, but not bit for bit: a matrix product may use other
kernels for other numbers of rows, and how many rows an expert gets changes from step to step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from dit_graphs import eager_on_graph

from .base import ModelFamily
from .patches import Function, replacing

__all__ = ["HiDream"]

_EXPERTS = "MOEFeedForwardSwiGLU"


class HiDream(ModelFamily):
    """Routing and shared experts are recorded; handing tokens to experts is a break."""

    def recording(self) -> AbstractContextManager[None]:
        mixtures = [m for m in self.module.modules() if type(m).__name__ == _EXPERTS]
        return replacing(mixtures, "moe_infer", _as_break)


def _as_break(module: nn.Module, infer: Function) -> Function:
    return eager_on_graph(infer)
