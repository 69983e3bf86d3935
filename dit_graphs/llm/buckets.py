"""Owns the ladders: which sizes get a graph, and how many rows a device can hold.

Must never know models or graphs. The surprising fact: the largest bucket depends on the context
asked for, because a row's keys and values weigh more than anything else that grows with it.
"""

from __future__ import annotations

from bisect import bisect_left

import torch

__all__ = [
    "BATCH_LADDER",
    "MAX_PADDING",
    "PROMPT_LADDER",
    "batch_bucket",
    "context_bucket",
    "default_max_rows",
    "device_memory",
    "prompt_bucket",
    "slot_length",
]

MAX_PADDING = 2.0  # padded over real tokens; above it a pass is eager

PROMPT_LADDER: tuple[int, ...] = (
    *range(4, 33, 4),
    *range(48, 257, 16),
    *range(288, 513, 32),
    *range(576, 1025, 64),
    *range(1280, 4097, 256),
)
BATCH_LADDER: tuple[int, ...] = (
    *(1, 2, 4, 8, 12),
    *range(16, 257, 8),
    *range(272, 512, 16),
    *range(512, 1025, 32),
)
_ALIGNMENT = 16  # tokens: attention masks of other widths are copied before use
_SMALLEST_CONTEXT = 32
_GIB = 1 << 30
_TIERS = ((20 * _GIB, 8), (60 * _GIB, 32), (90 * _GIB, 256))
_LARGEST_TIER = 512
_CPU_ROWS = 256
_SHARE_OF_FREE = 0.10


def _at_least(ladder: tuple[int, ...], size: int) -> int | None:
    index = bisect_left(ladder, size)
    return ladder[index] if index < len(ladder) else None


def batch_bucket(rows: int, max_rows: int) -> int | None:
    """The smallest bucket for `rows`; None above `max_rows`, which is a bucket itself."""
    if rows > max_rows:
        return None
    found = _at_least(BATCH_LADDER, rows)
    return max_rows if found is None else min(found, max_rows)


def prompt_bucket(tokens: int, ladder: tuple[int, ...]) -> int | None:
    """The rung a prompt of `tokens` is padded to; None where none is within `MAX_PADDING`."""
    found = _at_least(ladder, tokens)
    return found if found is not None and found <= MAX_PADDING * tokens else None


def slot_length(tokens: int, current: int) -> int:
    """The length of a slot that holds `tokens` and the trash position; grows by doubling."""
    needed = -(-(tokens + 1) // _ALIGNMENT) * _ALIGNMENT
    return needed if needed <= current or not current else max(needed, 2 * current)


def context_bucket(tokens: int, length: int) -> int:
    """How many positions of a slot a decode reads for a text of `tokens`: a power of two."""
    context = _SMALLEST_CONTEXT
    while context < tokens:
        context *= 2
    return min(context, length)


def default_max_rows(*, total_bytes: int | None, free_bytes: int, slot_bytes: int) -> int:
    """The largest decode bucket: by device memory, and so that slots take a tenth of what is free.

    `total_bytes`: None on a CPU.
    """
    tier = _CPU_ROWS
    if total_bytes is not None:
        tier = next((rows for limit, rows in _TIERS if total_bytes < limit), _LARGEST_TIER)
    fitting = int(_SHARE_OF_FREE * free_bytes) // max(slot_bytes, 1)
    return max(1, min(tier, fitting))


def device_memory(device: torch.device) -> tuple[int | None, int]:
    """Bytes the device has (None: a CPU) and bytes an allocation could take now."""
    if device.type != "cuda":
        return None, 1 << 40
    free, total = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(total), int(free) + idle
