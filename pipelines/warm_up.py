"""Owns `warmup`: real pipeline calls that capture before the first user waits.

Must never know graphs. The surprising fact: sizes run largest first, because later captures then
live in the memory of the first; and since only the pipeline knows its sizes, each call is first run
up to the denoiser. The calls are real ones, so that what they capture is what requests ask for.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import cast

from torch import Tensor

from dit_graphs.counters import log
from dit_graphs.errors import ConfigError
from dit_graphs.tree import map_tensors

from .acceleration import Acceleration, acceleration_of
from .components import LATENT_NAMES
from .installed import InstalledRunner

__all__ = ["warmup"]

Size = tuple[int, int]  # elements of the latents, and of all tensors


def warmup(target: object, calls: Sequence[Mapping[str, object]], **common: object) -> list[str]:
    """Graphs exist for every call in `calls` afterwards; returns the captured signatures.

    Each item holds keyword arguments of the pipeline (`height`, `width` in pixels, `num_frames`,
    `prompt`…); `common` is added to each. Two steps are run unless `num_inference_steps` says
    otherwise; nothing is decoded to pictures unless `output_type` is given. Raises `ConfigError`
    for a pipeline that was not accelerated, an argument it does not take or calls of another form.
    """
    acceleration = acceleration_of(target)
    if acceleration is None or not callable(target):
        raise ConfigError("warmup() needs an accelerated pipeline: call accelerate() first")
    acceleration.follow_pipeline()
    names = _argument_names(target)
    prepared = [_prepare(names, {**common, **call}) for call in _listed(calls)]
    if len(prepared) > 1:
        sizes = [_size(acceleration, target, call) for call in prepared]
        order = sorted(range(len(prepared)), key=sizes.__getitem__, reverse=True)
        prepared = [prepared[index] for index in order]
    before = Counter(_signatures(acceleration.runners))
    with ExitStack() as stack:
        for runner in acceleration.runners.values():
            stack.enter_context(runner.warming_up())
        for call in prepared:
            target(**call)
    made = list((Counter(_signatures(acceleration.runners)) - before).elements())
    log.info("warm-up captured %d graphs", len(made))
    return made


def _listed(calls: object) -> list[Mapping[str, object]]:
    """The calls, if they have the form of some. Raises `ConfigError`."""
    is_one = isinstance(calls, (str, Mapping)) or not isinstance(calls, Iterable)
    listed = [None] if is_one else list(cast("Iterable[object]", calls))
    found = [call for call in listed if isinstance(call, Mapping)]
    if len(found) < len(listed):
        raise ConfigError(
            "warmup: expected a list of keyword arguments, as in [dict(height=512, width=512)], "
            f"got {calls!r}"
        )
    return found


def _signatures(runners: Mapping[str, InstalledRunner]) -> list[str]:
    return [
        f"{label}: {graph['signature']}"
        for label, runner in runners.items()
        for graph in cast("list[dict[str, object]]", runner.report()["graphs"])
    ]


class _Reached(BaseException):
    """The denoiser was called; not an `Exception`, so that no pipeline takes it for its own."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size


def _size(
    acceleration: Acceleration, target: Callable[..., object], call: Mapping[str, object]
) -> Size:
    """How large the denoiser's inputs are in this call, which stops there.

    Only the pipeline knows: sizes come from pictures, from defaults of the model, or rounded.
    """
    parts = list(acceleration.parts.values())
    if not any(part.part.role == "denoiser" for part in parts):
        return _asked_for(call), 0
    with ExitStack() as stack:
        for part in parts:
            intercept = part.intercept
            serve = _stop if part.part.role == "denoiser" else intercept.pass_through
            stack.callback(setattr, intercept, "serve", intercept.serve)
            intercept.serve = serve
        try:
            target(**call)
        except _Reached as reached:
            return reached.size
    return _asked_for(call), 0


def _stop(*args: object, **kwargs: object) -> object:
    latents = next((kwargs[name] for name in LATENT_NAMES if name in kwargs), args[:1])
    raise _Reached((_numel(latents), _numel((args, kwargs))))


def _numel(value: object) -> int:
    found: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        found.append(tensor.numel())
        return tensor

    map_tensors(value, count, keep_unknown=True)
    return sum(found)


def _argument_names(target: Callable[..., object]) -> list[str]:
    """What a call of the pipeline takes; of a modular one, what its blocks read."""
    names = list(inspect.signature(type(target).__call__).parameters)[1:]
    blocks = vars(target).get("_blocks")
    return [*names, *getattr(blocks, "input_names", ())]


def _prepare(names: Sequence[str], call: dict[str, object]) -> dict[str, object]:
    unknown = [name for name in call if name not in names]
    if unknown:
        raise ConfigError(f"warmup: the pipeline takes no {unknown}; it takes {names}")
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


def _asked_for(call: Mapping[str, object]) -> int:
    size = 1
    for name in ("height", "width", "num_frames", "num_images_per_prompt"):
        value = call.get(name)
        if isinstance(value, int):
            size *= value
    return size
