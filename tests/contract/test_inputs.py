"""Arguments of every kind: layouts, modes of the caller, Python values, objects.

What a graph cannot serve is eager with the right reason; what it serves is eager's result.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from twin import Twin, Where, difference

import dit_graphs


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = self.linear(x)
        return x if y is None else x * y


_LAYOUTS = {
    "expanded": lambda w, s: w.randn(1, 8, seed=s).expand(4, 8),
    "expanded twice": lambda w, s: w.randn(1, seed=s).expand(4, 8),
    "transposed": lambda w, s: w.randn(8, 4, seed=s).t(),
    "slice": lambda w, s: w.randn(4, 20, seed=s)[:, 3:11],
    "every other": lambda w, s: w.randn(8, 16, seed=s)[::2, ::2],
    "offset": lambda w, s: w.randn(5, 8, seed=s)[1:],
    "empty": lambda w, s: w.randn(0, 8, seed=s),
    "windows": lambda w, s: w.randn(11, seed=s).unfold(0, 8, 1),
    "weight": lambda w, s: nn.Parameter(w.randn(4, 8, seed=s)),
    "requires grad": lambda w, s: w.randn(4, 8, seed=s).requires_grad_(),
}


@pytest.mark.parametrize("kind", _LAYOUTS)
def test_layout_of_an_input(where: Where, kind: str) -> None:
    twin = Twin(Sums(), where)
    for index in range(7):
        twin(_LAYOUTS[kind](where, index))
    assert twin.replays >= (4 if kind != "empty" else 3)


def test_strides_make_another_graph(where: Where) -> None:
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.as_strided((x.numel(),), (1,))  # memory order: the layout is the result

    twin = Twin(Flat(), where)
    for index in range(6):
        twin(where.randn(4, 4, seed=index))
        twin(where.randn(4, 4, seed=index).t())
    assert twin.graphs == 2


def test_alignment_is_kept_and_keyed(where: Where) -> None:
    """Matrix kernels are chosen by alignment: a copy elsewhere may give other last bits."""
    twin = Twin(nn.Linear(33, 17), where)
    for offset in (0, 1, 3, 4):
        for index in range(5):
            base = where.randn(5 * 40 + 4, seed=index)
            twin(base[offset : offset + 200].view(5, 40)[:, :33])
    assert twin.graphs >= 3


def test_a_timestep_that_is_a_view_of_the_schedule_makes_one_graph(where: Where) -> None:
    class Steps(nn.Module):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return x * t[:, None].sin()

    twin = Twin(Steps(), where)
    schedule = where.randn(8, seed=1)
    with dit_graphs.request(total_steps=8):
        for step in range(8):
            twin(where.randn(2, 8, seed=step), schedule[step].expand(2))
    assert (twin.graphs, twin.replays) == (1, 5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtype_makes_another_graph(where: Where, dtype: torch.dtype) -> None:
    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    twin = Twin(Doubles(), where)
    for index in range(6):
        twin(where.randn(4, seed=index))
        twin(where.randn(4, seed=index).to(dtype))
    assert twin.graphs == 2


def test_callers_modes_take_turns(where: Where) -> None:
    """inference_mode, no_grad, inference tensors outside it: one graph serves them all."""
    twin = Twin(Sums(), where)
    for index in range(12):
        mode = torch.inference_mode() if index % 3 == 0 else torch.no_grad()
        with mode:
            twin(where.randn(4, 8, seed=index))
        if index % 3 == 1:
            with torch.inference_mode():
                made = where.randn(4, 8, seed=50 + index)
            twin(made)
    assert twin.graphs == 1
    assert twin.replays >= 10


def test_inference_tensors_are_copied_on_every_call(where: Where) -> None:
    """They count no versions: the same object may hold new values."""
    twin = Twin(Sums(), where)
    with torch.inference_mode(), dit_graphs.request():
        x = where.randn(4, 8)
        for index in range(8):
            x.copy_(where.randn(4, 8, seed=index))
            assert torch.equal(twin.module(x), twin.plain(x))
    assert twin.replays == 5


def test_gradients_run_eagerly_and_flow(where: Where) -> None:
    twin = Twin(Sums(), where)
    twin.until_replayed(lambda i: (where.randn(4, 8, seed=i),))
    before = twin.replays
    with torch.enable_grad():
        x = where.randn(4, 8).requires_grad_()
        twin.module(x).sum().backward()
    assert x.grad is not None
    assert twin.fallbacks["grad_enabled"] == 1
    assert twin.replays == before
    twin(where.randn(4, 8, seed=20))
    assert twin.replays == before + 1


def test_autocast_is_part_of_the_key_and_its_cache_is_not_baked(where: Where) -> None:
    twin = Twin(Sums(), where)
    kind = where.device.type
    for index in range(6):
        twin(where.randn(4, 8, seed=index))
        with torch.autocast(kind, dtype=torch.bfloat16):
            assert twin(where.randn(4, 8, seed=index)).dtype is torch.bfloat16
        with torch.autocast(kind, dtype=torch.float16):
            assert twin(where.randn(4, 8, seed=index)).dtype is torch.float16
    assert twin.graphs == 3
    assert twin.replays == 9
    for module in (twin.module, twin.plain):
        module.linear.weight.mul_(-2.0)
    with torch.autocast(kind, dtype=torch.bfloat16):
        twin(where.randn(4, 8, seed=30))
    assert twin.replays == 10, "a weight updated in place keeps its graph"


def test_default_dtype_and_device_are_part_of_the_key(where: Where) -> None:
    class Makes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum() + torch.ones(3, device=x.device)

    twin = Twin(Makes(), where)
    for index in range(5):
        twin(where.randn(3, seed=index))
        torch.set_default_dtype(torch.float64)
        try:
            twin(where.randn(3, seed=index))
        finally:
            torch.set_default_dtype(torch.float32)
    assert twin.graphs == 2


def test_matmul_precision_and_sdpa_switches_are_part_of_the_key(where: Where) -> None:
    twin = Twin(Sums(), where)
    twin.until_replayed(lambda i: (where.randn(4, 8, seed=i),))
    known = len(twin.runner.cache.entries)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        twin(where.randn(4, 8, seed=30))
    finally:
        torch.set_float32_matmul_precision(before)
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        twin(where.randn(4, 8, seed=31))
    torch.use_deterministic_algorithms(True)
    try:
        twin(where.randn(4, 8, seed=32))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(twin.runner.cache.entries) == known + 3


class Tagged(Tensor):
    """A subclass with a meaning of its own: additions are subtractions."""

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if func in (torch.mul, Tensor.mul, Tensor.__mul__):
            return super().__torch_function__(torch.add, types, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_tensor_subclass_never_meets_a_plain_tensors_graph(where: Where) -> None:
    class Times(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 3

    twin = Twin(Times(), where)
    twin.until_replayed(lambda i: (where.randn(4, seed=i),))
    x = where.randn(4, seed=20)
    tagged = twin.module(x.as_subclass(Tagged))
    assert difference(tagged.as_subclass(Tensor), x + 3) is None
    assert twin.fallbacks["tensor_subclass"] == 1


def test_foreign_modes_run_eagerly(where: Where) -> None:
    class Counting(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(
            self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
        ) -> object:
            type(self).seen += 1
            return func(*args, **(kwargs or {}))  # type: ignore[operator]

    class Functions(TorchFunctionMode):
        seen = 0

        def __torch_function__(
            self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
        ) -> object:
            type(self).seen += 1
            return func(*args, **(kwargs or {}))  # type: ignore[operator]

    twin = Twin(Sums(), where)
    twin.until_replayed(lambda i: (where.randn(4, 8, seed=i),))
    x = where.randn(4, 8)
    for mode in (Counting(), Functions()):
        with mode:
            twin.module(x)
        assert type(mode).seen > 0
    assert twin.fallbacks["foreign_mode"] == 2
    torch.func.vmap(twin.module)(x[None])
    assert twin.fallbacks["foreign_mode"] == 3


def test_meta_and_sparse_inputs_run_eagerly(where: Where) -> None:
    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    twin = Twin(Doubles(), where)
    twin.until_replayed(lambda i: (where.randn(4, seed=i),))
    assert twin.module(torch.empty(4, device="meta")).device.type == "meta"
    sparse = where.randn(4).to_sparse()
    assert torch.equal(twin.module(sparse).to_dense(), where.randn(4) * 2)


@pytest.mark.parametrize("capture", ["second_use", "first_use"])
def test_a_capture_made_in_inference_mode_serves_callers_outside_it(
    where: Where, capture: str
) -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2.0) + 1.0

    twin = Twin(Writes(), where, capture=capture)
    for index in range(8):
        x = where.randn(4, seed=index)
        with torch.inference_mode() if index < 3 else torch.no_grad():
            twin(x)
    assert twin.replays >= 5


def test_no_tensor_of_the_caller_stays_with_a_graph(where: Where) -> None:
    twin = Twin(nn.Linear(8, 8), where)
    given = []
    for seed in range(5):
        x = where.randn(3, 8, seed=seed)
        given.append(weakref.ref(x))
        twin(x)
        del x
    assert twin.replays >= 2
    assert not any(tensor() is not None for tensor in given)
