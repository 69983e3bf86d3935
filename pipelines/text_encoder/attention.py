"""Owns how one token attends: query heads folded over the keys they share, by a steady kernel.

Must never know graphs or slots. The surprising fact: the kernel torch prefers on Hopper is not
steady. Over 1,056 keys cuDNN's attention (9.19, torch 2.11) gave other bits in a few of fifty equal
calls, and whole steps differed from themselves; no graph can equal a step that does not equal
itself. Under the memory-efficient kernel, torch's next choice under a mask, every step repeats.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import cast

import torch
import transformers.integrations.sdpa_attention as sdpa_code
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

__all__ = ["one_token_attention"]

_MASK_ALIGNMENT = 16  # elements: what torch pads masks to before it hands them to this kernel

_folds: ContextVar[bool] = ContextVar("dit_graphs_folds_heads", default=False)
_patching = threading.Lock()


@contextmanager
def one_token_attention() -> Iterator[None]:
    """Inside, this thread's SDPA calls with a mask and one query token are folded and steady.

    Keys and values are read once for all query heads that share them. Nothing outside this thread
    changes, no switch of the process either.
    """
    _install()
    token = _folds.set(True)
    try:
        with _OneToken():
            yield
    finally:
        _folds.reset(token)


def _install() -> None:
    """transformers asks this module first whether SDPA may share keys between heads."""
    with _patching:
        original = sdpa_code.use_gqa_in_sdpa
        if hasattr(original, "asks_dit_graphs"):
            return

        def use_gqa_in_sdpa(*args: object, **kwargs: object) -> bool:
            # a compiler, which never runs a step of ours, sees transformers' own code
            folds = not torch.compiler.is_compiling() and _folds.get()
            return True if folds else bool(original(*args, **kwargs))

        use_gqa_in_sdpa.asks_dit_graphs = True  # type: ignore[attr-defined]
        sdpa_code.use_gqa_in_sdpa = use_gqa_in_sdpa


class _OneToken(TorchFunctionMode):
    """Answers the SDPA calls of one pass."""

    def __init__(self) -> None:
        super().__init__()
        # by identity, which holds while the mask is kept here
        self._added: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = dict(kwargs or {})
        asked = func is scaled_dot_product_attention and len(args) == 3
        answer = self._one_token(cast("Sequence[Tensor]", args), given) if asked else None
        return func(*args, **given) if answer is None else answer

    def _one_token(self, args: Sequence[Tensor], given: Mapping[str, object]) -> Tensor | None:
        """The heads of one token [B, heads, 1, dim]; None for any other call, which is torch's."""
        query, key, value = args
        mask = given.get("attn_mask")
        if query.dim() != 4 or query.shape[2] != 1 or given.get("dropout_p"):
            return None
        if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[1] != 1:
            return None
        rows, heads, _, dim = query.shape
        shared = key.shape[1]
        folded = query.reshape(rows, shared, heads // shared, dim)
        scale = cast("float | None", given.get("scale"))
        attended = self._attend(folded, key, value, mask, scale)
        return attended.reshape(rows, heads, 1, value.shape[-1])

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None
    ) -> Tensor:
        if not _has_steady_kernel(query, key, value, mask):
            return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        added = self._as_added(mask, query.dtype)
        shape = (query.shape[0], query.shape[1], query.shape[2], mask.shape[-1])
        result = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, added.expand(shape), False, scale=scale
        )
        return cast(Tensor, result[0])

    def _as_added(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """The mask as numbers to add, made once per pass: all layers of a kind share it."""
        if mask.dtype is not torch.bool:
            return mask
        held = self._added.get((id(mask), dtype))
        if held is None:
            added = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            held = (mask, added.masked_fill_(~mask, float("-inf")))
            self._added[id(mask), dtype] = held
        return held[1]


def _has_steady_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Whether torch would run the memory-efficient kernel on these, were there no other."""
    if not query.is_cuda or mask.shape[-1] % _MASK_ALIGNMENT or query.dtype != key.dtype:
        return False
    if mask.dtype is not torch.bool and mask.dtype != query.dtype:
        return False
    params = torch.backends.cuda.SDPAParams(query, key, value, mask, 0.0, False, False)
    return torch.backends.cuda.can_use_efficient_attention(params)
