"""Owns Cosmos 3: which precision its pipeline has chosen for the present step.

Must never know graphs. The surprising fact: linear layers ask an object behind a closure, which the
pipeline turns between two steps of one picture. No argument shows it and no known method is called.
"""

from __future__ import annotations

from collections.abc import Hashable

from .base import ModelFamily

__all__ = ["Cosmos3"]

_RUNTIME = "_cosmos3_mixed_precision_runtime"  # put there by diffusers.pipelines.cosmos


class Cosmos3(ModelFamily):
    """Layers choose between two precisions, which the pipeline turns between steps."""

    def facts(self) -> Hashable:
        """Which of the two the present step takes; None where there is no choice."""
        runtime = vars(self.module).get(_RUNTIME)
        if runtime is None:
            return None
        return bool(runtime.active), bool(runtime.generation_high_precision)
