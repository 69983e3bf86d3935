"""Owns the KV-cache objects handed to transformers models: one that keeps nothing, one of slots.

Must never know graphs or pipelines. The surprising fact: an encode gets a cache object too. With
none, transformers looks for packed sequences in the positions, which reads the device on the host.
"""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import Cache

from dit_graphs.llm.model import KeyValueStore

__all__ = ["PassingCache", "SlotView"]


class PassingCache(Cache):  # type: ignore[misc]
    """An empty cache that stores nothing: attention sees the keys and values of this pass.

    `as_stored`: lay them out as a growing cache would (contiguous), which is what the unmodified
    encoder attends over where it makes a cache of its own.
    """

    def __init__(self, *, as_stored: bool) -> None:
        super().__init__(layers=[])
        self.as_stored = as_stored

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        if self.as_stored:
            return key_states.contiguous(), value_states.contiguous()
        return key_states, value_states


class SlotView(Cache):  # type: ignore[misc]
    """One pass over the slots: writes its keys and values there and attends over what `slots` says.

    It reports itself empty, so that a prefill builds the masks of a first pass.
    """

    def __init__(self, slots: KeyValueStore) -> None:
        super().__init__(layers=[])
        self.slots = slots

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        return self.slots.store(layer_idx, key_states, value_states)
