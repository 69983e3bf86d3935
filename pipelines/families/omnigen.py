"""Owns OmniGen: rotary tables that a forward rebuilds, and the length that picks their factors.

Must never know graphs. The surprising fact: the forward assigns a new tensor to the registered
buffer `rope.inv_freq` on every call and never reads the old one. To whoever asks whether the
weights are still those of the graph, that looks like weights that move.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from dit_graphs.intercept import MethodOverride

from .base import Fact, ModelFamily

__all__ = ["OmniGen"]


def _longest(position_ids: Tensor) -> int:
    """The forward asks whether the sequence is longer than those of the first training."""
    return int(position_ids.max()) + 1  # sync: once per prompt


class OmniGen(ModelFamily):
    """The buffer keeps its tensor and gets the new values; that a sequence is long is known."""

    known: ClassVar[Mapping[str, Fact]] = {"position_ids": _longest}

    def open(self) -> None:
        rope = self.module.get_submodule("rope")
        override = MethodOverride(rope, "forward")
        original = override.original

        def forward(*args: object, **kwargs: object) -> object:
            before = rope._buffers["inv_freq"]
            result = original(*args, **kwargs)
            after = rope._buffers["inv_freq"]
            assert before is not None and after is not None
            if (before.dtype, before.shape) == (after.dtype, after.shape):
                before.copy_(after)
                rope._buffers["inv_freq"] = before
            return result

        override.serve = forward
        override.put(self)
        self._override = override

    def close(self) -> None:
        self._override.drop(self)
