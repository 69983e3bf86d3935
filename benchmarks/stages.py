"""Where the host's time of a replayed step goes: the profile beside a missed target.

Owns stopwatches around the inner steps of the library. Knows their names, which are private, so it
breaks where they change. The surprising fact: the same Python takes twice as long right after an
eager forward, which has swept the processor's caches, as it takes in a loop of replays.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from unittest.mock import patch

from benchmarks import protocol
from dit_graphs.backends.cuda import CudaRecording
from dit_graphs.cache import Entry
from dit_graphs.memory import CudaState
from dit_graphs.runner import GraphRunner
from dit_graphs.static_inputs import StaticInputs

# `look_up` holds the signature; `launch` is the driver's, the rest is ours.
STAGES = (
    ("look_up", GraphRunner, "_look_up"),
    ("begin", CudaState, "_begin_order"),
    ("bind", StaticInputs, "bind"),
    ("launch", CudaRecording, "replay"),
    ("hand_out", Entry, "hand_out"),
    ("end", CudaState, "_end_order"),
)


def profile(
    call: Callable[[], object], before: Callable[[], object] | None, *, rounds: int
) -> dict[str, float]:
    """Median milliseconds of a step on the host and of its stages.

    Each step starts on an idle device. `before` runs ahead of each and is not counted.
    """
    samples: dict[str, list[float]] = defaultdict(list)
    with _stopwatches(samples):
        for _ in range(rounds):
            if before is not None:
                before()
            samples["step"].append(protocol.host_ms(call))
    return {stage: statistics.median(times) for stage, times in samples.items() if times}


@contextmanager
def _stopwatches(samples: dict[str, list[float]]) -> Iterator[None]:
    with ExitStack() as stack:
        for stage, owner, name in STAGES:
            timed = _timed(getattr(owner, name), samples[stage])
            stack.enter_context(patch.object(owner, name, timed))
        yield


def _timed(method: Callable[..., object], times: list[float]) -> Callable[..., object]:
    @wraps(method)
    def timed(*args: object, **kwargs: object) -> object:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            times.append((time.perf_counter() - start) * 1e3)

    return timed
