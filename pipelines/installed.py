"""Owns what stands behind one part of a pipeline: its runner or runners, put on and taken off.

Must never know requests or configs' meaning. The surprising fact: one part may have two runners. A
language model's `generate` reads a prompt with one and writes with the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import nn

from dit_graphs.config import GraphConfig
from dit_graphs.counters import RunnerStats, log
from dit_graphs.intercept import Function, Intercept, find_intercept, install
from dit_graphs.runner import GraphRunner, RunnerOptions
from dit_graphs.wrapping import check_wrappable, let_go, wrap_with

from .components import Component
from .mutators import MODULE_MUTATORS, Listener, Overheard, listen
from .outputs import know_holders

__all__ = ["InstalledPart", "InstalledRunner", "warn_of_other_config", "wrap_part"]


class InstalledRunner(Protocol):
    """What the pipeline side asks of any runner."""

    @property
    def config(self) -> GraphConfig: ...

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


@dataclass(frozen=True, slots=True, eq=False)
class InstalledPart:
    """One part of a pipeline as it is served for `user`."""

    part: Component
    intercept: Intercept
    heard: tuple[Overheard, ...]
    user: Listener

    @property
    def module(self) -> nn.Module:
        """The part itself."""
        return self.part.module

    def serves(self, part: Component) -> bool:
        """Whether it is this method of this very module, whatever the part is called now."""
        return self.part.module is part.module and self.part.method == part.method

    @property
    def is_in_place(self) -> bool:
        """Whether calls still reach us first, and nobody took the intercept off."""
        return self.intercept.is_in_place and self.user in self.intercept.users

    def runners(self) -> dict[str, InstalledRunner]:
        """What serves the part, by label."""
        serve = self.intercept.serve
        if isinstance(serve, GraphRunner):
            return {self.part.label: serve}
        if hasattr(serve, "installed_runners"):
            return cast(_SeveralRunners, serve).installed_runners()
        return {}

    def take_off(self) -> None:
        """The part is as before; unless others need them too, its graphs' memory is released."""
        let_go(self.intercept, self.user)
        for override in self.heard:
            override.drop(self.user)


def wrap_part(
    part: Component, config: GraphConfig, options: RunnerOptions, user: Listener
) -> InstalledPart:
    """The part is served for `user` from now on (by the present runner, where it has one).

    Raises `ConfigError` with the part untouched.
    """
    know_holders(part.module)
    intercept = find_intercept(part.module, part.method)
    if part.role != "text_encoder":
        wrap_with(part.module, config, options, method=part.method, user=user)
        intercept = find_intercept(part.module, part.method)
    elif intercept is not None:
        intercept.users.append(user)
    else:
        check_wrappable(part.module, part.method)
        intercept = install(part.module, part.method, _maker(part, config, options), user)
    assert intercept is not None
    return InstalledPart(part, intercept, tuple(listen(part.module, MODULE_MUTATORS, user)), user)


def warn_of_other_config(label: str, runner: InstalledRunner, config: GraphConfig) -> None:
    """Says so where somebody else's config is in force, whose runner it is."""
    if runner.config != config:
        log.warning(
            "%s: wrapped before with another config, which stays in force until whoever "
            "wrapped it lets go of it", label,
        )  # fmt: skip


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
