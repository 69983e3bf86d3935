"""Owns Z-Image: prompts of any length within one multiple of 32 are one signature.

Must never know graphs. The surprising fact: the model pads each prompt to a multiple of 32 itself
and then overwrites what it padded with a learned token. So the padding may as well be there before;
only where it begins has to reach the model, and a mask is an input like any other. The result has
eager's bits, because every operation past the padding is the same one on the same shapes.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from dit_graphs.calls import Eager

from .base import ModelFamily
from .patches import Function, replacing

__all__ = ["ZImage"]

_PADDED = "what was padded of each prompt"  # no parameter of a forward is called so
_MULTIPLE = 32


class ZImage(ModelFamily):
    """Prompts are padded before the call is signed, once per prompt and not per step."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._padded: dict[int, tuple[weakref.ref[Tensor], int, tuple[Tensor, Tensor]]] = {}

    def prepare(self, named: dict[str, object]) -> dict[str, object]:
        """Prompts padded as the model would, and a mask of what was padded beside them.

        Calls of the omni mode, whose prompts lie in lists of lists, stay as they are.
        """
        prompts = named.get("cap_feats")
        if not isinstance(prompts, list) or not all(map(_is_prompt, prompts)):
            return named
        pairs = [self._pair(prompt) for prompt in prompts]
        features, masks = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        return {**named, "cap_feats": features, _PADDED: masks}

    def run(self, eager: Eager, named: dict[str, object]) -> object:
        """The forward; where it makes patches and pads, it is told what was padded already."""
        masks = named.pop(_PADDED, None)

        def told(module: nn.Module, patchify: Function) -> Function:
            def call(*args: object, **kwargs: object) -> tuple[object, ...]:
                found = patchify(*args, **kwargs)  # its last part: the masks, here all empty
                assert isinstance(found, tuple) and isinstance(masks, list)
                return (*found[:-1], list(masks))

            return call

        where = replacing([self.module], "patchify_and_embed", told) if masks else nullcontext()
        with where:
            return eager(**named)

    def _pair(self, prompt: Tensor) -> tuple[Tensor, Tensor]:
        if prompt.is_inference():  # it has no version to tell whether it was written
            return _padded(prompt)
        found = self._padded.get(id(prompt))
        if found is not None and found[0]() is prompt and found[1] == prompt._version:
            return found[2]
        key, pair = id(prompt), _padded(prompt)
        forget = weakref.ref(prompt, lambda _: self._padded.pop(key, None))
        self._padded[key] = (forget, prompt._version, pair)
        return pair


def _is_prompt(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and len(value) > 0


def _padded(prompt: Tensor) -> tuple[Tensor, Tensor]:
    """[L, D] → [32 k, D] with the last row repeated, and which rows those are: bool [32 k]."""
    length = len(prompt)
    missing = -length % _MULTIPLE
    mask = torch.arange(length + missing, device=prompt.device) >= length
    if not missing:
        return prompt, mask
    return torch.cat([prompt, prompt[-1:].repeat(missing, 1)], dim=0), mask
