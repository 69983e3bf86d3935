"""Owns `accelerate` and `restore`: an unmodified pipeline object whose parts replay graphs.

Must never know how graphs are captured. The surprising fact: a pipeline tells us everything we
need through two methods it calls anyway: `progress_bar`, whose total is the number of steps, and
`maybe_free_model_hooks`, which ends every call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from torch import nn

from dit_graphs.config import GraphConfig
from dit_graphs.counters import log
from dit_graphs.errors import ConfigError, Reason
from dit_graphs.intercept import MethodOverride, find_intercept
from dit_graphs.request_scope import begin_request, end_request
from dit_graphs.runner import RunnerOptions
from dit_graphs.wrapping import break_policy, check_wrappable, runner_of

from .components import Component, components_of, describe_denoiser, parts_of, state_guard
from .installed import InstalledRunner, runners_behind, take_off, wrap_part
from .mutators import MODULE_MUTATORS, PIPELINE_MUTATORS

__all__ = [
    "Acceleration",
    "accelerate",
    "acceleration_of",
    "disabled",
    "explain",
    "restore",
    "stats",
]

T = TypeVar("T")

_ATTRIBUTE = "_dit_graphs"


class Acceleration:
    """What `accelerate` put on a pipeline; a copy of the pipeline does not have it."""

    def __init__(self, target: object, config: GraphConfig) -> None:
        self.target = target
        self.config = config
        self.parts: dict[str, Component] = {}
        self.refused: dict[str, str] = {}
        self.is_disabled = 0
        self._overrides: list[MethodOverride] = []
        self._marks: dict[str, tuple[int, object]] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        return None

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _no_acceleration, ()

    @property
    def runners(self) -> dict[str, InstalledRunner]:
        """The runners by label, as far as they are still installed."""
        found: dict[str, InstalledRunner] = {}
        for part in self.parts.values():
            found.update(runners_behind(part))
        return found

    def install(self) -> None:
        """Wraps every wanted part. Raises `ConfigError` before anything was touched."""
        wanted = [part for part in _parts(self.target) if part.role in self.config.components]
        if not any(part.role == "denoiser" for part in wanted) and not wanted:
            raise ConfigError(f"{type(self.target).__name__} has no denoiser or VAE to wrap")
        for part in wanted:
            if part.role != "text_encoder" and not _is_hooked_for_offload(part.module):
                check_wrappable(part.module, part.method)
        self._wrap_parts(wanted)
        if self.runners and all(r.backend == "none" for r in self.runners.values()):
            log.warning("no part is on a CUDA device: every call stays eager (%s)", Reason.NO_CUDA)
        if not isinstance(self.target, (nn.Module, Mapping)):
            self._override_pipeline()

    def _wrap_parts(self, wanted: list[Component]) -> None:
        for part in wanted:
            if part.label in self.parts and runners_behind(part):
                continue
            options = RunnerOptions(
                component=part.role,
                label=part.label,
                policy=break_policy(self.config),
                key=attention_key,
                guard=state_guard(part.module),
                describe=describe_denoiser if part.role == "denoiser" else None,
            )
            try:
                made = wrap_part(part, self.config, options)
            except ConfigError as error:
                self._refuse(part, error)
                continue
            self.parts[part.label] = part
            self._watch_mutators(part.module, MODULE_MUTATORS)
            for label, runner in made.items():
                log.info("%s: %s", label, _choice(self.config, part, runner))

    def _refuse(self, part: Component, error: ConfigError) -> None:
        """The part stays eager where that is no user's mistake; otherwise raises `error`."""
        offloaded = _is_hooked_for_offload(part.module)
        if not offloaded and part.role != "text_encoder":
            raise error
        reason = Reason.OFFLOAD if offloaded else Reason.UNSUPPORTED_MODEL
        self.refused[part.label] = f"{reason}: {error}"
        log.warning("%s: eager (%s)", part.label, reason)

    def adopt(self, part: Component) -> None:
        """One more part is served; it goes with the others at `remove`."""
        self._wrap_parts([part])

    def _override_pipeline(self) -> None:
        self._override(self.target, "progress_bar", self._on_progress_bar)
        self._override(self.target, "maybe_free_model_hooks", self._on_end)
        self._watch_mutators(self.target, PIPELINE_MUTATORS)

    def _watch_mutators(self, owner: object, names: tuple[str, ...]) -> None:
        for name in names:
            if callable(getattr(type(owner), name, None)):
                self._override(owner, name, self._noticing)

    def _override(
        self,
        owner: object,
        name: str,
        make: Callable[[Callable[..., object]], Callable[..., object]],
    ) -> None:
        if isinstance(vars(owner).get(name), MethodOverride):
            return
        override = MethodOverride(owner, name, _no_acceleration)
        override.serve = make(override.original)
        override.put()
        self._overrides.append(override)

    def _noticing(self, original: Callable[..., object]) -> Callable[..., object]:
        """The method, after which every runner looks at its module again."""

        def call(*args: object, **kwargs: object) -> object:
            try:
                return original(*args, **kwargs)
            finally:
                self.notice_change()

        return call

    def notice_change(self) -> None:
        """Weights, adapters or processors may have changed."""
        for runner in self.runners.values():
            runner.mark_changed()

    def _on_progress_bar(self, original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            bar = original(*args, **kwargs)
            total = getattr(bar, "total", None)
            self.begin(int(total) if total else None)
            self._end_on_error(bar)
            return bar

        return call

    def _end_on_error(self, bar: object) -> None:
        """A loop that raises ends its request: what was checked for it must not be believed on."""
        close = getattr(bar, "close", None)
        if not callable(close):
            return

        def closing(*args: object, **kwargs: object) -> object:
            if sys.exc_info()[0] is not None:
                self.end()
            return close(*args, **kwargs)

        setattr(bar, "close", closing)  # noqa: B010

    def _on_end(self, original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            self.end()
            return original(*args, **kwargs)

        return call

    def begin(self, total_steps: int | None) -> None:
        """A request starts: the wrapped parts are still the pipeline's, still ours."""
        begin_request(total_steps)
        self._marks = {label: (id(r), r.stats.mark()) for label, r in self.runners.items()}
        try:
            self._rewrap_replaced()
        except ConfigError as error:
            log.warning("a replaced component stays eager: %s", error)

    def _rewrap_replaced(self) -> None:
        for part in _parts(self.target):
            if part.role not in self.config.components:
                continue
            known = self.parts.get(part.label)
            if known is not None and known.module is not part.module:
                take_off(known)
                del self.parts[part.label]
            if find_intercept(part.module, part.method) is None and part.label not in self.refused:
                self.parts.pop(part.label, None)
                self._wrap_parts([part])

    def end(self) -> None:
        """The request is over; one line says how it was served."""
        end_request()
        for label, runner in self.runners.items():
            mark = self._marks.get(label)
            if mark is not None and mark[0] == id(runner):
                line = runner.stats.line(mark[1])  # type: ignore[arg-type]
                if not line.startswith("0/0"):
                    kind = "cuda graph" if runner.device.type == "cuda" else "cpu recorder"
                    log.info("%s %s: %s", label, kind, line)

    def remove(self) -> None:
        """The pipeline is exactly as before; all graph memory is released."""
        end_request()
        for part in self.parts.values():
            take_off(part)
        self.parts.clear()
        for override in reversed(self._overrides):
            override.take_off()
        self._overrides.clear()


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
    """What `accelerate` installed on this pipeline or module, or None."""
    if isinstance(target, Mapping):
        found = target.get(_ATTRIBUTE)
    else:
        found = getattr(target, "__dict__", {}).get(_ATTRIBUTE)
    return found if isinstance(found, Acceleration) else None


def accelerate(target: T, config: GraphConfig | None = None, **overrides: object) -> T:
    """The same pipeline, replaying CUDA graphs of its denoiser and VAE from now on.

    `target`: a diffusers pipeline, a modular pipeline, a dict of components or one module.
    Keyword arguments override fields of `config`. Idempotent: a second call with the same config
    changes nothing, another config replaces the first. Raises `ConfigError`, with the target
    untouched, where it cannot be wrapped.
    """
    config = (config or GraphConfig()).with_overrides(**overrides)
    config.check_available()
    existing = acceleration_of(target)
    if existing is not None:
        if existing.config == config:
            return target
        restore(target)
    acceleration = Acceleration(target, config)
    acceleration.install()
    if isinstance(target, dict):
        target[_ATTRIBUTE] = acceleration
    else:
        object.__setattr__(target, _ATTRIBUTE, acceleration)
    return target


def restore(target: T) -> T:
    """The same pipeline with its original calls back and all graph memory released."""
    existing = acceleration_of(target)
    if existing is not None:
        existing.remove()
        if isinstance(target, dict):
            del target[_ATTRIBUTE]
        else:
            object.__delattr__(target, _ATTRIBUTE)
    return target


def _required(target: object) -> Acceleration:
    found = acceleration_of(target)
    if found is not None:
        return found
    if isinstance(target, nn.Module) and runner_of(target) is not None:
        return _of_wrapped_module(target)
    raise ConfigError(f"{type(target).__name__} is not accelerated: call accelerate() first")


def _of_wrapped_module(module: nn.Module) -> Acceleration:
    runner = runner_of(module)
    assert runner is not None
    view = Acceleration(module, runner.config)
    view.parts["denoiser"] = next(_parts(module))
    return view


def stats(target: object) -> dict[str, object]:
    """Counters per component and one record per graph, as plain JSON-serialisable values.

    Raises `ConfigError` where the target was never accelerated.
    """
    acceleration = _required(target)
    runners = acceleration.runners
    components = {label: runner.report() for label, runner in runners.items()}
    graphs = any(runner.holds_graphs() for runner in runners.values())
    return {
        "mode": "graphs" if graphs else "eager",
        "components": components,
        "refused": dict(acceleration.refused),
    }


def explain(target: object) -> str:
    """What ran from graphs and what did not, with each reason in words."""
    acceleration = _required(target)
    lines: list[str] = []
    for label, runner in acceleration.runners.items():
        lines.extend(_explain_runner(label, runner))
    lines.extend(f"{label}: eager. {why}" for label, why in acceleration.refused.items())
    return "\n".join(lines) or "nothing is wrapped"


def _explain_runner(label: str, runner: InstalledRunner) -> Iterator[str]:
    yield f"{label}: {runner.stats.line()} calls from graphs"
    report = runner.report()
    graphs = report["graphs"]
    assert isinstance(graphs, list)
    for graph in graphs:
        yield (
            f"  graph {graph['signature']}: {graph['backend']}, {graph['segments']} segments, "
            f"{graph['breaks']} breaks, {graph['captured_fraction']:.0%} captured, "
            f"{graph['replays']} replays, verified {graph['verified']}"
        )
    for reason, count in runner.stats.fallbacks.most_common():
        detail = runner.stats.details.get(reason, "")
        yield f"  {count} eager: {reason}: {reason.sentence}. {detail}".rstrip()
    yield from runner.explain_misses()


@contextmanager
def disabled(target: object) -> Iterator[None]:
    """Plain eager inside the block; graphs are kept for afterwards."""
    acceleration = _required(target)
    with ExitStack() as stack:
        for runner in acceleration.runners.values():
            stack.enter_context(runner.switched_off())
        yield
