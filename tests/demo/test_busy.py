"""Busy time of the GPU from a list of kernels; the numbers are worked out by hand."""

from __future__ import annotations

import pytest
import torch

from dit_graphs.app.demo.gpu_busy import BusyMeter, busy_between_markers, busy_meter


def test_overlaps_count_once_and_markers_cut() -> None:
    kernels = [
        ("spin_kernel(long)", (0.0, 0.1)),
        ("gemm", (1.0, 3.0)),
        ("add", (2.0, 4.0)),  # overlaps by 1: together 3 ms
        ("spin_kernel(long)", (10.0, 10.1)),
        ("gemm", (11.0, 12.0)),
        ("copy", (15.0, 19.0)),
        ("spin_kernel(long)", (20.0, 20.1)),
        ("after the last stage", (21.0, 29.0)),
    ]
    assert busy_between_markers(reversed(kernels)) == [(3.0, 10.0), (5.0, 10.0)]


def test_a_kernel_over_a_marker_is_split() -> None:
    kernels = [
        ("spin_kernel", (0.0, 0.0)),
        ("long", (4.0, 8.0)),
        ("spin_kernel", (5.0, 5.0)),
        ("spin_kernel", (10.0, 10.0)),
    ]
    assert busy_between_markers(kernels) == [(1.0, 5.0), (3.0, 5.0)]


def test_without_a_gpu_nothing_is_measured() -> None:
    with busy_meter(torch.device("cpu")) as meter:
        meter.mark()
        torch.ones(4).add_(1)
        meter.mark()
    assert meter.stages is None


@pytest.mark.gpu
def test_on_a_gpu_a_busy_stage_is_busier_than_an_idle_one() -> None:
    import time

    device = torch.device("cuda")
    weights = torch.randn(4096, 4096, device=device)
    for _ in range(3):
        weights @ weights  # loading the kernel is idle time
    torch.cuda.synchronize()
    with busy_meter(device) as meter:
        for _ in range(60):
            weights = weights @ weights * 1e-3
        torch.cuda.synchronize()
        meter.mark()
        time.sleep(0.05)
        meter.mark()
    assert meter.stages is not None, meter.problem
    (busy, length), (idle, pause) = meter.stages
    assert busy > 0.8 * length
    assert pause > 40.0
    assert idle < 1.0


@pytest.mark.parametrize("broken", ["start", "stop", "events"])
def test_a_tracer_that_fails_costs_the_numbers_only(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another profiler may hold the device's tracing; the picture is drawn all the same."""

    class Tracer:
        def __init__(self, **_: object) -> None:
            self.profiler = None  # no events to read

        def start(self) -> None:
            if broken == "start":
                raise RuntimeError("CUPTI is in use")

        def stop(self) -> None:
            if broken in ("start", "stop"):
                raise RuntimeError("nothing was traced")

    monkeypatch.setattr(torch.profiler, "profile", Tracer)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(BusyMeter, "mark", lambda meter: None)
    with busy_meter(torch.device("cuda")) as meter:
        drawn = True
    assert drawn
    assert meter.stages is None
    assert meter.problem == "CUPTI is in use" if broken == "start" else meter.problem
    with pytest.raises(ValueError, match="the run's own"), busy_meter(torch.device("cuda")):
        raise ValueError("the run's own")
