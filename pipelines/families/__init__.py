"""Owns which classes of diffusers need a family to be recorded whole, and finds it for a module.

Must never import diffusers or a family before one is needed. The surprising fact: a family is for
the class's own forward only. A patched one may read anything, so it goes the general way.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from torch import nn

from dit_graphs.calls import Family

__all__ = ["FAMILIES", "family_of"]

# class of diffusers -> module of this package and name of the family in it
FAMILIES: dict[str, tuple[str, str]] = {
    "BriaFibo2Transformer2DModel": ("masked", "BriaFibo2"),
    "Cosmos3OmniTransformer": ("cosmos3", "Cosmos3"),
    "GlmImageTransformer2DModel": ("masked", "GlmImage"),
    "HiDreamImageTransformer2DModel": ("hidream", "HiDream"),
    "HunyuanImageTransformer2DModel": ("masked", "HunyuanImage"),
    "HunyuanVideo15Transformer3DModel": ("masked", "HunyuanVideo15"),
    "HunyuanVideoFramepackTransformer3DModel": ("masked", "FramePack"),
    "Lumina2Transformer2DModel": ("masked", "PromptMask"),
    "MochiTransformer3DModel": ("masked", "PromptMask"),
    "OmniGenTransformer2DModel": ("omnigen", "OmniGen"),
    "QwenImage21Transformer2DModel": ("masked", "QwenImage21"),
    "WanAnimate2Transformer3DModel": ("masked", "WanAnimate2"),
    "ZImageTransformer2DModel": ("z_image", "ZImage"),
}


def family_of(module: nn.Module, method: str = "forward") -> Family | None:
    """The family of a module's class, new for this module; None where it needs none."""
    kind = type(module)
    found = FAMILIES.get(kind.__name__)
    is_own = kind.__module__.startswith("diffusers.") and "forward" not in vars(module)
    if found is None or method != "forward" or not is_own:
        return None
    home, name = found
    make = cast("Callable[[nn.Module], Family]", getattr(import_module(f"{__name__}.{home}"), name))
    return make(module)
