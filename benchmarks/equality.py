"""Equality that means something: bit for bit, on outputs that are worth comparing.

Owns the comparison of output trees and the three conditions that make it count: finite values, a
standard deviation within [1e-3, 1e3], and more than half of the elements changing when one input
changes alone. Knows nothing of graphs. The surprising fact: two NaN tensors are *unequal* here, on
purpose; a model that produces NaN has proven nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

MIN_STD = 1e-3
MAX_STD = 1e3
MIN_CHANGED = 0.5


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of a tree and where it stands, as a user would index it."""

    path: str
    tensor: Tensor


def leaves(tree: object, path: str = "") -> Iterator[Leaf]:
    """Every tensor of nested lists, tuples, mappings and dataclasses, in order, with its path."""
    if isinstance(tree, Tensor):
        yield Leaf(path, tree)
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, f"{path}[{key!r}]")
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{path}[{index}]")
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            yield from leaves(getattr(tree, field.name), f"{path}.{field.name}")


def replaced(tree: object, wanted: str, tensor: Tensor, path: str = "") -> object:
    """A copy of nested lists, tuples and dicts in which the leaf at path `wanted` is `tensor`."""
    if path == wanted:
        return tensor
    if isinstance(tree, dict):
        return {k: replaced(v, wanted, tensor, f"{path}[{k!r}]") for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        items = [replaced(v, wanted, tensor, f"{path}[{i}]") for i, v in enumerate(tree)]
        return items if isinstance(tree, list) else tuple(items)
    return tree


def equal(left: object, right: object) -> bool:
    """True when both trees have the same tensors at the same places: shape, dtype and every bit.

    Bits, not values: -0.0 differs from 0.0, and nothing equals a NaN.
    """
    ours, theirs = list(leaves(left)), list(leaves(right))
    return (
        bool(ours)
        and [leaf.path for leaf in ours] == [leaf.path for leaf in theirs]
        and all(_same(a.tensor, b.tensor) for a, b in zip(ours, theirs, strict=True))
    )


def _same(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape or not torch.equal(left, right):
        return False
    if not left.is_floating_point():
        return True
    return torch.equal(left.signbit(), right.signbit())


def defects(output: object) -> list[str]:
    """Why this output proves nothing (not finite, spread outside [1e-3, 1e3]); empty when fit."""
    found = []
    tensors = [leaf for leaf in leaves(output) if leaf.tensor.is_floating_point()]
    if not tensors:
        return ["no floating-point output"]
    for leaf in tensors:
        where = f"output{leaf.path}"
        if not leaf.tensor.isfinite().all():
            found.append(f"{where} is not finite")
        elif not MIN_STD <= (std := leaf.tensor.float().std().item()) <= MAX_STD:
            found.append(f"{where} has standard deviation {std:.3g}")
    return found


def changed_fraction(left: object, right: object) -> float:
    """The share of elements that differ, over the floating-point leaves; all, where shapes do."""
    num_changed = num_elements = 0
    for a, b in zip(leaves(left), leaves(right), strict=True):
        if not a.tensor.is_floating_point():
            continue
        num_elements += a.tensor.numel()
        same_shape = a.tensor.shape == b.tensor.shape
        num_changed += int((a.tensor != b.tensor).sum()) if same_shape else a.tensor.numel()
    return num_changed / num_elements if num_elements else 0.0


def insensitive(
    call: Callable[[dict[str, object]], object],
    inputs: dict[str, object],
    changed: dict[str, object],
) -> dict[str, float]:
    """The inputs that, changed alone, leave half of the output or more as it was.

    `changed` has the structure of `inputs`; leaves that are equal in both are not tried. The items
    of a list change together: where a batch is a list, each item steers its own sample only.
    Returns path -> changed fraction; empty means that every tried input matters.
    """
    reference = call(inputs)
    variants: dict[str, object] = {}
    for before, after in zip(leaves(inputs), leaves(changed), strict=True):
        if not torch.equal(before.tensor, after.tensor):
            group = re.sub(r"\[\d+\]", "", before.path)
            variants[group] = replaced(variants.get(group, inputs), before.path, after.tensor)
    weak = {}
    for group, variant in variants.items():
        assert isinstance(variant, dict)
        fraction = changed_fraction(reference, call(variant))
        if fraction <= MIN_CHANGED:
            weak[group] = fraction
    return weak
