"""Owns the ways a forward is captured: cuda (full, breakable), debug, recorded.

Must never know models or runners' internals. The surprising fact: full is breakable with no break
in the plan, so there is one CUDA backend.
"""

from __future__ import annotations

from ..errors import ConfigError
from .base import Backend, CapturePlan, Recording, refusal_of

__all__ = ["Backend", "CapturePlan", "Recording", "make_backend", "refusal_of"]


def make_backend(name: str) -> Backend:
    """The backend called "full", "breakable", "debug" or "recorded"; imported on first use."""
    if name in ("full", "breakable"):
        from .cuda import CudaBackend

        return CudaBackend(name)
    if name == "debug":
        from .debug import DebugBackend

        return DebugBackend()
    if name == "recorded":
        from .recorded import RecordedBackend

        return RecordedBackend()
    raise ConfigError(f"backend: expected full, breakable, debug or recorded, got {name!r}")
