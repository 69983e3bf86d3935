"""CUDA graphs for unmodified diffusers pipelines: one line, same bits, no compile step.

Owns the public names. The surprising fact: importing this package imports neither torch nor
diffusers; each name loads what it needs on first use, so `dit-graphs --help` is instant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .config import GraphConfig
from .errors import ConfigError, FallbackError, GraphError, Reason

if TYPE_CHECKING:
    from .breaks import break_graph, eager_on_graph
    from .pipelines import accelerate, disabled, explain, restore, stats, warmup
    from .pipelines.text_encoder.rewrite import rewrite_prompt
    from .pipelines.wrapped import wrap
    from .request_scope import request
    from .signature import register_leaf
    from .wrapping import unwrap

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "FallbackError",
    "GraphConfig",
    "GraphError",
    "Reason",
    "accelerate",
    "break_graph",
    "disabled",
    "eager_on_graph",
    "explain",
    "register_leaf",
    "request",
    "restore",
    "rewrite_prompt",
    "stats",
    "unwrap",
    "warmup",
    "wrap",
]

# No name here may equal a submodule's: importing the submodule would put it in the name's place.
_HOMES = {
    "break_graph": "breaks",
    "eager_on_graph": "breaks",
    "register_leaf": "signature",
    "request": "request_scope",
    "unwrap": "wrapping",
    "wrap": "pipelines.wrapped",
    "accelerate": "pipelines.acceleration",
    "disabled": "pipelines.reports",
    "explain": "pipelines.reports",
    "restore": "pipelines.acceleration",
    "stats": "pipelines.reports",
    "warmup": "pipelines.warm_up",
    "rewrite_prompt": "pipelines.text_encoder.rewrite",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
