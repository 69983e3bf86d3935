"""Settings and weights that pick other kernels or other numbers without being arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from twin import Twin, Where

import dit_graphs


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        hidden = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.out(hidden)


def _serve(twin: Twin, seed: int, calls: int = 5) -> None:
    for index in range(calls):
        twin(twin.where.randn(2, 33, 16, seed=seed + index))


def test_b13_an_attention_kernel_chosen_around_the_call_takes_effect(where: Where) -> None:
    """sdpa_kernel at replay time only would be ignored by a graph captured without it."""
    twin = Twin(Attends(), where)
    _serve(twin, 0)
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        if backend is SDPBackend.FLASH_ATTENTION and where.device.type == "cuda":
            continue  # float32 has no such kernel there
        with sdpa_kernel(backend):
            _serve(twin, 10)
    assert twin.graphs >= 2


@pytest.mark.parametrize("name", ["_native_math", "native"])
def test_b13_an_attention_backend_of_diffusers_takes_effect(where: Where, name: str) -> None:
    """`set_attention_backend` changes processors: plain Python state of the module tree."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    twin = Twin(model, where)

    def serve(seed: int) -> None:
        for index in range(5):
            twin(
                hidden_states=where.randn(1, 9, 4, seed=seed + index),
                encoder_hidden_states=where.randn(1, 5, 16, seed=seed + index),
                pooled_projections=where.randn(1, 16, seed=seed),
                timestep=torch.ones(1, device=where.device),
                img_ids=torch.zeros(9, 3, device=where.device),
                txt_ids=torch.zeros(5, 3, device=where.device),
                return_dict=False,
            )

    serve(0)
    known = len(twin.runner.cache.entries)
    for module in (twin.module, twin.plain):
        module.set_attention_backend(name)
    serve(20)
    assert len(twin.runner.cache.entries) == known + 1


_CHANGES: dict[str, tuple[Callable[[nn.Module], object], bool]] = {
    "a new layer": (lambda m: setattr(m, "out", _layer(16, m.qkv.weight.device)), True),
    "an assigned state": (
        lambda m: m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()}, assign=True),
        True,
    ),
    "a loaded state": (
        lambda m: m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()}),
        False,
    ),
    "a parameter's data": (lambda m: setattr(m.out.weight, "data", m.out.weight * 0.5), True),
    "a new parameter": (
        lambda m: setattr(m.out, "weight", nn.Parameter(m.out.weight.detach() * 0.5)),
        True,
    ),
    "a write in place": (lambda m: m.out.weight.mul_(0.5), False),
    "another dtype and back": (lambda m: m.double().float(), True),
    "a bias taken away": (lambda m: setattr(m.out, "bias", None), True),
}


def _layer(width: int, device: torch.device) -> nn.Module:
    torch.manual_seed(9)
    return nn.Linear(width, width, device=device)


@pytest.mark.parametrize("kind", _CHANGES)
def test_b14_weights_that_moved_or_changed_are_the_ones_used(where: Where, kind: str) -> None:
    """A graph holds addresses. Whoever swaps a tensor must not get yesterday's weights."""
    change, moves = _CHANGES[kind]
    twin = Twin(Attends(), where)
    for number in range(3):
        with dit_graphs.request(total_steps=5):
            _serve(twin, 100 * number)
        for module in (twin.module, twin.plain):
            change(module)
    with dit_graphs.request(total_steps=5):
        _serve(twin, 900)
    invalidations = twin.runner.stats.invalidations
    if not moves:
        assert invalidations == 0
    elif where.backend != "debug":
        # a recording holds the old memory; debug does not, and the new may lie where the old did
        assert invalidations == (1 if kind == "a bias taken away" else 3)


def test_b14_a_block_swapped_for_another_kind(where: Where) -> None:
    """Quantising replaces layers by others of the same name; the tree is part of the state."""

    class Halves(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * 0.5

    twin = Twin(Attends(), where)
    _serve(twin, 0)
    for module in (twin.module, twin.plain):
        module.out = Halves(module.out)
    _serve(twin, 50)
    for module in (twin.module, twin.plain):
        module.out = module.out.inner
    _serve(twin, 80)


def test_b56_autocast_is_keyed_and_its_weight_cache_is_not_baked(where: Where) -> None:
    """Autocast keeps cast copies of weights: baked in, they would outlive an update in place."""
    twin = Twin(Attends(), where)
    kind = where.device.type
    with torch.autocast(kind, dtype=torch.bfloat16):
        _serve(twin, 0)
        for module in (twin.module, twin.plain):
            module.out.weight.copy_(torch.ones_like(module.out.weight))
    with torch.autocast(kind, dtype=torch.bfloat16):
        _serve(twin, 20)
    _serve(twin, 40)
    with torch.autocast(kind, dtype=torch.float16):
        _serve(twin, 60)
    assert twin.graphs == 3


def test_b58_a_dtype_that_flips_between_calls_is_honoured(where: Where) -> None:
    """A VAE upcast to float32 for each decode and cast back afterwards."""
    twin = Twin(Attends(), where)
    for number in range(4):
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        for module in (twin.module, twin.plain):
            module.to(dtype)
        for index in range(4):
            twin(where.randn(2, 9, 16, seed=10 * number + index).to(dtype))


def test_a_deterministic_switch_is_another_graph(where: Where) -> None:
    """Deterministic mode picks other kernels; a graph of the fast ones must not answer."""
    twin = Twin(Attends(), where)
    _serve(twin, 0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        _serve(twin, 10)
    finally:
        torch.use_deterministic_algorithms(False)
    assert twin.graphs == 2


def test_an_input_at_another_alignment_is_another_graph(where: Where) -> None:
    """Matrix kernels are picked by alignment: the aligned one's last bits may differ."""
    twin = Twin(nn.Linear(33, 17), where)
    for offset in (0, 1, 2):
        for index in range(5):
            base = where.randn(400, seed=index)
            twin(base[offset : offset + 165].view(5, 33))
    assert twin.graphs == 3


def test_a_scale_turned_request_after_request_stays_in_the_key(where: Where) -> None:
    """An attribute that changes often is not noise: it may be the user's slider."""

    class Scaled(Attends):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    twin = Twin(Scaled(), where)
    for number in range(10):
        twin.module.scale = twin.plain.scale = 1.0 / (1 + number)
        with dit_graphs.request(total_steps=4):
            _serve(twin, 10 * number, 4)
