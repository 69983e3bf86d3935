"""Owns the names of the methods that change weights, adapters, processors or caches, and who hears.

Must never know graphs. The surprising fact: a callback may call any of them between two steps of
one request, so after each the module is looked at again before the next call replays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, cast

from torch import nn

from dit_graphs.intercept import MethodOverride

from .strengths import Strengths

__all__ = [
    "GUIDER_MUTATORS",
    "MODULE_MUTATORS",
    "PIPELINE_MUTATORS",
    "Listener",
    "Overheard",
    "guider_mutators",
    "listen",
]

PIPELINE_MUTATORS = (
    "load_lora_weights",
    "unload_lora_weights",
    "set_adapters",
    "disable_lora",
    "enable_lora",
    "delete_adapters",
    "fuse_lora",
    "unfuse_lora",
    "enable_lora_hotswap",
    "set_ip_adapter_scale",
    "load_ip_adapter",
    "unload_ip_adapter",
    "enable_freeu",
    "disable_freeu",
    "fuse_qkv_projections",
    "unfuse_qkv_projections",
    "enable_fuser",  # GLIGEN turns its grounding off between two steps
    "to",
)
# Around each branch of guidance; those of most guiders do nothing.
GUIDER_MUTATORS = ("prepare_models", "cleanup_models")
MODULE_MUTATORS = (
    "fuse_lora",
    "unfuse_lora",
    "unload_lora",
    "disable_lora",
    "enable_lora",
    "load_lora_adapter",
    "enable_lora_hotswap",
    "set_default_attn_processor",
    "set_attention_slice",
    "enable_xformers_memory_efficient_attention",
    "disable_xformers_memory_efficient_attention",
    "load_state_dict",
    "_apply",
    "set_adapters",
    "set_adapter",
    "add_adapter",
    "delete_adapters",
    "enable_adapters",
    "disable_adapters",
    "set_attn_processor",
    "set_attention_backend",
    "reset_attention_backend",
    "enable_freeu",
    "disable_freeu",
    "fuse_qkv_projections",
    "unfuse_qkv_projections",
    "enable_cache",
    "disable_cache",
    "enable_tiling",
    "disable_tiling",
    "enable_slicing",
    "disable_slicing",
)


def guider_mutators(guider: object) -> tuple[str, ...]:
    """Those of `GUIDER_MUTATORS` in which this guider puts hooks on blocks, or takes them off."""
    from diffusers.guiders.guider_utils import BaseGuidance

    kind = type(guider)
    return tuple(
        name
        for name in GUIDER_MUTATORS
        if getattr(kind, name, None) is not getattr(BaseGuidance, name)
    )


class Listener(Protocol):
    """Whoever wants to know that something was changed."""

    def notice_change(self) -> None: ...


class Overheard(MethodOverride):
    """A method whose users hear of every call, once it is done or has raised."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        try:
            return self.run(*args, **kwargs)
        finally:
            for user in dict.fromkeys(self.users):
                cast(Listener, user).notice_change()

    def run(self, *args: object, **kwargs: object) -> object:
        """The method itself."""
        return self.original(*args, **kwargs)


class OverheardStrengths(Overheard):
    """`set_adapters` of a module: strengths that lie in tensors stay there."""

    def __init__(self, owner: object, name: str) -> None:
        super().__init__(owner, name)
        self._strengths = Strengths(cast(nn.Module, owner))

    def run(self, *args: object, **kwargs: object) -> object:
        if not self.users:  # nobody replays graphs of this module any longer
            return self.original(*args, **kwargs)
        with self._strengths.kept():
            return self.original(*args, **kwargs)


def listen(owner: object, names: Iterable[str], listener: Listener) -> list[Overheard]:
    """Those of the named methods that `owner` has; `drop(listener)` each of them to hear no more.

    Pipelines that share a module share what stands before its methods.
    """
    heard: list[Overheard] = []
    for name in names:
        if not callable(getattr(type(owner), name, None)):
            continue
        found = vars(owner).get(name)
        if isinstance(found, Overheard) and found.users:
            found.users.append(listener)
        else:
            keeps = name == "set_adapters" and isinstance(owner, nn.Module)
            found = OverheardStrengths(owner, name) if keeps else Overheard(owner, name)
            found.put(listener)
        heard.append(found)
    return heard
