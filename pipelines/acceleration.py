"""Owns `accelerate` and `restore`: an unmodified pipeline object whose parts replay graphs.

Must never know how graphs are captured. The surprising fact: a pipeline tells us everything we
need through two methods it calls anyway: `progress_bar`, whose total is the number of steps, and
`maybe_free_model_hooks`, which ends a call. Where that is not reached, the request ends with the
frame of the call or with the bar.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from torch import nn

from dit_graphs.config import GraphConfig
from dit_graphs.counters import Mark, log
from dit_graphs.errors import ConfigError, Reason
from dit_graphs.intercept import MethodOverride
from dit_graphs.request_scope import Request, begin_request, end_request
from dit_graphs.runner import RunnerOptions
from dit_graphs.wrapping import break_policy, check_wrappable

from .attachments import state_guard
from .components import Component, components_of, describe_denoiser, parts_of
from .families import family_of
from .families.buckets import buckets_of
from .installed import InstalledPart, InstalledRunner, warn_of_other_config, wrap_part
from .loops import bar_owners, opening_frame, runs_foreign_code
from .mutators import PIPELINE_MUTATORS, Overheard, guider_mutators, listen
from .step_caches import StepCache

__all__ = ["Acceleration", "accelerate", "acceleration_of", "restore"]

T = TypeVar("T")

_ATTRIBUTE = "_dit_graphs"


class Acceleration:
    """What `accelerate` put on a pipeline; a copy of the pipeline does not have it."""

    def __init__(self, target: object, config: GraphConfig) -> None:
        self.target = target
        self.config = config
        self.carriers: list[object] = []
        self.parts: dict[str, InstalledPart] = {}
        self._refused: dict[str, tuple[nn.Module, str]] = {}
        self._adopted: set[str] = set()
        self._overrides: list[MethodOverride] = []
        self._guider: object = None
        self._heard_of_guider: list[Overheard] = []

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        return None

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _no_acceleration, ()

    @property
    def runners(self) -> dict[str, InstalledRunner]:
        """The runners by label, as far as they are still installed."""
        found: dict[str, InstalledRunner] = {}
        for part in self.parts.values():
            found.update(part.runners())
        return found

    @property
    def refused(self) -> dict[str, str]:
        """The parts that stay eager, each with the reason."""
        return {label: why for label, (_, why) in self._refused.items()}

    def wanted(self) -> list[Component]:
        """The parts to wrap. Raises `ConfigError` where one of them cannot be."""
        wanted = [part for part in _parts(self.target) if part.role in self.config.components]
        if not wanted:
            raise _nothing_to_wrap(self.target, " or ".join(self.config.components))
        for part in wanted:
            if part.role != "text_encoder" and not _is_hooked_for_offload(part.module):
                check_wrappable(part.module, part.method)
        return wanted

    def install(self, wanted: list[Component]) -> None:
        """Wraps every wanted part. Raises `ConfigError` with nothing installed."""
        try:
            for part in wanted:
                self._wrap(part)
        except ConfigError:
            self.remove()
            raise
        if self.runners and all(r.backend == "none" for r in self.runners.values()):
            log.warning(
                "%s: no part is on a CUDA device: every call stays eager (%s) "
                "until it is moved to one",
                type(self.target).__name__, Reason.NO_CUDA,
            )  # fmt: skip
        if not isinstance(self.target, (nn.Module, Mapping)):
            for owner in bar_owners(self.target):
                self._override(owner, "progress_bar", self._on_progress_bar)
            if callable(getattr(self.target, "maybe_free_model_hooks", None)):
                self._override(self.target, "maybe_free_model_hooks", self._on_end)
            self._overrides.extend(listen(self.target, PIPELINE_MUTATORS, self))
        self._listen_to_guider()

    def _wrap(self, part: Component) -> None:
        carries = part.role == "denoiser"
        backend = self.config.backend_for(part.role)
        options = RunnerOptions(
            component=part.role,
            label=part.label,
            policy=break_policy(self.config),
            key=attention_key,
            guard=state_guard(part.module, serves_caches=carries, backend=backend),
            describe=describe_denoiser if carries else None,
            carried=StepCache(part.module) if carries else None,
            family=family_of(part.module, part.method),
            padding=buckets_of(part.module, self.config) if carries else None,
        )
        try:
            made = wrap_part(part, self.config, options, self)
        except ConfigError as error:
            self._refuse(part, error)
            return
        self.parts[part.label] = made
        self._refused.pop(part.label, None)
        for label, runner in made.runners().items():
            log.info("%s: %s", label, _choice(self.config, part, runner))
            warn_of_other_config(label, runner, self.config)

    def _refuse(self, part: Component, error: ConfigError) -> None:
        """The part stays eager where that is no user's mistake; otherwise raises `error`."""
        attached = state_guard(part.module)()
        reason, text = Reason.UNSUPPORTED_MODEL, str(error)
        if attached is not None and attached[0] is Reason.OFFLOAD:
            reason, text = attached[0], attached[0].told(attached[1])
        elif part.role != "text_encoder":
            raise error
        self._refused[part.label] = part.module, f"{reason}: {text}"
        log.warning("%s: eager (%s): %s", part.label, reason, text)

    def adopt(self, part: Component) -> None:
        """One more part is served; it goes with the others at `remove`."""
        self._release(part.label)
        self._wrap(part)
        self._adopted.add(part.label)

    def _override(
        self,
        owner: object,
        name: str,
        make: Callable[[Callable[..., object]], Callable[..., object]],
    ) -> None:
        override = MethodOverride(owner, name)
        override.serve = make(override.original)
        override.put(self)
        self._overrides.append(override)

    def notice_change(self) -> None:
        """Weights, adapters or processors may have changed."""
        for runner in self.runners.values():
            runner.mark_changed()

    def _listen_to_guider(self) -> None:
        """Guiders change modules between the branches of one step; a user may exchange them."""
        guider = None if isinstance(self.target, nn.Module) else parts_of(self.target).get("guider")
        if guider is self._guider:
            return
        for override in self._heard_of_guider:
            override.drop(self)
        self._guider = guider
        names = () if guider is None else guider_mutators(guider)
        self._heard_of_guider = listen(guider, names, self)

    def _on_progress_bar(self, original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            bar = original(*args, **kwargs)
            total = getattr(bar, "total", None)
            request = self.begin(int(total) if total else None)
            with suppress(TypeError):  # a bar of the user's own that cannot be watched
                # a loop that is done with its bar is over, however it ended
                weakref.finalize(bar, request.close).atexit = False
            return bar

        return call

    def _on_end(self, original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            end_request()
            return original(*args, **kwargs)

        return call

    def begin(self, total_steps: int | None) -> Request:
        """A request starts: the wrapped parts are the pipeline's present ones, and still ours."""
        self.follow_pipeline()
        frame = opening_frame(self.target)
        request = begin_request(
            total_steps, frame, is_watched=runs_foreign_code(self.target, frame)
        )
        marks = {label: (runner, runner.stats.mark()) for label, runner in self.runners.items()}
        request.at_end(self, partial(_tell, marks))
        return request

    def follow_pipeline(self) -> None:
        """Parts that were replaced, taken away or wrapped over since the last request."""
        self._listen_to_guider()
        present = [part for part in _parts(self.target) if part.role in self.config.components]
        modules = [part.module for part in present]
        gone = [
            label
            for label, known in self.parts.items()
            if label not in self._adopted and not any(map(known.serves, present))
        ]
        for label, known in list(self.parts.items()):
            if label in gone or not known.is_in_place:
                self._release(label)
        for label, (module, why) in list(self._refused.items()):
            is_back = why.startswith(Reason.OFFLOAD) and not _is_hooked_for_offload(module)
            if is_back or not any(module is part for part in modules):
                del self._refused[label]
        new = [part for part in present if not self._knows(part)]
        if gone or new:
            old = ", ".join(gone) or "nothing"
            found = ", ".join(part.label for part in new) or "nothing"
            log.info("the pipeline's parts changed: released %s; new: %s", old, found)
        for part in new:
            self._serve_new(part)

    def _knows(self, part: Component) -> bool:
        is_refused = any(module is part.module for module, _ in self._refused.values())
        return is_refused or any(known.serves(part) for known in self.parts.values())

    def _serve_new(self, part: Component) -> None:
        if part.label in self.parts:  # that name went to another part when this one was missing
            part = replace(part, label=f"{part.role}:{part.name}.{part.method}")
        try:
            self._wrap(part)
        except ConfigError as error:
            self._refused[part.label] = part.module, str(error)
            log.warning("%s: eager: %s", part.label, error)

    def _release(self, label: str) -> None:
        known = self.parts.pop(label, None)
        if known is not None:
            known.take_off()

    def remove(self) -> None:
        """The pipeline is exactly as before; all graph memory is released."""
        end_request()
        for label in list(self.parts):
            self._release(label)
        for override in (*self._heard_of_guider, *reversed(self._overrides)):
            override.drop(self)
        self._guider = None
        self._heard_of_guider.clear()
        self._overrides.clear()


def _tell(marks: dict[str, tuple[InstalledRunner, Mark]]) -> None:
    """One line per part says how the request was served."""
    for label, (runner, mark) in marks.items():
        line = runner.stats.line(mark)
        if not line.startswith("0/0"):
            kind = "cuda graph" if runner.device.type == "cuda" else "cpu recorder"
            log.info("%s %s: %s", label, kind, line)


def _no_acceleration() -> None:
    return None


def _parts(target: object) -> Iterator[Component]:
    if isinstance(target, nn.Module):
        if type(target).__module__.startswith("transformers."):
            yield from components_of({"text_encoder": target})
        else:
            yield Component("denoiser", "module", "denoiser", target, "forward")
        return
    yield from components_of(parts_of(target))


def _nothing_to_wrap(target: object, roles: str) -> ConfigError:
    kind = type(target).__name__
    if isinstance(target, nn.Module):
        return ConfigError(f"{kind} by itself is no {roles}: leave components out")
    names = [name for name, part in parts_of(target).items() if isinstance(part, nn.Module)]
    return ConfigError(
        f"{kind} has no {roles} that is known among its modules {names}: a module by itself takes "
        "wrap(module)"
    )


def _is_hooked_for_offload(module: nn.Module) -> bool:
    found = state_guard(module)()
    return found is not None and found[0] is Reason.OFFLOAD


def _choice(config: GraphConfig, part: Component, runner: InstalledRunner) -> str:
    asked = config.backend_for(part.role)
    if runner.backend == "none":
        return f"eager ({Reason.NO_CUDA})"
    return asked if asked != "auto" else "auto→full, breakable where needed"


def attention_key() -> object:
    """The attention backend diffusers would dispatch to now."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    return str(_AttentionBackendRegistry._active_backend)


def acceleration_of(target: object) -> Acceleration | None:
    """What `accelerate` installed on this pipeline, dict or module, or None."""
    name = _attribute(target)
    carried = (getattr(each, "__dict__", {}).get(name) for each in _carriers(target))
    return next((found for found in carried if isinstance(found, Acceleration)), None)


def _carriers(target: object) -> list[object]:
    """What holds the acceleration of `target`. A dict's modules do: an entry of ours beside its
    own would be one argument too many for the pipeline that is built of them.
    """
    if isinstance(target, Mapping):
        return [part for part in target.values() if isinstance(part, nn.Module)]
    return [target]


def _attribute(target: object) -> str:
    return f"{_ATTRIBUTE}_{id(target)}" if isinstance(target, Mapping) else _ATTRIBUTE


def accelerate(target: T, config: GraphConfig | None = None, **overrides: object) -> T:
    """The same pipeline, replaying CUDA graphs of its denoiser and VAE from now on.

    `target`: a diffusers pipeline, a modular pipeline, a dict of components or one module.
    Keyword arguments override fields of `config`. Idempotent: a second call with the same config
    changes nothing, another config replaces the first. Raises `ConfigError`, with the target
    untouched, where it cannot be wrapped.
    """
    config = GraphConfig.chosen(config, overrides)
    config.check_available()
    existing = acceleration_of(target)
    if existing is not None and existing.config == config:
        return target
    acceleration = Acceleration(target, config)
    wanted = acceleration.wanted()
    restore(target)
    acceleration.install(wanted)
    acceleration.carriers = _carriers(target)
    for carrier in acceleration.carriers:
        vars(carrier)[_attribute(target)] = acceleration
    return target


def restore(target: T) -> T:
    """The same pipeline with its original calls back and all graph memory released."""
    existing = acceleration_of(target)
    if existing is not None:
        existing.remove()
        for carrier in existing.carriers:
            vars(carrier).pop(_attribute(target), None)
    return target
