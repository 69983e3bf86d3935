"""Owns the measurement of how long the GPU computed in each stage of a run.

Must never run where there is no GPU: without one nothing is measured and the page says so. The
surprising fact: the stages are cut on the device's own clock. A tiny marker kernel is queued
between stages, and the trace of all kernels is split where the markers ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

__all__ = ["BusyMeter", "busy_between_markers", "busy_meter"]

_MARKER = "spin_kernel"
Interval = tuple[float, float]


class BusyMeter:
    """Queues a marker at each stage's end; `stages` is filled once the block has ended.

    `stages`: (busy, length) of each stage in milliseconds of the device's clock, None where
    nothing was measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.stages: list[Interval] | None = None
        self.problem = ""
        self._device = device

    def mark(self) -> None:
        """The stage so far ends here."""
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda._sleep(1)


@contextmanager
def busy_meter(device: torch.device, *, is_on: bool = True) -> Iterator[BusyMeter]:
    """Kernels of the block are traced on a CUDA device; a tracer that fails costs the numbers only.

    Elsewhere, or where it is off, nothing is measured and `stages` stays None.
    """
    meter = BusyMeter(device)
    if device.type != "cuda" or not is_on:
        yield meter
        return
    from torch.profiler import ProfilerActivity, profile

    tracer = profile(activities=[ProfilerActivity.CUDA])
    with _costing_numbers_only(meter):
        tracer.start()
    meter.mark()
    try:
        yield meter
    finally:
        with _costing_numbers_only(meter):
            torch.cuda.synchronize(device)  # sync: the last kernels must be in the trace
            tracer.stop()
            meter.stages = busy_between_markers(_kernels(tracer))


@contextmanager
def _costing_numbers_only(meter: BusyMeter) -> Iterator[None]:
    """A run whose trace fails is a run all the same; one that failed keeps its own error."""
    try:
        yield
    except (AssertionError, AttributeError, RuntimeError) as error:
        meter.problem = meter.problem or str(error)


def _kernels(tracer: object) -> list[tuple[str, Interval]]:
    """(name, (start, end) in ms) of everything that ran on the device."""
    events = tracer.profiler.kineto_results.events()  # type: ignore[attr-defined]
    return [
        (event.name(), (event.start_ns() / 1e6, (event.start_ns() + event.duration_ns()) / 1e6))
        for event in events
        if str(event.device_type()).endswith("CUDA")
    ]


def busy_between_markers(kernels: Iterable[tuple[str, Interval]]) -> list[Interval]:
    """(ms in which at least one kernel ran, ms in all) of each gap between two markers."""
    ordered = sorted(kernels, key=lambda item: item[1])
    markers = [span for name, span in ordered if _MARKER in name]
    others = [span for name, span in ordered if _MARKER not in name]
    edges = [start for start, _ in markers]
    return [(_covered(others, low, high), high - low) for low, high in pairwise(edges)]


def _covered(spans: list[Interval], low: float, high: float) -> float:
    """Length of the union of the sorted `spans` inside [low, high]."""
    total, reached = 0.0, low
    for start, end in spans:
        start, end = max(start, reached), min(end, high)
        if end > start:
            total += end - start
            reached = end
    return total
