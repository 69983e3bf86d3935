"""Buffers: layouts survive a copy bit for bit, whatever the strides; equality means bits."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dit_graphs.buffers import (
    bits_equal,
    clone_layout,
    copy_layout,
    empty_like_layout,
    poison,
    same_view,
    skew_bytes,
    span_bytes,
    span_numel,
)
from dit_graphs.static_inputs import StaticInputs
from dit_graphs.verify import results_equal

FAST = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


@st.composite
def views(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> Tensor:
    """A view of seeded values: permuted, sliced, stepped, expanded, at any offset."""
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    offset = draw(st.integers(0, 5))
    numel = 1
    for size in shape:
        numel *= size
    seed = draw(st.integers(0, 99))
    values = torch.randn(offset + numel, generator=torch.Generator().manual_seed(seed)) * 50
    tensor = values.to(dtype)[offset:].view(shape)
    for _ in range(draw(st.integers(0, 3))):
        match draw(st.sampled_from(["permute", "slice", "step", "expand"])):
            case "permute":
                tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
            case "slice":
                dim = draw(st.integers(0, tensor.dim() - 1))
                start = draw(st.integers(0, tensor.shape[dim]))
                tensor = tensor.narrow(dim, start, tensor.shape[dim] - start)
            case "step":
                tensor = tensor[::2]
            case "expand":
                if tensor.shape[0]:
                    tensor = tensor[:1].expand(draw(st.integers(1, 3)), *tensor.shape[1:])
    return tensor


_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@FAST
@given(data=st.data())
def test_a_copy_into_the_same_layout_is_the_same_tensor(
    dtype: torch.dtype, data: st.DataObject
) -> None:
    source = data.draw(views(dtype))
    target = empty_like_layout(source)
    copy_layout(target, source)
    assert torch.equal(target, source)
    assert target.stride() == source.stride()
    assert target.dtype == source.dtype
    assert skew_bytes(target) == skew_bytes(source)
    assert target.untyped_storage().data_ptr() != source.untyped_storage().data_ptr() or not (
        source.numel()
    )


@FAST
@given(views())
def test_a_clone_keeps_the_layout_and_owns_its_memory(source: Tensor) -> None:
    kept = source.clone()
    copy = clone_layout(source)
    assert copy.stride() == source.stride()
    assert torch.equal(copy, kept)
    poison(copy)
    assert torch.equal(source, kept), "the clone wrote into its source"


@FAST
@given(views())
def test_a_span_holds_every_element_and_no_more(tensor: Tensor) -> None:
    places = set()
    for index in torch.cartesian_prod(*[torch.arange(n) for n in tensor.shape]).view(
        -1, tensor.dim()
    ):
        places.add(sum(int(i) * s for i, s in zip(index, tensor.stride(), strict=True)))
    expected = max(places) + 1 if places and tensor.numel() else 0
    assert span_numel(tuple(tensor.shape), tensor.stride()) == expected
    assert span_bytes(tensor) == expected * tensor.element_size()


@FAST
@given(views(), views())
def test_bits_equal_is_equality_of_shape_dtype_and_bytes(one: Tensor, other: Tensor) -> None:
    def raw(tensor: Tensor) -> bytes:
        return tensor.contiguous().numpy().tobytes()

    expected = one.shape == other.shape and raw(one) == raw(other)
    assert bits_equal(one, other) == expected
    assert bits_equal(one, one.clone())


@FAST
@given(st.floats(width=32), st.floats(width=32))
def test_bits_equal_on_single_numbers(one: float, other: float) -> None:
    """NaN equals the same NaN; 0.0 is not -0.0."""
    mine, theirs = (torch.tensor(v, dtype=torch.float32) for v in (one, other))
    assert bits_equal(mine, theirs) == (struct.pack("f", mine) == struct.pack("f", theirs))


def test_bits_equal_sees_signed_zeros_nans_dtypes_and_complex_parts() -> None:
    assert not bits_equal(torch.tensor(0.0), torch.tensor(-0.0))
    assert bits_equal(torch.tensor(float("nan")), torch.tensor(float("nan")))
    assert not bits_equal(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert not bits_equal(torch.ones(2), torch.ones(2, 1))
    assert bits_equal(torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]))
    assert not bits_equal(torch.tensor([1 + 0.0j]), torch.tensor([1 - 0.0j]).conj().conj() * -1)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@FAST
@given(data=st.data())
def test_poison_changes_every_element(dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = clone_layout(data.draw(views(dtype)))
    before = tensor.clone()
    poison(tensor)
    same = (tensor == before) & ~(before != before)
    if dtype is torch.uint8:
        same &= before != 255
    assert not same.any()


@FAST
@given(views())
def test_same_view_is_reflexive_and_not_equality(tensor: Tensor) -> None:
    assert same_view(tensor, tensor)
    assert same_view(tensor, tensor.detach())
    if tensor.numel():
        assert not same_view(tensor, tensor.clone())


@FAST
@given(st.lists(views(), min_size=1, max_size=4), st.data())
def test_bound_buffers_hold_the_callers_values(tensors: list[Tensor], data: st.DataObject) -> None:
    """However the caller mixes old objects, new ones and writes between two binds."""
    groups = list(range(len(tensors)))
    inputs = StaticInputs(tensors, torch.device("cpu"), groups)
    for _ in range(3):
        for index, tensor in enumerate(tensors):
            match data.draw(st.sampled_from(["same", "new", "written"])):
                case "new":
                    tensors[index] = clone_layout(tensor)
                    _add(tensors[index])
                case "written":
                    _add(tensor)
        inputs.bind(tensors)
        for buffer, tensor in zip(inputs.buffers, tensors, strict=True):
            assert torch.equal(buffer, tensor)
            assert buffer.stride() == tensor.stride()


def _add(tensor: Tensor) -> None:
    copy = tensor.clone() + 1.0
    target = tensor
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[dim] > 1:
            target, copy = target.narrow(dim, 0, 1), copy.narrow(dim, 0, 1)
    target.copy_(copy)


@pytest.mark.parametrize(
    ("one", "other"), [([0.0, 1.0], [-0.0, 1.0]), ([float("nan"), 1.0], [float("nan"), 2.0])]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_what_differs_is_told_in_bits(
    dtype: torch.dtype, one: list[float], other: list[float]
) -> None:
    mine, theirs = torch.tensor(one).to(dtype), torch.tensor(other).to(dtype)
    assert results_equal(mine, theirs) == "output 0: 50.0% of 2 elements differ"
