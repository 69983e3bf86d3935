"""Owns what other libraries attach to modules: offload, casting, step caches, hooks.

Must never know graphs or import those libraries. The surprising fact: all of them replace
`forward` on single modules and keep their state in objects behind it, where no sweep of
attributes looks; so they are known by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

from torch import nn

from dit_graphs.errors import Reason

from .step_caches import SERVED_CONFIGS, SERVED_HOOKS, cannot_serve

__all__ = ["state_guard"]

_OFFLOAD_HOOKS = ("CpuOffload", "AlignDevicesHook", "UserCpuOffloadHook")
_MARKS = frozenset({"_hf_hook", "_diffusers_hook", "_cache_config", "_is_cached"})
_HOOK_REASONS = (
    ("group_offload", Reason.OFFLOAD),
    ("layerwise_casting", Reason.LAYERWISE_CASTING),
    ("layerwise_upcasting", Reason.LAYERWISE_CASTING),
    ("cache", Reason.STEP_CACHE),
    ("fbc_", Reason.STEP_CACHE),
    ("pyramid", Reason.STEP_CACHE),
    ("faster", Reason.STEP_CACHE),
    ("taylor", Reason.STEP_CACHE),
)


def state_guard(
    module: nn.Module, *, serves_caches: bool = False, backend: str = "auto"
) -> Callable[[], tuple[Reason, str] | None]:
    """A check of what is attached to `module` now: the reason for eager calls, or None.

    `serves_caches`: the module's runner carries the state of the step caches that graphs can serve,
    as far as its `backend` allows.
    """

    def check() -> tuple[Reason, str] | None:
        for path, child in module.named_modules() if _is_marked(module) else ():
            for reason, name in _attached(child, serves_caches):
                return reason, f"{name} on {path or type(module).__name__}"
        allows_breaks = backend != "full"
        refusal = cannot_serve(module, allows_breaks=allows_breaks) if serves_caches else None
        return (Reason.STEP_CACHE, refusal) if refusal is not None else None

    return check


def _is_marked(module: nn.Module) -> bool:
    """Whether anything at all is attached: asked for each picture, so without generators."""
    seen: set[int] = set()
    found = [module]
    for held in found:  # which grows
        if not _MARKS.isdisjoint(vars(held)):
            return True
        for child in held._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return False


def _attached(child: nn.Module, serves_caches: bool) -> Iterator[tuple[Reason, str]]:
    attributes = vars(child)
    hook = attributes.get("_hf_hook")
    if hook is not None:
        names = [type(part).__name__ for part in (hook, *getattr(hook, "hooks", ()))]
        is_offload = any(name in _OFFLOAD_HOOKS for name in names)
        yield Reason.OFFLOAD if is_offload else Reason.HOOKS, names[0]
    registry = attributes.get("_diffusers_hook")
    for name in cast("dict[str, object]", getattr(registry, "hooks", None) or {}):
        if not (serves_caches and name in SERVED_HOOKS):
            lowered = name.lower()
            yield next((r for word, r in _HOOK_REASONS if word in lowered), Reason.HOOKS), name
    config = attributes.get("_cache_config")
    if config is not None and not (serves_caches and type(config).__name__ in SERVED_CONFIGS):
        yield Reason.STEP_CACHE, type(config).__name__
    if attributes.get("_is_cached"):  # cache-dit
        yield Reason.STEP_CACHE, type(attributes.get("_context_manager")).__name__
