"""The diffusers side: which modules of a pipeline get graphs, when a request begins and ends.

Owns `accelerate` and its companions. The surprising fact: nothing here is imported until the
first call, so `import dit_graphs` stays fast and free of diffusers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .acceleration import accelerate, restore
    from .reports import disabled, explain, stats
    from .warm_up import warmup

__all__ = ["accelerate", "disabled", "explain", "restore", "stats", "warmup"]

_HOMES = {
    "accelerate": "acceleration",
    "disabled": "reports",
    "explain": "reports",
    "restore": "acceleration",
    "stats": "reports",
    "warmup": "warm_up",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
