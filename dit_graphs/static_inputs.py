"""Owns a graph's input buffers: fixed addresses, what was last bound, which leaves are proven.

Must never know graphs or modules. The surprising fact: an address is not an identity. With fresh
embeddings per request nearly every tensor reuses the previous one's address *and* version, so a
copy is skipped only for the very same tensor object, held alive since it was bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .buffers import bits_equal, clone_layout, copy_layout, empty_like_layout, overlaps, version_of

__all__ = ["StaticInputs"]


def _tracked_like(buffer: Tensor, tensor: Tensor) -> Tensor:
    """The buffer asks for gradients where the tensor does: a forward may look."""
    return buffer.requires_grad_() if tensor.requires_grad else buffer


class StaticInputs:
    """Buffers for the tensor leaves of one signature, in freeze order, on `device`.

    `groups[i]` is the first leaf that is the same view as leaf i: both have one buffer, so that a
    forward that writes one of them sees it in the other, as it would eagerly.
    """

    def __init__(self, tensors: list[Tensor], device: torch.device, groups: Sequence[int]) -> None:
        self.groups = tuple(groups)
        self.buffers: list[Tensor] = []
        with torch.inference_mode(False):
            for index, tensor in enumerate(tensors):
                if groups[index] != index:
                    self.buffers.append(self.buffers[groups[index]])
                    continue
                self.buffers.append(_tracked_like(empty_like_layout(tensor, device), tensor))
        self.proven = [False] * len(tensors)
        self.suspects: set[int] = set()
        self.rebind_always: frozenset[int] = frozenset()
        self._plain = [not overlaps(buffer) for buffer in self.buffers]
        self._bound: list[tuple[Tensor, int | None] | None] = [None] * len(tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(self.buffers[i].untyped_storage().nbytes() for i in self._leaders())

    def _leaders(self) -> list[int]:
        return [index for index, group in enumerate(self.groups) if group == index]

    def is_bound(self, index: int, tensor: Tensor) -> bool:
        """Whether the buffer already holds this very tensor, unwritten since."""
        bound = self._bound[index]
        if bound is None or bound[0] is not tensor or index in self.rebind_always:
            return False
        return bound[1] is not None and bound[1] == version_of(tensor)

    def bind(self, tensors: list[Tensor]) -> None:
        """The buffers hold the tensors' values."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        stale: set[int] = set()
        fresh: list[tuple[int, int | None]] = []
        for index, tensor in enumerate(tensors):
            if not self.is_bound(index, tensor):
                stale.add(self.groups[index])
                fresh.append((index, version_of(tensor)))
                self._bound[index] = None  # a copy that is interrupted binds nothing
        for index in stale:
            buffer, tensor = self.buffers[index], tensors[index]
            if self._plain[index] and tensor.device == buffer.device:
                targets.append(buffer)
                sources.append(tensor)
            else:
                copy_layout(buffer, tensor)
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)
        for index, version in fresh:
            self._bound[index] = (tensors[index], version)

    def close(self) -> None:
        """The buffers' memory is released, whoever still holds the closure of a capture."""
        self.buffers.clear()
        self._bound.clear()

    def forget(self) -> None:
        """No caller's tensor is held any longer; the next bind copies everything."""
        self._bound = [None] * len(self.buffers)

    def changed_unproven(self, tensors: list[Tensor]) -> list[int]:
        """Unproven leaves whose value differs from the one the buffer still holds."""
        if not self.suspects and False not in self.proven:
            return []
        return [
            index
            for index, tensor in enumerate(tensors)
            if index in self.suspects or self._is_new_value(index, tensor)
        ]

    def _is_new_value(self, index: int, tensor: Tensor) -> bool:
        if self.proven[index] or self.is_bound(index, tensor):
            return False
        # sync: an unproven leaf may be baked; its first new value is compared with eager
        return not bits_equal(tensor.to(self.buffers[index].device), self.buffers[index])

    def prove(self, indices: list[int]) -> None:
        """Replays were equal to eager while these leaves differed from the captured values."""
        for index in indices:
            self.proven[index] = True
        self.suspects.difference_update(indices)

    def copy_back(self, tensors: list[Tensor], written: frozenset[int]) -> None:
        """Inputs the forward writes in place reach the caller's tensors."""
        for index in written:
            copy_layout(tensors[index], self.buffers[index])

    def perturb(self) -> list[int]:
        """Every floating-point buffer gets other finite values; returns their indices."""
        changed = []
        for index in self._leaders():
            buffer = self.buffers[index]
            if buffer.is_floating_point() and buffer.numel():
                span = buffer.as_strided(
                    (buffer.untyped_storage().nbytes() // buffer.element_size(),), (1,), 0
                )
                span.copy_((span.float() * 0.75 + 0.125).to(span.dtype))
                changed.append(index)
        self.forget()
        return [index for index, group in enumerate(self.groups) if group in changed]

    def copies(self) -> list[Tensor]:
        """New tensors with the buffers' values, layouts and shared memory."""
        fresh = {
            index: _tracked_like(clone_layout(self.buffers[index]), self.buffers[index])
            for index in self._leaders()
        }
        return [fresh[group] for group in self.groups]
