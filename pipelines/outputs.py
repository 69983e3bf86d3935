"""Owns what models take and return besides tensors: distributions and key-value caches.

Must never know graphs. The surprising fact: both are plain holders of tensors. A replayed `encode`
hands out an equal distribution, and `sample(generator)` draws what eager's would; a filled cache is
as many inputs as it has tensors. A call that fills one changes an argument, and stays eager.
"""

from __future__ import annotations

import sys

from torch import nn

from dit_graphs.tree import register_parts

__all__ = ["know_holders"]


def know_holders(module: nn.Module) -> None:
    """Calls of `module` may hold the distributions and caches of diffusers its code works with."""
    home = sys.modules.get(type(module).__module__)
    for kind in list(vars(home).values()) if home is not None else ():
        if isinstance(kind, type) and _is_holder(kind):
            register_parts(kind)


def _is_holder(kind: type) -> bool:
    is_named_so = kind.__name__.endswith(("Distribution", "KVCache", "KVLayerCache"))
    return is_named_so and kind.__module__.startswith("diffusers.")
