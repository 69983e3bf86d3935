"""Owns the process and thread state that changes what one call computes: `ambient_state`.

Must never know modules or arguments. The surprising fact: autocast, SDPA switches and matmul
precision pick kernels without appearing in any argument, so a graph captured under one setting
replayed under another would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import ParamSpec, SupportsInt, TypeVar

import torch
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._device import DeviceContext

from .errors import Reason
from .tree import Identity

__all__ = ["ambient_state", "casting", "changed_settings", "foreign_mode", "outside_modes"]

_SETTINGS: tuple[Callable[[], Hashable], ...] = (
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    torch._C._get_cudnn_enabled,
    torch._C._get_cudnn_benchmark,
    torch._C._get_cudnn_deterministic,
    torch._C._get_deterministic_algorithms,
    torch._C._get_mkldnn_enabled,
)
# settings that only some torch releases have, as numbers: their objects are new in each question
_AS_NUMBERS: tuple[Callable[[], SupportsInt], ...] = tuple(
    getattr(torch._C, name)
    for name in ("_get_cublas_allow_fp16_accumulation", "_get_blas_preferred_backend")
    if hasattr(torch._C, name)
)
_OLD_PRECISION: tuple[Callable[[], Hashable], ...] = (
    torch._C._get_float32_matmul_precision,
    torch._C._get_cublas_allow_tf32,
    torch._C._get_cudnn_allow_tf32,
)
_new_precision = getattr(torch._C, "_get_fp32_precision_getter", None)
_KINDS_OF_PRECISION = (
    *(("cuda", op) for op in ("matmul", "conv", "rnn")),
    *(("mkldnn", op) for op in ("matmul", "conv", "rnn")),
    ("generic", "all"),
)


def _name_of(getter: Callable[[], object]) -> str:
    return getter.__name__.removeprefix("_get_").removesuffix("_enabled")


_NAMES = (  # in the order of `ambient_state`
    "autocast",
    *map(_name_of, (*_SETTINGS, *_AS_NUMBERS)),
    "sdp_priority_order",
    *map(_name_of, _OLD_PRECISION),
    *(f"{kind} {op} precision" for kind, op in _KINDS_OF_PRECISION if _new_precision is not None),
    "default_dtype",
    "default_device",
    "scaled_dot_product_attention",
)

P = ParamSpec("P")
R = TypeVar("R")


def outside_modes(look: Callable[P, R]) -> Callable[P, R]:
    """`look` only asks tensors where they lie and what they are like.

    Under `torch.set_default_device` each such question would take a way through Python, ten times
    as long.
    """

    @wraps(look)
    def looks(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return look(*args, **kwargs)

    return looks


def foreign_mode(device: torch.device) -> Reason | None:
    """The reason this call must be eager whatever its arguments, or None.

    Gradients, dispatch or function modes that are not ours, functorch, tracing, compiling, and
    a stream somebody else is capturing.
    """
    if torch.is_grad_enabled():
        return Reason.GRAD_ENABLED
    if _has_any_global_hook():
        return Reason.HOOKS
    core = torch._C
    if core._len_torch_dispatch_stack() or core._get_tracing_state() is not None:
        return Reason.FOREIGN_MODE
    for level in range(core._len_torch_function_stack()):
        if not isinstance(core._get_function_stack_at(level), DeviceContext):
            return Reason.FOREIGN_MODE
    if core._functorch.peek_interpreter_stack() is not None or torch.compiler.is_compiling():
        return Reason.FOREIGN_MODE
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return Reason.FOREIGN_MODE
    return None


def ambient_state(device: torch.device) -> Hashable:
    """A hashable value of everything outside the call that selects kernels or precision."""
    return (
        _autocast(device.type),
        *[getter() for getter in _SETTINGS],
        *[int(getter()) for getter in _AS_NUMBERS],
        tuple(torch._C._get_sdp_priority_order()),
        *_precision(),
        torch.get_default_dtype(),
        _default_device(),
        Identity(torch.nn.functional.scaled_dot_product_attention),  # exchanged by name, as a rule
    )


def changed_settings(mine: Hashable, theirs: Hashable) -> str:
    """What tells two values of `ambient_state` apart, by name."""
    if not (isinstance(mine, tuple) and isinstance(theirs, tuple)):
        return f"{mine} → {theirs}"
    rows = zip(_NAMES, mine, theirs, strict=False)
    return ", ".join(f"{name} {one} → {other}" for name, one, other in rows if one != other)


def casting(device: torch.device) -> Hashable:
    """Autocast and the default dtype: what a caller turns between two calls, as a rule."""
    return _autocast(device.type), torch.get_default_dtype()


def _autocast(kind: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _precision() -> list[Hashable]:
    """TF32 and its kin; torch refuses the old getters once the new settings were used."""
    found: list[Hashable] = []
    for getter in _OLD_PRECISION:
        try:
            found.append(getter())
        except RuntimeError:
            found.append("mixed")
    if _new_precision is not None:
        found.extend([_new_precision(*kind) for kind in _KINDS_OF_PRECISION])
    return found


def _default_device() -> str:
    core = torch._C
    for level in reversed(range(core._len_torch_function_stack())):
        mode = core._get_function_stack_at(level)
        if isinstance(mode, DeviceContext):
            return str(mode.device)
    return ""
