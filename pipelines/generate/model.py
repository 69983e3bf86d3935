"""Owns which weights are used and how they are set up: `ModelSpec`, checked when it is built.

Must never import torch or diffusers: a wrong word must be refused before seconds are spent on
loading them. The surprising fact: what only exists on this disk (LoRA and model files) is looked
for here too, so that a missing file is an error before anything is generated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from .errors import InputError, listed
from .request import Json, described

__all__ = ["Adapter", "ModelSpec"]

DTYPES = ("auto", "float32", "float16", "bfloat16")
OFFLOADS = ("none", "model", "sequential", "group")
SINGLE_FILES = (".safetensors", ".gguf", ".ckpt")
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_DEVICE = re.compile(r"auto|cpu|mps|xpu|cuda(:(0|[1-9]\d?))?")


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA or IP-Adapter weights and how strongly they act."""

    path: str
    scale: float = 1.0

    @classmethod
    def parse(cls, option: str, text: str) -> Adapter:
        """`PATH` or `PATH:SCALE`; a colon inside a path is kept."""
        path, colon, scale = text.rpartition(":")
        if not colon:
            scale = "1"
            path = text
        if not path:
            raise InputError(option, f"expected PATH:SCALE, got {text!r}")
        try:
            return cls(path, float(scale))
        except ValueError:
            if Path(text).exists() or scale.startswith(("\\", "/")):
                return cls(text)
        raise InputError(option, f"expected PATH:SCALE with a number as SCALE, got {text!r}")

    def __str__(self) -> str:
        return f"{self.path}:{self.scale:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Which pipeline is loaded and with what. Raises `InputError` on a wrong value."""

    model: str = field(
        metadata=described(
            "folder, hub id, or a .safetensors or .gguf file (default: the bundled model)",
            "PATH_OR_ID",
        )
    )
    pipeline: str | None = field(
        default=None,
        metadata=described("pipeline class, where the model's own is not wanted", "CLASS"),
    )
    base: str | None = field(
        default=None,
        metadata=described("where a single file's other components come from", "PATH_OR_ID"),
    )
    variant: str | None = field(
        default=None, metadata=described("weight variant, for example fp16")
    )
    revision: str | None = field(
        default=None, metadata=described("branch, tag or commit of a hub id")
    )
    dtype: str = field(
        default="auto", metadata=described(f"dtype of the weights: {listed(DTYPES)}", "DTYPE")
    )
    device: str = field(
        default="auto",
        metadata=described("where it runs: auto, cpu, cuda, cuda:N, mps or xpu", "DEVICE"),
    )
    lora: tuple[Adapter, ...] = field(
        default=(), metadata=described("LoRA weights; may be given several times", "PATH:SCALE")
    )
    ip_adapter: Adapter | None = field(
        default=None, metadata=described("IP-Adapter weights", "PATH:SCALE")
    )
    scheduler: str | None = field(
        default=None, metadata=described("scheduler class, one the model's own can become", "CLASS")
    )
    offload: str = field(
        default="none",
        metadata=described(f"keep weights on the host: {listed(OFFLOADS)}", "MODE"),
    )
    vae_tiling: bool = field(default=False, metadata=described("decode in tiles: less memory"))
    vae_slicing: bool = field(default=False, metadata=described("decode one by one: less memory"))

    def __post_init__(self) -> None:
        for item in fields(self):
            _check_type(item.name, str(item.type), getattr(self, item.name))
        _check_word("dtype", self.dtype, DTYPES)
        _check_word("offload", self.offload, OFFLOADS)
        if not _DEVICE.fullmatch(self.device):
            raise InputError(
                "device", f"expected auto, cpu, cuda, cuda:N, mps or xpu, got {self.device!r}"
            )
        _check_place("model", self.model)
        if self.base is not None:
            _check_place("base", self.base)
        if self.revision is not None and Path(self.model).exists() and not self._is_base_remote:
            raise InputError("revision", f"expected a hub id as model, and {self.model!r} is here")
        for adapter in self.lora:
            _check_adapter("lora", adapter)
        if self.ip_adapter is not None:
            _check_adapter("ip_adapter", self.ip_adapter)

    @property
    def _is_base_remote(self) -> bool:
        """Whether a file's other components come from a hub, which has revisions."""
        return self.single_file is not None and not (self.base and Path(self.base).exists())

    @property
    def single_file(self) -> Path | None:
        """The checkpoint file, where the model is one file rather than a folder."""
        path = Path(self.model)
        return path if path.suffix in SINGLE_FILES else None

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> ModelSpec:
        """The spec of one record; an unknown key raises `InputError` with the list."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise InputError(name, f"no such key; a model has {', '.join(known)}")
        given = dict(values)
        lora, ip_adapter = given.pop("lora", []), given.pop("ip_adapter", None)
        if not isinstance(lora, (list, tuple)):
            raise InputError("lora", f"expected a list of PATH:SCALE, got {lora!r}")
        return cls(
            lora=tuple(Adapter.parse("lora", str(text)) for text in lora),
            ip_adapter=None if ip_adapter is None else Adapter.parse("ip_adapter", str(ip_adapter)),
            **given,  # type: ignore[arg-type]
        )

    def to_mapping(self) -> dict[str, Json]:
        """The fields that were given, as plain JSON; local paths absolute."""
        values: dict[str, Json] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if value == item.default:
                continue
            if item.name == "lora":
                value = [f"{_absolute(a.path)}:{a.scale!r}" for a in self.lora]
            elif isinstance(value, Adapter):
                value = f"{_absolute(value.path)}:{value.scale!r}"
            elif item.name in ("model", "base"):
                value = _absolute(value)
            values[item.name] = value
        return values


def _absolute(path: str) -> str:
    return str(Path(path).resolve()) if Path(path).exists() else path


def _check_type(name: str, hint: str, value: object) -> None:
    """Text and switches, as a record or a script may have them wrong."""
    is_text = isinstance(value, str) or (value is None and hint.endswith("| None"))
    if hint in ("str", "str | None") and not is_text:
        raise InputError(name, f"expected text, got {value!r}")
    if hint == "bool" and not isinstance(value, bool):
        raise InputError(name, f"expected true or false, got {value!r}")


def _check_word(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(name, f"expected {listed(allowed)}, got {value!r}")


def _check_place(name: str, place: str) -> None:
    path = Path(place)
    if path.is_file():
        if path.suffix not in SINGLE_FILES:
            raise InputError(name, f"expected a {listed(SINGLE_FILES)} file, got {place!r}")
    elif path.is_dir():
        if not (path / "model_index.json").is_file():
            raise InputError(name, f"{place!r} holds no model_index.json: not a diffusers model")
    elif path.suffix in SINGLE_FILES or not _HUB_ID.fullmatch(place):
        raise InputError(name, f"no such folder or file, and no hub id (owner/name): {place!r}")


def _check_adapter(name: str, adapter: Adapter) -> None:
    """A path on this disk, or `owner/name[/folder/file]` of the hub; and a finite SCALE."""
    place = adapter.path
    if not math.isfinite(adapter.scale):
        raise InputError(name, f"expected a finite number as SCALE, got {str(adapter)!r}")
    if Path(place).exists():
        return
    parts = place.split("/")
    local = len(parts) < 3 and Path(place).suffix in (*SINGLE_FILES, ".bin", ".pt")
    if place.startswith(("/", ".", "~")) or local or not _HUB_ID.fullmatch("/".join(parts[:2])):
        raise InputError(name, f"no such file or folder, and no hub id (owner/name): {place!r}")
