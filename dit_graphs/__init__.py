"""CUDA graphs for unmodified diffusers pipelines: one line, same bits, no compile step.

Owns the public names. The surprising fact: importing this package does not import diffusers; the
pipeline functions load it on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .breaks import break_graph, eager_on_graph
from .config import GraphConfig
from .errors import ConfigError, FallbackError, GraphError, Reason
from .request import request
from .signature import register_leaf
from .wrapping import unwrap, wrap

if TYPE_CHECKING:
    from .pipelines import accelerate, disabled, explain, restore, stats, warmup
    from .pipelines.text_encoder.rewrite import rewrite_prompt

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

_PIPELINES = "dit_graphs.pipelines"
_FROM_PIPELINES = {
    **dict.fromkeys(
        ("accelerate", "disabled", "explain", "restore", "stats", "warmup"), _PIPELINES
    ),
    "rewrite_prompt": f"{_PIPELINES}.text_encoder.rewrite",
}


def __getattr__(name: str) -> object:
    if name in _FROM_PIPELINES:
        return getattr(import_module(_FROM_PIPELINES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
