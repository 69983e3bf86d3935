"""Owns the form of a family: what a forward reads of its arguments on the host, told beforehand.

Must never know a class of diffusers. The surprising fact: a mask of other lengths is another graph
here, although its shape is the same, because the forward cuts its tensors to those lengths.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from dit_graphs.calls import Eager
from dit_graphs.tree import UnknownLeaf, tensor_leaves
from dit_graphs.watch import assume_known

__all__ = ["Fact", "ModelFamily", "layout", "same_bytes"]

Fact = Callable[[Tensor], Hashable]
_REMEMBERED = 16  # tensors whose fact is not read again: a few masks per pipeline in use


class ModelFamily:
    """A family whose forward reads the arguments in `known`, and nothing else of the device.

    `known`: argument name -> the fact that determines everything the forward reads of it.
    """

    known: ClassVar[Mapping[str, Fact]] = MappingProxyType({})

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._read = Readings()
        self._now = threading.local()

    def open(self) -> None:
        """Nothing is put on the module."""

    def close(self) -> None:
        """Nothing was."""

    def prepare(self, named: dict[str, object]) -> dict[str, object]:
        """The same arguments; their facts are read, each once per tensor and not per step."""
        self._now.facts = tuple(
            (name, tuple(self._read(fact, tensor) for tensor in _tensors(named.get(name))))
            for name, fact in self.known.items()
        )
        return named

    def facts(self) -> Hashable:
        """The facts of the last call's arguments."""
        found: Hashable = getattr(self._now, "facts", ())
        return found

    def run(self, eager: Eager, named: dict[str, object]) -> object:
        """The forward, with its host reads of known arguments declared as such."""
        assume_known(*(tensor for name in self.known for tensor in _tensors(named.get(name))))
        with self.recording():
            return eager(**named)

    def recording(self) -> AbstractContextManager[None]:
        """Inside, the module computes the same in a way that can be recorded."""
        return nullcontext()


class Readings:
    """Facts of tensors, read again only where the tensor is another one or was written since."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, Fact], tuple[weakref.ref[Tensor], int, Hashable]] = {}

    def __call__(self, fact: Fact, tensor: Tensor) -> Hashable:
        """`fact(tensor)`; an inference tensor, which has no version, is read on every call."""
        if tensor.is_inference():
            return fact(tensor)
        key = (id(tensor), fact)
        found = self._found.get(key)
        if found is not None and found[0]() is tensor and found[1] == tensor._version:
            return found[2]
        value = fact(tensor)
        self._found.pop(key, None)
        self._found[key] = (weakref.ref(tensor), tensor._version, value)
        while len(self._found) > _REMEMBERED:
            del self._found[next(iter(self._found))]
        return value


def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors of an argument that is one, or a container of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        try:
            yield from tensor_leaves(value)
        except UnknownLeaf:
            return


def same_bytes(tensor: Tensor) -> Hashable:
    """The values themselves: dtype and bytes."""
    host = tensor.detach().cpu().contiguous()  # sync: once per tensor, before anything is replayed
    return str(host.dtype), host.reshape(-1).view(torch.uint8).numpy().tobytes()


def layout(mask: Tensor) -> Hashable:
    """Where a mask is set: the valid length of each row if it is right-padded, else its bytes."""
    host = mask.detach().cpu()  # sync: once per mask, before anything is replayed
    rows = host.reshape(-1, host.shape[-1]) if host.dim() else host.reshape(1, 1)
    lengths = rows.count_nonzero(dim=1)
    filled = torch.arange(rows.shape[1]) < lengths[:, None]
    if not torch.equal(rows, filled.to(rows.dtype)):
        return same_bytes(host)
    return ("valid", *lengths.tolist())
