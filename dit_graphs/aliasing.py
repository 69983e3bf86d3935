"""Owns the question "does an argument share memory with something that the forward writes?".

Must never know graphs. The surprising fact: a graph reads its arguments from buffers of its own. So
a write to one of two that overlap, or to module state that somebody also passes as an argument,
would be seen through the other eagerly, and not in a replay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor, nn

from .effects import PythonState
from .observer import Observation
from .signature import TensorSpec
from .watch import storage_key

__all__ = ["SHARED_WRITE", "lies_in", "private_storages", "shares_writes"]

SHARED_WRITE = "written in place and overlapping another, or state of the module"


def private_storages(seen: Observation, module: nn.Module) -> frozenset[int]:
    """The storages in which no argument of such a forward may lie.

    What it writes beside its arguments; where it writes arguments, all that the module holds.
    """
    keys = set(map(storage_key, seen.written_externals))
    if seen.written_inputs:
        keys |= PythonState(module).storage_keys()
    return frozenset(keys - {0})


def lies_in(tensors: Iterable[Tensor], storages: Collection[int]) -> bool:
    """Whether one of the tensors lies in one of the storages."""
    return any(storage_key(tensor) in storages for tensor in tensors)


def shares_writes(
    specs: tuple[TensorSpec, ...], tensors: Iterable[Tensor], seen: Observation, module: nn.Module
) -> bool:
    """Whether a pass on buffers of its own left something else than one on these tensors would."""
    if not (seen.written_inputs or seen.written_externals):
        return False
    tied = {index for index, spec in enumerate(specs) if spec.overlaps}
    tied |= {other for spec in specs for other, _ in spec.overlaps}
    return bool(tied & seen.written_inputs) or lies_in(tensors, private_storages(seen, module))
