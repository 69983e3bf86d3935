"""Everything outside a call that picks kernels is part of its key, and told by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dit_graphs.ambient import ambient_state, changed_settings

CPU = torch.device("cpu")
CUDA, CUDNN = torch.backends.cuda, torch.backends.cudnn


def _turn(owner: object, name: str) -> tuple[Callable[[], object], Callable[[object], object]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


# what is told of it → how it is read, how it is set, and another value
SETTINGS: dict[str, tuple[Callable[[], object], Callable[[object], object], object]] = {
    "flash_sdp": (CUDA.flash_sdp_enabled, CUDA.enable_flash_sdp, False),
    "mem_efficient_sdp": (CUDA.mem_efficient_sdp_enabled, CUDA.enable_mem_efficient_sdp, False),
    "math_sdp": (CUDA.math_sdp_enabled, CUDA.enable_math_sdp, False),
    "cudnn_sdp": (CUDA.cudnn_sdp_enabled, CUDA.enable_cudnn_sdp, False),
    "cublas_allow_bf16_reduced_precision_reduction": (
        *_turn(CUDA.matmul, "allow_bf16_reduced_precision_reduction"),
        False,
    ),
    "cublas_allow_fp16_reduced_precision_reduction": (
        *_turn(CUDA.matmul, "allow_fp16_reduced_precision_reduction"),
        False,
    ),
    "cublas_allow_fp16_accumulation": (*_turn(CUDA.matmul, "allow_fp16_accumulation"), True),
    "cudnn": (*_turn(CUDNN, "enabled"), False),
    "cudnn_benchmark": (*_turn(CUDNN, "benchmark"), True),
    "cudnn_deterministic": (*_turn(CUDNN, "deterministic"), True),
    "deterministic_algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        True,
    ),
    "mkldnn": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False),
    "float32_matmul_precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "high",
    ),
    "cudnn_allow_tf32": (*_turn(CUDNN, "allow_tf32"), False),
    "default_dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "scaled_dot_product_attention": (
        *_turn(nn.functional, "scaled_dot_product_attention"),
        lambda *tensors: tensors[0],
    ),
}


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    before = {name: read() for name, (read, _, _) in SETTINGS.items()}
    yield
    for name, (_, turn, _) in SETTINGS.items():
        turn(before[name])


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_keyed_and_named(name: str) -> None:
    read, turn, other = SETTINGS[name]
    before, was = ambient_state(CPU), read()
    turn(other)
    assert ambient_state(CPU) != before
    told = changed_settings(before, ambient_state(CPU))
    assert name in [part.split(" ")[0] for part in told.split(", ")], told
    turn(was)
    assert ambient_state(CPU) == before


def test_the_order_of_attention_kernels_is_keyed_and_named() -> None:
    before = ambient_state(CPU)
    kernels = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(kernels, set_priority=True):
        assert "sdp_priority_order" in changed_settings(before, ambient_state(CPU))
    assert ambient_state(CPU) == before


def test_autocast_and_the_default_device_are_keyed_and_named() -> None:
    before = ambient_state(CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        told = changed_settings(before, ambient_state(CPU))
        assert told == "autocast None → torch.bfloat16"
        with torch.autocast("cpu", dtype=torch.float16):
            assert ambient_state(CPU) != before
            assert "torch.float16" in changed_settings(before, ambient_state(CPU))
    with torch.device("meta"):
        assert changed_settings(before, ambient_state(CPU)) == "default_device  → meta"
    assert ambient_state(CPU) == before


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="this torch has it not"
)
def test_what_the_new_precision_switches_say_is_keyed_where_the_old_ones_refuse() -> None:
    matmul = torch.backends.cuda.matmul
    before, was = ambient_state(CPU), matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32" if was != "tf32" else "ieee"
        assert ambient_state(CPU) != before
    finally:
        matmul.fp32_precision = was
    assert ambient_state(CPU) == before
