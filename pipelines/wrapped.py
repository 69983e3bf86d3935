"""Owns the public `wrap`: the core's, told what diffusers and accelerate attach to modules.

Must never know pipelines or requests. The surprising fact: a bare transformer may carry a step
cache or offload hooks as well as one inside a pipeline, and a graph that skips them is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from torch import nn

from dit_graphs.config import GraphConfig
from dit_graphs.errors import ConfigError
from dit_graphs.runner import RunnerOptions
from dit_graphs.wrapping import break_policy, wrap_with

from .attachments import state_guard
from .families import family_of
from .families.buckets import buckets_of
from .outputs import know_holders
from .step_caches import StepCache

__all__ = ["wrap"]

M = TypeVar("M", bound=nn.Module)


def wrap(
    module: M,
    config: GraphConfig | None = None,
    *,
    method: str = "forward",
    key: Callable[[], Hashable] | None = None,
    ignore: tuple[str, ...] = (),
    **overrides: object,
) -> M:
    """The same module, whose `method` replays graphs from now on. Idempotent.

    `key()` is read on every call and joins the signature; arguments named in `ignore` leave it
    (they must not be able to change the result). Results are the caller's own tensors.
    Raises `ConfigError`, with the module untouched.
    """
    config = (config or GraphConfig()).with_overrides(**overrides)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"expected a torch.nn.Module, got {type(module).__name__}")
    know_holders(module)
    carried = StepCache(module) if method == "forward" else None
    backend = config.backend_for(RunnerOptions().component)
    options = RunnerOptions(
        key=key,
        ignore=tuple(ignore),
        policy=break_policy(config),
        guard=state_guard(module, serves_caches=carried is not None, backend=backend),
        carried=carried,
        family=family_of(module, method),
        padding=buckets_of(module, config) if method == "forward" else None,
    )
    wrap_with(module, config, options, method=method)
    return module
