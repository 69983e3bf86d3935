"""Several benchmark processes on one device: all prepare at once, one measures at a time.

Owns two locks on files that they share. Knows nothing of what they do. The surprising fact: most
of a benchmark's minutes are captures, which keep one core busy and the device nearly idle, so six
processes side by side take hardly longer than one, as long as nobody captures while a clock runs.
A lock of the system alone is not fair: some process is always preparing, so nobody would measure.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


class Turns:
    """Preparation is shared, measuring is exclusive. Without a path both are free."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Waits until nobody measures or waits to measure."""
        with self._lock("wait", fcntl.LOCK_EX):
            device = self._lock("device", fcntl.LOCK_SH)
        with device:
            yield

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Waits until nobody prepares or measures; who comes later waits until this is over."""
        with self._lock("wait", fcntl.LOCK_EX), self._lock("device", fcntl.LOCK_EX):
            yield

    def _lock(self, name: str, kind: int) -> ExitStack:
        """Closing what it returns lets go of the lock."""
        stack = ExitStack()
        if self._path is not None:
            descriptor = os.open(f"{self._path}.{name}", os.O_RDWR | os.O_CREAT)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, kind)
        return stack
