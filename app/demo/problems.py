"""Owns the words for what went wrong: one headline, one sentence of what to do, for every error.

Must never show a traceback to a stranger; the log has it. The surprising fact: running out of
memory has several faces. CUDA raises a class of its own, the CPU allocator a plain `RuntimeError`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from dit_graphs import GraphError
from dit_graphs.pipelines.generate import InputError

from .jobs import QueueFull

__all__ = ["Problem", "is_out_of_memory", "problem_of", "without_places"]

# Two names or more after a slash; neither an address nor owner/name of a hub.
_PLACE = re.compile(r"(?<![\w/.:])(?:~|\.{1,2})?(?:/[^\s/'\"<>:,;()\[\]]+){2,}/?")

# Of the CPU's allocator, CUDA, and the libraries that ask CUDA themselves (cuBLAS, cuDNN).
_NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "status_alloc_failed",
    "allocation_failed",
)
_NAMES = {
    "num_inference_steps": "steps",
    "guidance_scale": "guidance",
    "num_images": "count",
    "num_frames": "frames",
    "mask_image": "mask",
    "set": "other arguments",
    "from": "restore",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as a reader sees it: what happened, and what can be done."""

    title: str
    text: str


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host had no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _NO_MEMORY)


def problem_of(error: BaseException, held_bytes: int = 0, *, num_pictures: int = 0) -> Problem:
    """The words for `error`; `held_bytes` is what graphs hold on the device.

    `num_pictures` were given: no signature says whether a class takes a second one as a reference.
    """
    if isinstance(error, InputError):
        name = _NAMES.get(error.option, error.option).replace("_", " ")
        return Problem(f"Check “{name}”", _sentence(error.problem))
    if is_out_of_memory(error):
        held = f" Graphs hold {held_bytes >> 20} MiB of it." if held_bytes else ""
        return Problem(
            "Out of memory",
            f"This size needs more memory than the device has left.{held} "
            "Try a smaller size, fewer frames or fewer images; nothing else is lost.",
        )
    if isinstance(error, QueueFull):
        return Problem("The line is full", _sentence(str(error)))
    if isinstance(error, GraphError):
        return Problem("Graphs refused this", _sentence(str(error)))
    words = " ".join(str(error).split())[:300]
    advice = " Some models edit one picture only: try it without the second." * (num_pictures > 1)
    return Problem(
        f"The pipeline failed: {type(error).__name__}", _sentence(words or "no message") + advice
    )


def without_places(text: str) -> str:
    """`text` in which every path of this machine is only its last name."""
    return _PLACE.sub(lambda match: match.group(0).rstrip("/").rpartition("/")[2], text)


def _sentence(text: str) -> str:
    text = without_places(" ".join(text.split()))
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."
