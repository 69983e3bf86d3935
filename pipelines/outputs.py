"""Owns what VAEs return besides tensors: distributions, to be sampled by the pipeline.

Must never know graphs. The surprising fact: a distribution is a plain holder of tensors, so a
replayed `encode` hands out an equal one, and `sample(generator)` draws what eager's would.
"""

from __future__ import annotations

import sys

from torch import nn

from dit_graphs.tree import register_parts

__all__ = ["know_distributions"]


def know_distributions(module: nn.Module) -> None:
    """Results of `module` may hold the distributions of diffusers that its code works with."""
    home = sys.modules.get(type(module).__module__)
    for kind in list(vars(home).values()) if home is not None else ():
        if isinstance(kind, type) and _is_distribution(kind):
            register_parts(kind)


def _is_distribution(kind: type) -> bool:
    return kind.__module__.startswith("diffusers.") and kind.__name__.endswith("Distribution")
