"""Owns tensors with a given memory layout: allocate, copy into, compare bit for bit, poison.

Must never know graphs. The surprising fact: an expanded tensor (stride 0) cannot be written
through its own shape, so it is stored and copied as the span of elements it really has.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = [
    "bits_equal",
    "bits_of",
    "clone_layout",
    "copy_layout",
    "empty_layout",
    "empty_like_layout",
    "overlaps",
    "poison",
    "same_view",
    "skew_bytes",
    "span_bytes",
    "span_numel",
    "version_of",
]

_CPU_ALIGNMENT = 64
_CUDA_ALIGNMENT = 256
_SMALL = 16
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def span_numel(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements between the first and the last one addressed, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def span_bytes(tensor: Tensor) -> int:
    """Bytes between the first and the last element of a tensor, both included."""
    return span_numel(tuple(tensor.shape), tensor.stride()) * tensor.element_size()


def version_of(tensor: Tensor) -> int | None:
    """Changes with every write that torch sees; None where it counts none: under inference mode."""
    return None if tensor.is_inference() else tensor._version


def same_view(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory, as the same type."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def skew_bytes(tensor: Tensor) -> int:
    """How far a tensor starts past the boundary that its device's allocations start at.

    Matrix kernels are chosen by alignment (cuBLASLt looks at powers of two up to 256), so a copy
    at another alignment may give other bits. A handful of elements (a timestep that is a view of
    the schedule) never reaches such a kernel and counts as aligned.
    """
    address = tensor.data_ptr()
    if tensor.device.type == "cpu":
        skew = address % _CPU_ALIGNMENT
    else:
        skew = address & -address
        skew = 0 if skew >= _CUDA_ALIGNMENT else skew
    if not skew or span_numel(tuple(tensor.shape), tensor.stride()) < _SMALL:
        return 0
    return skew


def empty_like_layout(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """An uninitialised tensor of the same shape, strides and alignment, owning its storage."""
    lead = skew_bytes(tensor) // tensor.element_size()
    return empty_layout(tensor, lead, device or tensor.device)


def empty_layout(like: Tensor, lead: int, device: torch.device) -> Tensor:
    """An uninitialised tensor of `like`'s shape and strides, `lead` elements into its storage."""
    numel = lead + span_numel(tuple(like.shape), like.stride())
    span = torch.empty(numel, dtype=like.dtype, device=device)
    return span.as_strided(like.shape, like.stride(), lead)


def overlaps(tensor: Tensor) -> bool:
    """Whether two indices address one element, so that an indexed write is not defined."""
    return any(
        step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _span(tensor: Tensor) -> Tensor:
    numel = span_numel(tuple(tensor.shape), tensor.stride())
    return tensor.as_strided((numel,), (1,), tensor.storage_offset())


def copy_layout(target: Tensor, source: Tensor) -> None:
    """`target` holds `source`'s values; both have one shape, overlapping layouts included."""
    if overlaps(target) and target.stride() == source.stride():
        target, source = _span(target), _span(source)
    target.copy_(source)


def of_same_view(make: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """`make` of the bytes of a conjugate or negative view, read in the same way again."""
    if tensor.is_conj():
        return make(tensor.conj()).conj()
    return make(tensor._neg_view())._neg_view()


def clone_layout(tensor: Tensor) -> Tensor:
    """A copy that owns its memory and keeps the strides, also of slices and expanded tensors.

    `Tensor.clone` makes those contiguous, and then a result would not be eager's. A conjugate or
    negative view stays one.
    """
    if tensor.is_conj() or tensor.is_neg():
        return of_same_view(clone_layout, tensor)
    copy = tensor.clone()
    is_aligned = not tensor.data_ptr() & (_CUDA_ALIGNMENT - 1)  # as nearly every one
    if copy.stride() == tensor.stride() and (is_aligned or not skew_bytes(tensor)):
        return copy
    copy = empty_like_layout(tensor)
    copy_layout(copy, tensor)
    return copy


def bits_of(tensor: Tensor) -> Tensor:
    """Its elements as whole numbers of the same bits; a complex one's as two each."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_floating_point():
        return tensor.contiguous().view(_BITS[tensor.element_size()])
    return tensor


def bits_equal(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors hold the same bits (NaN equals the same NaN, 0.0 is not -0.0)."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    # sync: a verdict is needed before the graph is trusted
    return torch.equal(bits_of(left), bits_of(right))


def poison(tensor: Tensor) -> None:
    """Every element becomes a value no forward returns: NaN, or the largest integer."""
    target = _span(tensor) if overlaps(tensor) else tensor
    if target.is_complex() or target.is_floating_point():
        target.fill_(float("nan"))
    elif target.dtype is torch.bool:
        target.logical_not_()
    else:
        target.fill_(torch.iinfo(target.dtype).max)
