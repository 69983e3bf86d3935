"""Owns the label of every pass of a language model and the log line that carries it.

Must never know graphs. The surprising fact: a CUDA graph is never spoken of without CUDA; the CPU
recorder is named as such.
"""

from __future__ import annotations

import logging
from enum import Enum

import torch

from ..counters import log

__all__ = ["ForwardMode", "log_pass"]


class ForwardMode(str, Enum):
    """What one pass does: read a prompt, write one token, check a draft, or make one."""

    EXTEND = "EXTEND"
    DECODE = "DECODE"
    TARGET_VERIFY = "TARGET_VERIFY"
    DRAFT = "DRAFT"
    DRAFT_EXTEND = "DRAFT_EXTEND"

    def __str__(self) -> str:
        return self.value


def log_pass(
    component: str,
    mode: ForwardMode,
    what: str,
    *,
    from_graph: bool,
    device: torch.device,
    level: int = logging.DEBUG,
) -> None:
    """One line: who, which mode, on what, and what served it."""
    if not log.isEnabledFor(level):
        return
    graph = "cuda graph" if device.type == "cuda" else "cpu recorder"
    log.log(level, "%s %s: %s: %s", component, mode, what, graph if from_graph else "eager")
