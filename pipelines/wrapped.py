"""Owns the public `wrap`: the core's, told what diffusers and accelerate attach to modules.

Must never know pipelines or requests. The surprising fact: a bare transformer may carry a step
cache or offload hooks as well as one inside a pipeline, and a graph that skips them is wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

from torch import nn

from dit_graphs.config import GraphConfig
from dit_graphs.errors import ConfigError
from dit_graphs.runner import RunnerOptions
from dit_graphs.wrapping import break_policy, check_wrappable, runner_of, unwrap, wrap_with

from .attachments import state_guard
from .families import family_of
from .families.buckets import buckets_of
from .installed import warn_of_other_config
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
    """The same module, whose `method` replays graphs from now on. Idempotent: a second call with
    the same choices changes nothing, others replace the first ones.

    `key()` is read on every call and joins the signature; arguments named in `ignore` leave it
    (they must not be able to change the result). Results are the caller's own tensors.
    Raises `ConfigError`, with the module untouched.
    """
    config = GraphConfig.chosen(config, overrides)
    config.check_available()
    if not isinstance(module, nn.Module):
        raise ConfigError(f"expected a torch.nn.Module, got {type(module).__name__}")
    _check_options(module, config, method, key, ignore)
    know_holders(module)
    carried = StepCache(module) if method == "forward" else None
    backend = config.backend_for(RunnerOptions().component)
    options = RunnerOptions(
        label=_named(module, method),
        key=key,
        ignore=tuple(ignore),
        policy=break_policy(config),
        guard=state_guard(module, serves_caches=carried is not None, backend=backend),
        carried=carried,
        family=family_of(module, method),
        padding=buckets_of(module, config) if method == "forward" else None,
    )
    known = runner_of(module, method)
    if known is not None and _choices(known.config, known.options) != _choices(config, options):
        check_wrappable(module, method)
        unwrap(module, method=method)
    runner = wrap_with(module, config, options, method=method)
    warn_of_other_config(options.label, runner, config)
    return module


def _named(module: nn.Module, method: str) -> str:
    """What the log and `explain` call it: several wrapped modules are told apart."""
    name = type(module).__name__
    return name if method == "forward" else f"{name}.{method}"


def _choices(config: GraphConfig, options: RunnerOptions) -> tuple[object, ...]:
    return config, options.key, options.ignore


def _check_options(
    module: nn.Module, config: GraphConfig, method: object, key: object, ignore: object
) -> None:
    """Raises `ConfigError` for what would fail in the first call, or be ignored in silence."""
    if not isinstance(method, str):
        raise ConfigError(f"method: expected a name, got {method!r}")
    if key is not None and not callable(key):
        raise ConfigError(f"key: expected a function that is called without arguments, got {key!r}")
    for name in ("backend", "memory_budget"):
        if isinstance(getattr(config, name), Mapping):
            raise ConfigError(
                f"{name}: wrap() serves one module, which is no component: give one value"
            )
    if isinstance(ignore, str) or not isinstance(ignore, (tuple, list, set, frozenset)):
        raise ConfigError(f"ignore: expected a tuple of argument names, got {ignore!r}")
    called = getattr(module, method, None)
    if not ignore or not callable(called):
        return
    parameters = inspect.signature(called).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [name for name in ignore if name not in parameters and not takes_any]
    if unknown:
        raise ConfigError(f"ignore: {method} takes no {unknown}; it takes {list(parameters)}")
