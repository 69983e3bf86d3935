"""Several benchmark processes on one device: all prepare at once, one measures at a time.

Owns a lock on a file that they share. Knows nothing of what they do. The surprising fact: most of a
benchmark's minutes are captures, which keep one core busy and the device nearly idle, so six
processes side by side take hardly longer than one, as long as nobody captures while a clock runs.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Turns:
    """Preparation is shared, measuring is exclusive. Without a path both are free."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Waits until nobody measures."""
        with self._held(fcntl.LOCK_SH):
            yield

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Waits until nobody prepares or measures."""
        with self._held(fcntl.LOCK_EX):
            yield

    @contextmanager
    def _held(self, kind: int) -> Iterator[None]:
        if self._path is None:
            yield
            return
        with self._path.open("a") as file:
            fcntl.flock(file, kind)
            yield  # closing the file lets go of the lock
