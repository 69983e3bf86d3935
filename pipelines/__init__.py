"""The diffusers side: which modules of a pipeline get graphs, when a request begins and ends.

Owns `accelerate` and its companions. The surprising fact: nothing here is imported until the
first call, so `import dit_graphs` stays fast and free of diffusers.
"""

from __future__ import annotations

from .accelerate import accelerate, disabled, explain, restore, stats
from .warm_up import warmup

__all__ = ["accelerate", "disabled", "explain", "restore", "stats", "warmup"]
