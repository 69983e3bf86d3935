"""Owns `GraphConfig`, every choice a user has; validated when built, immutable afterwards.

Must never know torch. The surprising fact: the command line is generated from this dataclass,
so a field's name, choices and help text live here and nowhere else.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, cast, get_args

from .errors import ConfigError

__all__ = ["BackendName", "GraphConfig"]

BackendName = Literal["auto", "full", "breakable", "debug", "recorded", "off"]
Numerics = Literal["exact", "fused"]
CapturePolicy = Literal["second_use", "first_use", "warmup_only"]
AttentionPolicy = Literal["auto", "captured", "eager"]
ComponentName = Literal["denoiser", "vae", "text_encoder"]

_PATHS = ("denoiser", "vae", "text_encoder", "prefill", "decode")
_SWITCH = ("on", "off")
RENAMED: dict[str, str] = {}  # old field name -> new field name


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig:
    """How graphs are captured, kept and checked. Raises `ConfigError` on a wrong value."""

    backend: BackendName | Mapping[str, BackendName] = field(
        default="auto",
        metadata=_help(
            "how a forward is segmented: auto, full (one graph), breakable (segments with eager "
            "breaks), debug (same path, no graph), recorded (CPU recorder), off; or a mapping "
            "per component or LLM phase"
        ),
    )
    numerics: Numerics = field(
        default="exact",
        metadata=_help(
            "exact: eager's own kernels and bits; fused (compiled blocks) is not in this version"
        ),
    )
    capture: CapturePolicy = field(
        default="second_use",
        metadata=_help("when a signature is captured: second_use, first_use or warmup_only"),
    )
    attention: AttentionPolicy = field(
        default="auto",
        metadata=_help(
            "auto: break at dynamic attention only; captured: never break for attention; "
            "eager: break at every attention call"
        ),
    )
    components: tuple[ComponentName, ...] = field(
        default=("denoiser", "vae", "text_encoder"),
        metadata=_help("which components get graphs"),
    )
    verify: bool | Literal["always"] = field(
        default=True,
        metadata=_help("compare each new graph with eager, bit for bit, before it is trusted"),
    )
    memory_budget: int | Literal["auto"] | Mapping[str, int] = field(
        default="auto",
        metadata=_help("bytes graphs may hold on the device, or auto"),
    )
    max_graphs: int = field(default=16, metadata=_help("graphs kept per component"))
    prompt_buckets: tuple[int, ...] | None = field(
        default=None,
        metadata=_help("ladder of prompt lengths to pad to (changes bits; opt-in)"),
    )
    max_size: Mapping[str, int] | None = field(
        default=None,
        metadata=_help("largest LLM bucket per phase, for example decode=32, prefill=1024"),
    )
    strict: bool = field(default=False, metadata=_help("raise instead of falling back to eager"))
    manifest: str | None = field(
        default=None,
        metadata=_help("not in this version: a file that remembers signatures between processes"),
    )

    def __post_init__(self) -> None:
        _check_backend(self.backend)
        _check_choice("numerics", self.numerics, get_args(Numerics))
        _check_choice("capture", self.capture, get_args(CapturePolicy))
        _check_choice("attention", self.attention, get_args(AttentionPolicy))
        _check_choice("verify", self.verify, (True, False, "always"))
        _check_components(self)
        _check_budget(self.memory_budget)
        _check_positive("max_graphs", self.max_graphs)
        _check_ladder(self)
        _check_max_size(self.max_size)
        _check_choice("strict", self.strict, (True, False))
        if self.manifest is not None and not isinstance(self.manifest, (str, os.PathLike)):
            raise ConfigError(f"manifest: expected a path or None, got {self.manifest!r}")
        for name in ("backend", "memory_budget", "max_size"):
            if isinstance(given := getattr(self, name), Mapping):  # the caller may change it
                object.__setattr__(self, name, dict(given))

    @staticmethod
    def is_switched_off() -> bool:
        """Whether DIT_GRAPHS=off is set in the environment now."""
        # asked in every call; looking for what is not there would raise and catch an error
        return "DIT_GRAPHS" in os.environ and os.environ["DIT_GRAPHS"].lower() == "off"

    def backend_for(self, path: str) -> BackendName:
        """The backend of one component or LLM phase; DIT_GRAPHS_BACKEND overrides it."""
        override = os.environ.get("DIT_GRAPHS_BACKEND")
        if override:
            _check_choice("DIT_GRAPHS_BACKEND", override, get_args(BackendName))
            return cast(BackendName, override)
        if isinstance(self.backend, str):
            return self.backend
        return self.backend.get(path, "auto")

    def budget_for(self, path: str) -> int | Literal["auto"]:
        """The memory budget in bytes of one component, or "auto"."""
        if isinstance(self.memory_budget, Mapping):
            return self.memory_budget.get(path, "auto")
        return self.memory_budget

    def check_available(self) -> None:
        """Raises `ConfigError` for what would be ignored: a value this version knows but does not
        honour, a word in the environment that is none.
        """
        _check_choice("DIT_GRAPHS", os.environ.get("DIT_GRAPHS", "").lower() or "on", _SWITCH)
        self.backend_for("denoiser")
        if self.numerics == "fused":
            raise ConfigError(
                'numerics="fused" (compiled blocks in graphs) is not available in this version: '
                "leave numerics out for eager's own kernels and bits. A model that you compile "
                "yourself keeps running as compiled, without graphs"
            )
        if self.manifest is not None:
            raise ConfigError(
                "manifest is not available in this version: leave it out. For graphs before the "
                "first request call warmup(pipe, [...]) at start, with the sizes you serve"
            )

    @classmethod
    def chosen(cls, config: object, overrides: Mapping[str, object]) -> GraphConfig:
        """`config` (None: the defaults) with `overrides`. Raises `ConfigError` for another type."""
        if config is not None and not isinstance(config, cls):
            raise ConfigError(
                f"config: expected a GraphConfig or None, got {config!r}: write GraphConfig(...), "
                'or give fields by name, as in backend="full"'
            )
        return (config or cls()).with_overrides(**overrides)

    def with_overrides(self, **overrides: object) -> GraphConfig:
        """A copy with the given fields; an unknown name raises `ConfigError` with the list."""
        known = {f.name for f in fields(self)}
        named: dict[str, object] = {}
        for name, value in overrides.items():
            if name in RENAMED:
                warnings.warn(
                    f"{name} is now called {RENAMED[name]}", DeprecationWarning, stacklevel=3
                )
                name = RENAMED[name]
            if name not in known:
                raise ConfigError(f"GraphConfig has no field {name!r}; it has {sorted(known)}")
            named[name] = value
        return replace(self, **named)  # type: ignore[arg-type]


def _check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    # identity for bools: 1 == True must not pass for True; == of arrays is no bool
    if not any(value is item or (isinstance(value, str) and value == item) for item in allowed):
        raise ConfigError(f"{name}: expected one of {list(allowed)}, got {value!r}")


def _check_backend(value: object) -> None:
    names = get_args(BackendName)
    if isinstance(value, Mapping):
        for path, name in value.items():
            _check_choice("backend: mapping key", path, _PATHS)
            _check_choice(f"backend[{path!r}]", name, names)
        return
    _check_choice("backend", value, names)


def _check_components(config: GraphConfig) -> None:
    value: object = config.components
    if isinstance(value, str) or not isinstance(value, (tuple, list)):
        raise ConfigError(f"components: expected a tuple of names, got {value!r}")
    if not value:
        raise ConfigError('components: expected one name at least; backend="off" turns graphs off')
    for name in value:
        _check_choice("components", name, get_args(ComponentName))
    object.__setattr__(config, "components", tuple(value))


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}: expected a whole number ≥ 1, got {value!r}")


def _check_budget(value: object) -> None:
    if isinstance(value, Mapping):
        for path, item in value.items():
            _check_choice("memory_budget: mapping key", path, _PATHS)
            _check_bytes(f"memory_budget[{path!r}]", item)
        return
    _check_bytes("memory_budget", value)


def _check_bytes(name: str, value: object) -> None:
    if isinstance(value, str) and value == "auto":
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f'{name}: expected bytes ≥ 0 or "auto", got {value!r}')


def _check_ladder(config: GraphConfig) -> None:
    value: object = config.prompt_buckets
    if value is None:
        return
    if not isinstance(value, (tuple, list)) or not value:
        raise ConfigError(f"prompt_buckets: expected a ladder of lengths, got {value!r}")
    for item in value:
        _check_positive("prompt_buckets", item)
    if list(value) != sorted(set(value)):
        raise ConfigError(f"prompt_buckets: lengths must rise, got {value!r}")
    object.__setattr__(config, "prompt_buckets", tuple(value))


def _check_max_size(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise ConfigError(f"max_size: expected a mapping per LLM phase, got {value!r}")
    for phase, size in value.items():
        _check_choice("max_size: phase", phase, ("decode", "prefill"))
        _check_positive(f"max_size[{phase!r}]", size)
