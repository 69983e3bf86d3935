"""Owns the label of every pass of a language model and the log line that carries it.

Must never know graphs. The surprising fact: `cuda graph: True` is never printed without CUDA; the
CPU recorder is named as such.
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
    """One line: who, which mode, on what, and whether a graph served it."""
    if not log.isEnabledFor(level):
        return
    on_cuda = device.type == "cuda"
    recorder = " (cpu recorder)" if from_graph and not on_cuda else ""
    served = from_graph and on_cuda
    log.log(level, "%s %s: %s, cuda graph: %s%s", component, mode, what, served, recorder)
