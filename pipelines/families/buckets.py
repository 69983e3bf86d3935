"""Owns `prompt_buckets` for denoisers: prompts padded to a ladder of lengths, behind a mask.

Must never know graphs. The surprising fact: this changes bits even where the mask is perfect, since
attention under a mask is another kernel. So it is opt-in, eager calls are padded as well (a graph
is proven against those), and the first call of each bucket says what padding did to its result.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import cast

import torch
from torch import Tensor, nn

from dit_graphs.calls import Eager
from dit_graphs.config import GraphConfig
from dit_graphs.counters import log
from dit_graphs.errors import ConfigError

__all__ = ["PromptBuckets", "buckets_of"]

# class of diffusers -> (text argument [B, L, D], mask argument [B, L])
_MASKED: Mapping[str, tuple[str, str]] = {
    "NucleusMoEImageTransformer2DModel": ("encoder_hidden_states", "encoder_hidden_states_mask"),
    "QwenImageTransformer2DModel": ("encoder_hidden_states", "encoder_hidden_states_mask"),
}
_REFUSED: Mapping[str, str] = {
    "ZImageTransformer2DModel": (
        "Z-Image gives padded tokens a meaning of their own, so more padding is another picture "
        "(PSNR about 21 dB); leave prompt_buckets out: prompts within one multiple of 32 tokens "
        "share a graph already, with eager's bits"
    ),
}


_REMEMBERED = 4  # prompts: positive and negative, of two requests in turn


@dataclass(frozen=True, slots=True)
class Deviation:
    """What padding from `length` to `bucket` tokens did to one result."""

    length: int
    bucket: int
    largest: float
    relative: float

    def __str__(self) -> str:
        return (
            f"{self.length} tokens padded to {self.bucket}: largest difference from exact "
            f"{self.largest:.2e}, relative {self.relative:.2e}"
        )


class PromptBuckets:
    """Pads each prompt to the next length of the ladder; longer ones stay as they are."""

    def __init__(self, text: str, mask: str, ladder: tuple[int, ...]) -> None:
        self.text = text
        self.mask = mask
        self.ladder = ladder
        self.measured: dict[int, Deviation] = {}
        self._made: dict[object, tuple[list[weakref.ref[Tensor]], dict[str, object]]] = {}

    def report(self) -> list[dict[str, object]]:
        """One record per bucket: length, bucket, largest and relative difference from exact."""
        return [asdict(deviation) for deviation in self.measured.values()]

    def pad(self, named: dict[str, object], eager: Eager) -> dict[str, object]:
        """The arguments with text and mask padded; the same ones where nothing fits."""
        text, mask = named.get(self.text), named.get(self.mask)
        if not isinstance(text, Tensor) or text.dim() != 3:
            return named
        bucket = next((size for size in self.ladder if size >= text.shape[1]), None)
        if bucket is None or (bucket == text.shape[1] and isinstance(mask, Tensor)):
            return named
        padded = {**named, **self._padded(text, mask, bucket)}
        # a step cache hands its state over under a name that is none: calling twice would move it
        if bucket not in self.measured and all(name.isidentifier() for name in named):
            self._measure(named, padded, text.shape[1], bucket, eager)
        return padded

    def _padded(self, text: Tensor, mask: object, bucket: int) -> dict[str, object]:
        """Padded once per prompt: in the next step the same tensors come back."""
        given = [tensor for tensor in (text, mask) if isinstance(tensor, Tensor)]
        if any(tensor.is_inference() for tensor in given):  # they have no version
            return self._pad_now(text, mask, bucket)
        key = (bucket, *((id(tensor), tensor._version) for tensor in given))
        found = self._made.get(key)
        if found is not None and all(
            ref() is tensor for ref, tensor in zip(found[0], given, strict=True)
        ):
            return found[1]
        made = self._pad_now(text, mask, bucket)
        self._made[key] = [weakref.ref(tensor) for tensor in given], made
        while len(self._made) > _REMEMBERED:
            del self._made[next(iter(self._made))]
        return made

    def _pad_now(self, text: Tensor, mask: object, bucket: int) -> dict[str, object]:
        missing = bucket - text.shape[1]
        valid = (
            mask if isinstance(mask, Tensor) else text.new_ones(text.shape[:2], dtype=torch.bool)
        )
        return {
            self.text: torch.nn.functional.pad(text, (0, 0, 0, missing)),
            self.mask: torch.nn.functional.pad(valid, (0, missing)),
        }

    def _measure(
        self,
        exact: dict[str, object],
        padded: dict[str, object],
        length: int,
        bucket: int,
        eager: Eager,
    ) -> None:
        with torch.no_grad():
            ours, theirs = _first(eager(**padded)).float(), _first(eager(**exact)).float()
        largest = float((ours - theirs).abs().max())  # sync: once per bucket
        relative = float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12))
        self.measured[bucket] = Deviation(length, bucket, largest, relative)
        log.warning("prompt_buckets: %s", self.measured[bucket])


def _first(result: object) -> Tensor:
    found = next(iter(result.values())) if isinstance(result, Mapping) else result
    while isinstance(found, (tuple, list)):
        found = found[0]
    return cast(Tensor, found)


def buckets_of(module: nn.Module, config: GraphConfig) -> PromptBuckets | None:
    """What pads the prompts of `module`, if `config` wants it and the class has a mask.

    Raises `ConfigError` for a class whose pictures padding would change.
    """
    name = type(module).__name__
    if config.prompt_buckets is None:
        return None
    if name in _REFUSED:
        raise ConfigError(f"prompt_buckets: {_REFUSED[name]}")
    if name not in _MASKED:
        log.info("prompt_buckets: %s takes no mask for padded text; its prompts stay exact", name)
        return None
    return PromptBuckets(*_MASKED[name], config.prompt_buckets)
