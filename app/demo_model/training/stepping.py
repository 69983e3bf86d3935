"""Runs a training step many times: as one captured CUDA graph where possible, plainly otherwise.

Owns capture, the optimizer's settings, the schedule by wall clock and the log. Knows nothing of the
model. Surprise: gradients are dropped before capture, so that each graph owns its own and its
backward pass overwrites, never adds.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

Built = TypeVar("Built")
TRIALS = 8  # runs of a step that are compared with as many plain ones


class Log:
    """Appends JSON lines and prints them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._start = time.monotonic()
        file.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, phase: str, **values: float | int | str) -> None:
        seconds = round(time.monotonic() - self._start, 1)
        rounded = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in values.items()}
        line = json.dumps({"seconds": seconds, "phase": phase, **rounded})
        print(line, flush=True)
        with self._file.open("a") as out:
            out.write(line + "\n")


def build_optimizer(
    parameters: Sequence[nn.Parameter], betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """Returns a fused AdamW whose rate is a tensor, so that a captured step sees changes of it."""
    device = parameters[0].device
    return torch.optim.AdamW(
        [{"params": list(parameters), "lr": torch.tensor(0.0, device=device)}],
        betas=betas,
        weight_decay=weight_decay,
        fused=True,
        capturable=device.type == "cuda",
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate in place."""
    for group in optimizer.param_groups:
        group["lr"].fill_(rate)


def rate_at(
    step: int, progress: float, peak: float, warmup: int = 500, decay_from: float = 0.4
) -> float:
    """Linear warm-up by steps, constant, then a cosine to 1 %; progress: 0..1 of the time."""
    rate = peak * min(1.0, (step + 1) / warmup)
    if progress > decay_from:
        left = min(1.0, (progress - decay_from) / (1 - decay_from))
        rate *= 0.01 + 0.99 * (1 + math.cos(math.pi * left)) / 2
    return rate


def forget(optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer start afresh, in the tensors that a captured step knows."""
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


class Average:
    """Moving average of weights, kept in a second set of parameters."""

    def __init__(
        self, source: Sequence[nn.Parameter], target: Sequence[nn.Parameter], decay: float
    ) -> None:
        self._source, self._target = [p.detach() for p in source], [p.detach() for p in target]
        self._decay = decay

    def update(self) -> None:
        torch._foreach_lerp_(self._target, self._source, 1 - self._decay)


class Step:
    """A training step; `__call__` runs it once.

    `function` computes the loss, its gradients and the update, reads only tensors of fixed
    addresses and returns None. With `capture` it is recorded after `warmup` plain runs (which do
    train). The step keeps `function` alive: a graph knows addresses only, so what the closure alone
    owns (tables, index ranges) would be freed and its memory given to the next sampling.
    """

    def __init__(
        self,
        function: Callable[[], None],
        optimizer: torch.optim.Optimizer,
        capture: bool,
        warmup: int = 4,
    ) -> None:
        self._function = function
        self._run = function
        if not capture:
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(warmup):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        optimizer.zero_grad(set_to_none=True)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            function()
        self._run = self._graph.replay

    def __call__(self) -> None:
        self._run()


def first_that_works(
    build: Callable[[bool, bool], Built],
    compiled: bool,
    capture: bool,
    log: Log,
    trial: Callable[[Built], Sequence[float]],
) -> Built:
    """Returns `build(compiled, capture)`, or a plainer build where that fails; logs failures.

    A build fails as well where its `trial` (mean losses and gradient norm, at a rate of 0) is not
    about that of the plainest build: a wrong kernel or a captured step that reads freed memory
    trains on noise, which the loss alone hides for minutes. A long run on a rented machine must
    not end because a compiler is missing there.
    """
    plain = build(False, False)
    if not (compiled or capture):
        return plain
    expected = trial(plain)
    choices = {(compiled, capture): 0, (False, capture): 1, (compiled, False): 2}
    choices.pop((False, False), None)
    for choice in choices:
        try:
            built = build(*choice)
            got = trial(built)
        except Exception as error:
            problem = repr(error)[:400]
        else:
            if all(0.6 < g / e < 1.7 for g, e in zip(got, expected, strict=True)):
                return built
            problem = f"its trial gave {_short(got)}, the plain step's {_short(expected)}"
        log("step", event=f"compiled={choice[0]} capture={choice[1]} failed", error=problem)
    return plain


def mean_of(step: Step, total: torch.Tensor, optimizer: torch.optim.Optimizer) -> list[float]:
    """Returns the means of what the step adds to `total`, over TRIALS runs that train nothing."""
    set_rate(optimizer, 0.0)
    total.zero_()
    for _ in range(TRIALS):
        step()
    means = (total / TRIALS).tolist()
    total.zero_()
    forget(optimizer)
    return [float(mean) for mean in means]


def _short(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def set_up_backends() -> None:
    """Lets float32 products use TF32 and keeps attention to kernels that need no plan per shape."""
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.enable_cudnn_sdp(False)


def wait(device: torch.device) -> None:
    """Returns when the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
