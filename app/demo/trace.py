"""Owns the timeline of one run: which stage took how long, and what answered each call in it.

Must never touch the pipeline: it reads counters between steps. The surprising fact: one step may be
mixed. A pipeline with sequential guidance calls its denoiser twice per step, and one of the two may
come from a graph while the other runs eagerly.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from dit_graphs.errors import Reason
from dit_graphs.pipelines.acceleration import acceleration_of

__all__ = ["Calls", "RunTrace", "Span", "TraceRecorder"]


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of one component: `graph` of them replayed, the others eager for a reason."""

    graph: int = 0
    eager: Mapping[Reason, int] = field(default_factory=dict)
    captures: int = 0

    @property
    def num_eager(self) -> int:
        """Calls that no graph answered."""
        return sum(self.eager.values())

    def __add__(self, other: Calls) -> Calls:
        eager = Counter(self.eager)
        eager.update(other.eager)
        return Calls(self.graph + other.graph, dict(eager), self.captures + other.captures)


@dataclass(frozen=True, slots=True)
class Span:
    """One stage of a run: "encode", "step" `index` (from 1) or "decode"; times in milliseconds.

    `gpu` is (busy, length) of the stage on the device's own clock, None where not measured.
    """

    stage: str
    index: int
    start_ms: float
    end_ms: float
    calls: Mapping[str, Calls]
    gpu: tuple[float, float] | None = None

    @property
    def total(self) -> Calls:
        """The calls of all components together."""
        return sum(self.calls.values(), Calls())

    @property
    def source(self) -> str:
        """ "graph", "eager", "mixed", or "none" where nothing wrapped was called."""
        total = self.total
        if not total.graph and not total.num_eager:
            return "none"
        if total.graph and total.num_eager:
            return "mixed"
        return "graph" if total.graph else "eager"


@dataclass(frozen=True, slots=True)
class RunTrace:
    """A finished (or stopped) run. `device` is "cpu" or "cuda"; `kind` names who replayed."""

    spans: tuple[Span, ...]
    device: str
    title: str = ""

    @property
    def total_ms(self) -> float:
        """From the first stage to the last."""
        return self.spans[-1].end_ms if self.spans else 0.0

    @property
    def calls(self) -> dict[str, Calls]:
        """Calls per component over the whole run."""
        totals: dict[str, Calls] = {}
        for span in self.spans:
            for label, calls in span.calls.items():
                totals[label] = totals.get(label, Calls()) + calls
        return totals

    def with_gpu(self, stages: list[tuple[float, float]] | None) -> RunTrace:
        """The trace with what was measured of each span; unchanged where the counts differ."""
        if stages is None or len(stages) != len(self.spans):
            return self
        pairs = zip(self.spans, stages, strict=True)
        return replace(self, spans=tuple(replace(span, gpu=stage) for span, stage in pairs))


_Counts = tuple[int, "Counter[Reason]", int]


class TraceRecorder:
    """Cuts one pipeline call into spans; `cut` ends the span that began at the last cut."""

    def __init__(self, pipe: object, device: torch.device) -> None:
        self._pipe = pipe
        self._device = device
        self._spans: list[Span] = []
        self._zero = time.perf_counter()
        self._start = 0.0
        self._before = self._counts()

    def cut(self, stage: str, index: int = 0) -> Span:
        """Everything since the last cut was this stage."""
        now = (time.perf_counter() - self._zero) * 1e3
        after = self._counts()
        calls = {
            label: _difference(self._before.get(label), counts) for label, counts in after.items()
        }
        calls = {label: c for label, c in calls.items() if c.graph or c.num_eager or c.captures}
        span = Span(stage, index, self._start, now, calls)
        self._spans.append(span)
        self._before, self._start = after, now
        return span

    def trace(self, title: str = "") -> RunTrace:
        """All spans so far."""
        return RunTrace(tuple(self._spans), self._device.type, title)

    def _counts(self) -> dict[str, _Counts]:
        acceleration = acceleration_of(self._pipe)
        if acceleration is None:
            return {}
        return {
            label: (*runner.stats.mark(), runner.stats.captures)
            for label, runner in acceleration.runners.items()
        }


def _difference(before: _Counts | None, after: _Counts) -> Calls:
    if before is None:
        before = (0, Counter(), 0)
    eager = after[1] - before[1]
    return Calls(after[0] - before[0], dict(eager), after[2] - before[2])
