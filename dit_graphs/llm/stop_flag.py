"""Owns how the host learns that every row has ended, without making the device wait for it.

Must never know rows. The surprising fact: the answer is one look old. The host waits for the flag
before last, while the steps behind it are queued already, so the device never runs dry; what it
computes behind the last end is cut off later.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

__all__ = ["StopFlag"]


class StopFlag:
    """A boolean that is posted on the device and read on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lag = 0 if device.type == "cpu" else 1
        self._posted: deque[tuple[Tensor, torch.Event | None]] = deque()

    def post(self, value: Tensor) -> None:
        """Copies `value` (a boolean scalar) to the host, in the order of the device's work."""
        if self._device.type == "cpu":
            self._posted.append((value.clone(), None))
            return
        held = torch.zeros((), dtype=torch.bool, device="cpu", pin_memory=True)
        held.copy_(value, non_blocking=True)
        event = torch.Event(device=self._device)
        event.record()
        self._posted.append((held, event))

    def is_set(self) -> bool:
        """The newest value that can be read without emptying the device's queue; False at first."""
        while len(self._posted) > self._lag:
            held, event = self._posted.popleft()
            if event is not None:
                event.synchronize()  # sync: with work that is older than what is queued
            if bool(held):
                return True
        return False
