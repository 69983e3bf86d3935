"""Owns `warmup`: real pipeline calls that capture before the first user waits.

Must never know graphs. The surprising fact: sizes run largest first, because later captures then
live in the memory of the first, and the calls are real ones, so that what they capture is exactly
what requests will ask for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import cast

from dit_graphs.counters import log
from dit_graphs.errors import ConfigError

from .acceleration import acceleration_of
from .installed import InstalledRunner

__all__ = ["warmup"]


def warmup(target: object, calls: Sequence[Mapping[str, object]], **common: object) -> list[str]:
    """Graphs exist for every call in `calls` afterwards; returns the captured signatures.

    Each item holds keyword arguments of the pipeline (`height`, `width` in pixels, `num_frames`,
    `prompt`…); `common` is added to each. Two steps are run unless `num_inference_steps` says
    otherwise; nothing is decoded to pictures unless `output_type` is given. Raises `ConfigError`
    for a pipeline that was not accelerated or an argument it does not take.
    """
    acceleration = acceleration_of(target)
    if acceleration is None or not callable(target):
        raise ConfigError("warmup() needs an accelerated pipeline: call accelerate() first")
    names = inspect.signature(type(target).__call__).parameters
    prepared = [_prepare(names, {**common, **call}) for call in calls]
    prepared.sort(key=_work, reverse=True)
    before = {label: set(_signatures(runner)) for label, runner in acceleration.runners.items()}
    with ExitStack() as stack:
        for runner in acceleration.runners.values():
            stack.enter_context(runner.warming_up())
        for call in prepared:
            cast(Callable[..., object], target)(**call)
    made = [
        f"{label}: {name}"
        for label, runner in acceleration.runners.items()
        for name in _signatures(runner)
        if name not in before.get(label, set())
    ]
    log.info("warm-up captured %d graphs", len(made))
    return made


def _signatures(runner: InstalledRunner) -> list[str]:
    graphs = cast("list[dict[str, object]]", runner.report()["graphs"])
    return [str(graph["signature"]) for graph in graphs]


def _prepare(names: Mapping[str, object], call: dict[str, object]) -> dict[str, object]:
    unknown = [name for name in call if name not in names]
    if unknown:
        raise ConfigError(f"warmup: the pipeline takes no {unknown}; it takes {list(names)[1:]}")
    defaults: dict[str, object] = {
        "prompt": "warm-up",
        "num_inference_steps": 2,
        "output_type": "latent",
    }
    given = "prompt_embeds" in call
    for name, value in defaults.items():
        if name in names and not (name == "prompt" and given):
            call.setdefault(name, value)
    return call


def _work(call: Mapping[str, object]) -> int:
    size = 1
    for name in ("height", "width", "num_frames", "num_images_per_prompt"):
        value = call.get(name)
        if isinstance(value, int):
            size *= value
    return size
