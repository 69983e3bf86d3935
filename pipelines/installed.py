"""Owns what stands behind one part of a pipeline: its runner or runners, put on and taken off.

Must never know requests or configs' meaning. The surprising fact: one part may have two runners. A
language model's `generate` reads a prompt with one and writes with the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol, cast

import torch

from dit_graphs.config import GraphConfig
from dit_graphs.counters import RunnerStats
from dit_graphs.intercept import Function, find_intercept, install, remove
from dit_graphs.runner import GraphRunner, RunnerOptions
from dit_graphs.wrapping import check_wrappable, wrap_with

from .components import Component

__all__ = ["InstalledRunner", "runners_behind", "take_off", "wrap_part"]


class InstalledRunner(Protocol):
    """What the pipeline side asks of any runner."""

    @property
    def stats(self) -> RunnerStats: ...

    @property
    def backend(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    def report(self) -> dict[str, object]: ...

    def mark_changed(self) -> None: ...

    def switched_off(self) -> AbstractContextManager[None]: ...

    def warming_up(self) -> AbstractContextManager[None]: ...

    def explain_misses(self) -> Iterator[str]: ...

    def holds_graphs(self) -> bool: ...


class _SeveralRunners(Protocol):
    """What a text generator is to this module: it imports transformers, we do not."""

    def installed_runners(self) -> dict[str, InstalledRunner]: ...

    def close(self) -> None: ...


def wrap_part(
    part: Component, config: GraphConfig, options: RunnerOptions
) -> dict[str, InstalledRunner]:
    """The part is served by runners from now on (by the present ones, where it already is).

    Raises `ConfigError` with the part untouched.
    """
    if part.role != "text_encoder":
        return {part.label: wrap_with(part.module, config, options, method=part.method)}
    if not runners_behind(part):
        check_wrappable(part.module, part.method)
        install(part.module, part.method, _maker(part, config, options))
    return runners_behind(part)


def _maker(
    part: Component, config: GraphConfig, options: RunnerOptions
) -> Callable[[Function], Function]:
    if part.method == "generate":
        from .text_encoder.generate import TextGenerator

        def generator(original: Function) -> Function:
            return TextGenerator(
                part.module, original, config, label=part.label, guard=options.guard,
                policy=options.policy,
            )  # fmt: skip

        return generator
    from .text_encoder.encode import EncodeRunner

    return lambda original: EncodeRunner(part.module, original, config, options)


def runners_behind(part: Component) -> dict[str, InstalledRunner]:
    """The runners installed on the part, by label; none where it is not wrapped."""
    intercept = find_intercept(part.module, part.method)
    serve = intercept.serve if intercept is not None else None
    if isinstance(serve, GraphRunner):
        return {part.label: serve}
    if part.role == "text_encoder" and hasattr(serve, "installed_runners"):
        return cast(_SeveralRunners, serve).installed_runners()
    return {}


def take_off(part: Component) -> None:
    """The part is exactly as before; its graphs and their memory are released."""
    intercept = find_intercept(part.module, part.method)
    if intercept is None or not runners_behind(part):
        return
    serve = intercept.serve
    remove(part.module, part.method)
    assert isinstance(serve, GraphRunner) or hasattr(serve, "close")
    serve.close()
