"""Owns `wrap_with` and `unwrap`: graphs for one method of any module.

Must never know pipelines. The surprising fact: a module has one runner however many wrap it (the
user, two pipelines that share it); wrapping twice changes nothing, the runner goes with the last of
them, and a module that cannot be wrapped raises before anything on it was touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from .calls import device_of
from .carrying import CarryingRunner
from .config import GraphConfig
from .errors import ConfigError
from .intercept import CALL, Function, Intercept, find_intercept, install
from .memory import device_state
from .runner import GraphRunner, RunnerOptions
from .watch import BreakPolicy

__all__ = [
    "break_policy",
    "check_wrappable",
    "let_go",
    "runner_of",
    "unwrap",
    "wrap_with",
]

M = TypeVar("M", bound=nn.Module)
WRAP = "wrap"  # who needs a runner when nobody says who: the caller of `wrap`, until `unwrap`

_DYNAMIC_OPS = ("varlen", "sageattention", "sparse_attn", "block_sparse")
_ATTENTION_OPS = (*_DYNAMIC_OPS, "flash_attn", "flash_attention", "efficient_attention", "xformers")


def break_policy(config: GraphConfig) -> BreakPolicy:
    """Which attention calls are eager breaks under `config.attention`."""
    if config.attention == "captured":
        return BreakPolicy()
    if config.attention == "auto":
        return BreakPolicy(op_words=_DYNAMIC_OPS)
    functions = (torch.nn.functional.scaled_dot_product_attention,)
    return BreakPolicy(functions=functions, op_words=_ATTENTION_OPS)


def check_wrappable(module: object, method: str = "forward") -> nn.Module:
    """`module`, if its `method` can be wrapped. Raises `ConfigError` that says what to do."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"expected a torch.nn.Module, got {type(module).__name__}")
    name = type(module).__name__
    own = getattr(type(module), method, None)
    is_own = callable(own) and own is not getattr(nn.Module, method, None)
    if not is_own and not callable(vars(module).get(method)):
        if method == "forward":
            raise ConfigError(f"{name} has no forward of its own: pass a module that computes")
        raise ConfigError(f"{name} has no method {method}: pass the name of one it has")
    devices = {t.device for t in (*module.parameters(), *module.buffers())}
    if torch.device("meta") in devices:
        raise ConfigError(f"{name} is on the meta device: load its weights before wrapping")
    if len(devices) > 1:
        places = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"{name} has weights on {places}: move it to one device first")
    for path, child in module.named_modules():
        if _has_own_graphs(child):
            where = f"{name}.{path}" if path else name
            raise ConfigError(
                f"{where} is compiled with CUDA graphs of its own: compile it without "
                'mode="reduce-overhead" or "max-autotune", or do not wrap it'
            )
    return module


def _has_own_graphs(module: nn.Module) -> bool:
    for compiled in (
        module.__dict__.get("_compiled_call_impl"),
        getattr(module, "dynamo_ctx", None) if "_orig_mod" in module._modules else None,
    ):
        read = getattr(compiled, "get_compiler_config", None)
        settings = read() if callable(read) else getattr(compiled, "compiler_config", None)
        if isinstance(settings, dict) and settings.get("triton.cudagraphs"):
            return True
    return False


def wrap_with(
    module: nn.Module,
    config: GraphConfig,
    options: RunnerOptions,
    *,
    method: str = "forward",
    user: object = WRAP,
) -> GraphRunner:
    """The runner that serves `method` of the module from now on (an existing one as it is).

    A module that several `user`s wrap has one runner, made with the first one's config; it goes
    with the last of them. Raises `ConfigError`, with the module untouched.
    """
    existing = runner_of(module, method) if isinstance(module, nn.Module) else None
    if existing is not None:
        intercept = find_intercept(module, method)
        assert intercept is not None
        if user not in intercept.users:
            intercept.users.append(user)
            existing.attach(user, options)
        return existing
    config.check_available()
    check_wrappable(module, method)
    made: list[GraphRunner] = []

    kind = GraphRunner if options.carried is None else CarryingRunner

    def make(original: Function) -> Function:
        made.append(kind(module, original, config, options))
        return made[0]

    intercept = install(module, method, make, user)
    made[0].intercept = intercept
    return made[0]


def runner_of(module: nn.Module, method: str = "forward") -> GraphRunner | None:
    """The runner behind a wrapped method, or None."""
    intercept = find_intercept(module, method)
    serve = intercept.serve if intercept is not None else None
    return serve if isinstance(serve, GraphRunner) else None


def runners_of(module: nn.Module) -> dict[str, GraphRunner]:
    """The runners behind the wrapped methods of a module, by method."""
    methods = ("forward" if name == CALL else name for name in vars(module))
    found = ((method, runner_of(module, method)) for method in methods)
    return {method: runner for method, runner in found if runner is not None}


def unwrap(module: M, *, method: str = "forward") -> M:
    """The module as before `wrap`; its graphs and their memory are released.

    What `accelerate` put there stays until `restore`. Raises `ConfigError` for no module.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"expected a torch.nn.Module, got {type(module).__name__}")
    intercept = find_intercept(module, method) or _covered(module, method)
    if intercept is not None:
        let_go(intercept, WRAP)
    return module


def _covered(module: nn.Module, method: str) -> Intercept | None:
    """What `wrap` put on the module, although somebody has put something over it since."""
    runners = [r for r in device_state(device_of(module)).holders if isinstance(r, GraphRunner)]
    found = [r.intercept for r in runners if r.module is module and r.intercept is not None]
    name = method if method != "forward" else CALL
    return next((intercept for intercept in found if intercept.name == name), None)


def let_go(intercept: Intercept, user: object) -> None:
    """`user` needs what stands behind the intercept no longer; the last one closes it."""
    serve = intercept.serve
    if intercept.drop(user):
        close: Callable[[], None] = serve.close  # type: ignore[attr-defined]
        close()
    elif isinstance(serve, GraphRunner):
        serve.detach(user)
