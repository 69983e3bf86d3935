"""Owns the process and thread state that changes what one call computes: `ambient_state`.

Must never know modules or arguments. The surprising fact: autocast, SDPA switches and matmul
precision pick kernels without appearing in any argument, so a graph captured under one setting
replayed under another would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._device import DeviceContext

from .errors import Reason
from .tree import Identity

__all__ = ["ambient_state", "foreign_mode", "outside_modes"]

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
    core = torch._C
    kind = device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return (
        autocast,
        core._get_flash_sdp_enabled(),
        core._get_mem_efficient_sdp_enabled(),
        core._get_math_sdp_enabled(),
        core._get_cudnn_sdp_enabled(),
        tuple(core._get_sdp_priority_order()),
        _precision(),
        *_optional("_get_cublas_allow_fp16_accumulation", "_get_blas_preferred_backend"),
        core._get_cublas_allow_bf16_reduced_precision_reduction(),
        core._get_cublas_allow_fp16_reduced_precision_reduction(),
        core._get_cudnn_enabled(),
        core._get_cudnn_benchmark(),
        core._get_cudnn_deterministic(),
        core._get_deterministic_algorithms(),
        core._get_mkldnn_enabled(),
        torch.get_default_dtype(),
        _default_device(),
        Identity(torch.nn.functional.scaled_dot_product_attention),  # exchanged by name, as a rule
    )


def _optional(*names: str) -> list[Hashable]:
    """Settings that only some torch releases have."""
    getters = (getattr(torch._C, name, None) for name in names)
    return [str(getter()) for getter in getters if getter is not None]


def _precision() -> tuple[Hashable, ...]:
    """TF32 and its kin; torch refuses the old getters once the new settings were used."""
    core = torch._C
    found: list[Hashable] = []
    for getter in (
        core._get_float32_matmul_precision,
        core._get_cublas_allow_tf32,
        core._get_cudnn_allow_tf32,
    ):
        try:
            found.append(getter())
        except RuntimeError:
            found.append("mixed")
    newer = getattr(core, "_get_fp32_precision_getter", None)
    if newer is not None:
        found.extend(newer("cuda", op) for op in ("matmul", "conv", "rnn"))
        found.extend(newer("mkldnn", op) for op in ("matmul", "conv", "rnn"))
        found.append(newer("generic", "all"))
    return tuple(found)


def _default_device() -> str:
    core = torch._C
    for level in reversed(range(core._len_torch_function_stack())):
        mode = core._get_function_stack_at(level)
        if isinstance(mode, DeviceContext):
            return str(mode.device)
    return ""
