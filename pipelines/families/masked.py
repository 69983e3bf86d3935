"""Owns the families whose forward reads masks and positions on the host, and nothing else.

Must never know graphs. The surprising fact: that is all most of them need. Where a prompt ends is a
fact of its mask; with the fact in the signature every length, index and branch that follows from it
is the same on every replay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from .base import Fact, ModelFamily, layout, same_bytes

__all__ = [
    "BriaFibo2",
    "FramePack",
    "GlmImage",
    "HunyuanImage",
    "HunyuanVideo15",
    "PromptMask",
    "QwenImage21",
    "WanAnimate2",
]


def _is_empty(image_embeds: Tensor) -> bool:
    """Text-to-video passes zeros, and the forward asks whether they are."""
    return not bool(image_embeds.any())  # sync: once per request


class PromptMask(ModelFamily):
    """Each sample's prompt is cut to its length, or its valid tokens are gathered."""

    known: ClassVar[Mapping[str, Fact]] = {"encoder_attention_mask": layout}


class FramePack(PromptMask):
    """The prompt of a single sample is cut to its length."""


class BriaFibo2(PromptMask):
    """How many gist tokens there are follows from the prompts' lengths."""


class HunyuanImage(ModelFamily):
    """Tokens of two encoders are sorted: valid ones first."""

    known: ClassVar[Mapping[str, Fact]] = {
        "encoder_attention_mask": layout,
        "encoder_attention_mask_2": layout,
    }


class HunyuanVideo15(ModelFamily):
    """Tokens of three encoders are sorted: valid ones first; an image of zeros means none."""

    known: ClassVar[Mapping[str, Fact]] = {**HunyuanImage.known, "image_embeds": _is_empty}


class GlmImage(ModelFamily):
    """Samples whose prior is dropped are picked by a mask."""

    known: ClassVar[Mapping[str, Fact]] = {"prior_token_drop": layout}


class WanAnimate2(ModelFamily):
    """Patch grids come as small tensors; every layer asks for their sides."""

    known: ClassVar[Mapping[str, Fact]] = {
        "offset_grid_sizes": same_bytes,
        "reference_grid_sizes": same_bytes,
    }


class QwenImage21(ModelFamily):
    """The order of text and image tokens is read from the image mask."""

    known: ClassVar[Mapping[str, Fact]] = {"img_mask": same_bytes}
