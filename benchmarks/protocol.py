"""How anything here is timed: interleaved, synchronised, with the GPU's own account beside it.

Owns clocks, samples and the profiler. Knows nothing of models or graphs. The surprising fact: a
ratio of two medians is only fair when both were measured in turn (A B A B), because a GPU's clock
drifts by several percent within a minute.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch

MIN_ROUNDS = 5
MAX_START_CELSIUS = 80.0
_QUERY = "clocks.sm,clocks.max.sm,temperature.gpu,power.draw"


@dataclass(frozen=True, slots=True)
class Timing:
    """Samples of one variant in milliseconds, with median and 95th percentile."""

    median_ms: float
    p95_ms: float
    samples_ms: list[float]

    @classmethod
    def of(cls, samples_ms: list[float]) -> Timing:
        """The summary of at least one sample."""
        return cls(statistics.median(samples_ms), percentile(samples_ms, 95), samples_ms)

    def as_dict(self) -> dict[str, object]:
        """Plain values for a result file."""
        return asdict(self)


def percentile(samples: list[float], percent: float) -> float:
    """The nearest-rank percentile: a value that was measured, never an interpolation."""
    ordered = sorted(samples)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]


def synchronize() -> None:
    """Waits for the device; nothing to wait for where there is none."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # sync: what this function is for


def time_ms(call: Callable[[], object]) -> float:
    """Milliseconds from a synchronised device to the next synchronised device."""
    synchronize()  # sync: the clock starts on an idle device
    start = time.perf_counter()
    call()
    synchronize()  # sync: the clock stops when the work is done
    return (time.perf_counter() - start) * 1e3


def host_ms(call: Callable[[], object]) -> float:
    """Milliseconds until the call returns, the device idle before it: what Python costs."""
    synchronize()  # sync: a full launch queue would block the call
    start = time.perf_counter()
    call()
    elapsed = (time.perf_counter() - start) * 1e3
    synchronize()  # sync: the next measurement starts on an idle device
    return elapsed


def interleaved(
    variants: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmups: int = 2,
    measure: Callable[[Callable[[], object]], float] = time_ms,
) -> dict[str, Timing]:
    """Each variant timed once per round, in turn, after its warm-up calls.

    Raises ValueError for fewer than five rounds.
    """
    if rounds < MIN_ROUNDS:
        raise ValueError(f"rounds: expected at least {MIN_ROUNDS}, got {rounds}")
    for call in variants.values():
        for _ in range(warmups):
            call()
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, call in variants.items():
            samples[name].append(measure(call))
    return {name: Timing.of(values) for name, values in samples.items()}


@dataclass(frozen=True, slots=True)
class Busy:
    """GPU time of one call: the sum of its kernels' durations, and how many there were."""

    ms: float
    kernels: int


def busy(call: Callable[[], object], *, calls: int = 3) -> Busy:
    """The median over `calls` profiled calls. wall / busy = 1.00 is the launch-overhead floor."""
    results = sorted((_profiled(call) for _ in range(calls)), key=lambda result: result.ms)
    return results[len(results) // 2]


def _profiled(call: Callable[[], object]) -> Busy:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()  # sync: kernels that run after the profiler stops are not seen
    kernels = [
        event.time_range.elapsed_us()
        for event in profile.events()
        if event.device_type.name == "CUDA" and not event.name.startswith(("Memcpy", "Memset"))
    ]
    if not kernels:
        raise RuntimeError("the profiler saw no kernel: a busy time of zero would be a lie")
    return Busy(ms=sum(kernels) / 1e3, kernels=len(kernels))


class GpuClock:
    """Samples SM clock, temperature and power while a block runs (nvidia-smi queries only)."""

    def __init__(self, device: int = 0, interval_ms: int = 200) -> None:
        self._query = [
            "nvidia-smi",
            f"--id={device}",
            f"--query-gpu={_QUERY}",
            "--format=csv,noheader,nounits",
        ]
        self._interval_ms = interval_ms
        self._process: subprocess.Popen[str] | None = None
        self.samples: list[list[float]] = []

    def __enter__(self) -> GpuClock:
        self.samples = self._once()
        command = [*self._query, f"--loop-ms={self._interval_ms}"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process is not None
        self._process.terminate()
        output, _ = self._process.communicate()
        # One query at each end, in case the looping process dies with its lines unwritten.
        self.samples = [*self.samples, *parse_gpu_samples(output), *self._once()]

    def _once(self) -> list[list[float]]:
        done = subprocess.run(self._query, capture_output=True, text=True, check=False)
        return parse_gpu_samples(done.stdout)

    @classmethod
    def maybe(cls, device_type: str) -> GpuClock | NoClock:
        """A sampler for "cuda", and one that samples nothing for any other device type."""
        return cls() if device_type == "cuda" else NoClock()

    def summary(self) -> dict[str, object]:
        """Median clock, its maximum, temperatures, and `suspect`: why the run needs repeating."""
        return summarise_gpu_samples(self.samples)


class NoClock:
    """The clock of a run without a GPU."""

    def __enter__(self) -> NoClock:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def summary(self) -> dict[str, object]:
        """Nothing was sampled, and nothing is suspect."""
        return {}


def parse_gpu_samples(output: str) -> list[list[float]]:
    """The complete lines of numbers; a last line cut off by the end of the process is dropped."""
    rows = []
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        try:
            row = [float(cell) for cell in cells]
        except ValueError:
            continue  # "[N/A]", or a line cut off in the middle
        if len(row) == _QUERY.count(",") + 1:
            rows.append(row)
    return rows


def summarise_gpu_samples(samples: list[list[float]]) -> dict[str, object]:
    """The record of a run's clocks; empty samples are themselves suspect."""
    if not samples:
        return {"suspect": ["no clock samples"]}
    clocks, maxima, celsius, watts = (list(column) for column in zip(*samples, strict=True))
    suspect = []
    if statistics.median(clocks) < max(maxima) / 2:
        suspect.append("median SM clock under half of the maximum")
    if celsius[0] > MAX_START_CELSIUS:
        suspect.append(f"started above {MAX_START_CELSIUS:g} °C")
    return {
        "sm_clock_mhz": statistics.median(clocks),
        "max_sm_clock_mhz": max(maxima),
        "start_celsius": celsius[0],
        "max_celsius": max(celsius),
        "median_watts": statistics.median(watts),
        "num_samples": len(samples),
        "suspect": suspect,
    }
