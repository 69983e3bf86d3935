"""Owns the loading of a pipeline from a `ModelSpec`: class, weights, device and dtype.

Must never change what the user asked for: what cannot be done is an `InputError`. The surprising
fact: the class is found from the model's index alone, so arguments are checked against its
signature before any weight is read.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import diffusers
import torch
from diffusers import DiffusionPipeline
from packaging.version import Version

from .errors import InputError, is_out_of_memory, listed
from .hub import hub_arguments
from .model import ModelSpec
from .request import Json
from .setup import set_up

__all__ = ["LoadedPipeline", "Stamp", "load_pipeline", "resolve_class", "resolve_device"]

# Path, bytes and time of change in ns of every file of some weights.
Stamp: TypeAlias = tuple[tuple[str, int, int], ...]
DEFAULTS_FILE = "dit_graphs.json"
_DENOISERS = ("transformer", "unet")
# `model.safetensors`, `model.fp16.safetensors`, `model.fp16-00001-of-00002.safetensors` and the
# older `model-00001-of-00002.fp16.safetensors`: the variant is what stands between two dots.
_WEIGHTS = re.compile(
    r"(?:diffusion_)?(?:pytorch_)?model(?:-\d+-of-\d+)?(?:\.([A-Za-z]\w*))?(?:-\d+-of-\d+)?"
    r"\.(?:safetensors|bin)"
)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedPipeline:
    """A pipeline ready to be called, and what it was made from.

    `defaults` are the call arguments a model folder asks for in its `dit_graphs.json`; `partners`
    the pipelines of other classes made on the same components; `fingerprints` what records found
    out about the weights, by place.
    """

    pipe: DiffusionPipeline
    spec: ModelSpec
    device: torch.device
    defaults: dict[str, Json] = field(default_factory=dict)
    partners: dict[type[DiffusionPipeline], LoadedPipeline] = field(
        default_factory=dict, repr=False
    )
    fingerprints: dict[str, tuple[Stamp, str]] = field(default_factory=dict, repr=False)


def load_pipeline(spec: ModelSpec) -> LoadedPipeline:
    """The pipeline of `spec`, set up and on its device. Raises `InputError` if it cannot be."""
    pipeline_class = resolve_class(spec)
    device = resolve_device(spec)
    dtype = _dtype(spec, device)
    try:
        if spec.single_file is not None:
            pipe = _from_single_file(spec, spec.single_file, pipeline_class, dtype)
        else:
            pipe = pipeline_class.from_pretrained(
                spec.model,
                **_typed(dtype),
                variant=spec.variant,
                revision=spec.revision,
                **hub_arguments("model", spec.model),
            )
    except InputError:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise _not_loaded(spec, error) from error
    except Exception as error:
        # What the user put together may not fit together: a class, or a file and its base.
        if is_out_of_memory(error) or (spec.pipeline is None and spec.single_file is None):
            raise
        raise _not_loaded(spec, error) from error
    set_up(pipe, spec, device)
    return LoadedPipeline(pipe, spec, device, call_defaults(spec, pipeline_class))


def _not_loaded(spec: ModelSpec, error: Exception) -> InputError:
    """One sentence: what does not fit together, and the variants where only the name is wrong."""
    found = _variants(Path(spec.model))
    if spec.variant not in found and found and spec.single_file is None:
        words = [name for name in found if name] + ["none"] * (None in found)
        return InputError(
            "variant",
            f"expected {listed(words)} for {spec.model!r}, got {spec.variant or 'none'!r}",
        )
    option, beside = "model", ""
    if spec.pipeline is not None:
        option, beside = "pipeline", f" as {spec.pipeline}"
    elif spec.base is not None:
        option, beside = "base", f" beside {spec.base!r}"
    return InputError(option, f"{spec.model!r} cannot be loaded{beside}: {_first_line(error)}")


def _variants(folder: Path) -> set[str | None]:
    """The variants of the weights in a model folder; None stands for weights without one."""
    names = [p.name for p in folder.glob("*/*.safetensors")]
    names += [p.name for p in folder.glob("*/*.bin")]
    matches = (_WEIGHTS.fullmatch(name) for name in names)
    return {match[1] for match in matches if match is not None}


def call_defaults(spec: ModelSpec, pipeline_class: type[DiffusionPipeline]) -> dict[str, Json]:
    """What the model folder's `dit_graphs.json` says the pipeline should be called with."""
    path = Path(spec.model) / DEFAULTS_FILE
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError("model", f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InputError("model", f"{path} must hold one JSON object")
    # A folder serves several classes (text to image, image to image): each takes what it knows.
    names = inspect.signature(pipeline_class.__call__).parameters
    return {name: value for name, value in values.items() if name in names}


def resolve_class(spec: ModelSpec) -> type[DiffusionPipeline]:
    """The pipeline class `spec` will be loaded with; reads the model's index, not its weights."""
    name = spec.pipeline or _class_name(spec)
    found = getattr(diffusers, name, None)
    if not isinstance(found, type) or not issubclass(found, DiffusionPipeline):
        option = "pipeline" if spec.pipeline else "model"
        raise InputError(option, f"diffusers {diffusers.__version__} has no pipeline {name!r}")
    return found


def resolve_device(spec: ModelSpec) -> torch.device:
    """The device `spec` runs on; one this machine lacks raises `InputError`."""
    if spec.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(spec.device)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise InputError(
                "device", f"torch sees {count} CUDA devices here, got {spec.device!r}; cpu works"
            )
    elif device.type != "cpu" and not getattr(torch, device.type).is_available():
        raise InputError("device", f"torch has no {device.type} device here; cpu works")
    return device


def _class_name(spec: ModelSpec) -> str:
    option, place, role = "model", spec.model, ""
    if spec.single_file is not None:
        place = spec.base or _default_base(spec.single_file)
        option = "base"
        role = "" if spec.base else f"the other components of {spec.model!r} come from "
    where = hub_arguments(option, place, role=role)
    try:
        index = DiffusionPipeline.load_config(place, revision=spec.revision, **where)
        return str(index["_class_name"])
    except (KeyError, TypeError, RecursionError) as error:
        raise InputError(option, f"{role}{place!r} has an index that names no pipeline") from error
    except (OSError, ValueError) as error:
        raise InputError(
            option, f"{role}{place!r} cannot be loaded: {_first_line(error)}"
        ) from error


def _default_base(path: Path) -> str:
    """The hub id whose configuration diffusers uses for this checkpoint."""
    from diffusers.loaders.single_file_utils import (
        fetch_diffusers_config,
        load_single_file_checkpoint,
    )

    try:
        weights = load_single_file_checkpoint(str(path))
    except Exception as error:  # each format's reader has errors of its own
        if is_out_of_memory(error):
            raise
        raise InputError("model", f"{str(path)!r} cannot be read: {_first_line(error)}") from error
    try:
        return str(fetch_diffusers_config(weights)[_PRETRAINED])
    except (KeyError, OSError, ValueError) as error:
        raise InputError("base", f"not known for {str(path)!r}; name a pipeline") from error


_PRETRAINED = "pretrained_model_name_or_path"


def _from_single_file(
    spec: ModelSpec, path: Path, pipeline_class: type[DiffusionPipeline], dtype: torch.dtype
) -> DiffusionPipeline:
    """A whole checkpoint, or a denoiser alone beside the base pipeline's other components."""
    base = spec.base or _default_base(path)
    where = hub_arguments("base", base)
    if path.suffix != ".gguf" and _is_whole(path):
        if not hasattr(pipeline_class, "from_single_file"):
            raise InputError("model", f"{pipeline_class.__name__} cannot be read from one file")
        return pipeline_class.from_single_file(str(path), config=base, **_typed(dtype), **where)
    index = DiffusionPipeline.load_config(base, revision=spec.revision, **where)
    name = next((n for n in _DENOISERS if n in index), "")
    model_class = getattr(diffusers, index[name][1], None) if name else None
    if model_class is None or not hasattr(model_class, "from_single_file"):
        raise InputError("model", f"the denoiser of {base!r} cannot be read from one file")
    quantized = {}
    if path.suffix == ".gguf":
        if importlib.util.find_spec("gguf") is None:
            raise InputError("model", "a .gguf file needs the package gguf: pip install gguf")
        quantized["quantization_config"] = diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
    denoiser = model_class.from_single_file(
        str(path), config=base, subfolder=name, **_typed(dtype), **quantized, **where
    )
    return pipeline_class.from_pretrained(
        base,
        **_typed(dtype),
        variant=spec.variant,
        revision=spec.revision,
        **{name: denoiser},
        **where,
    )


def _is_whole(path: Path) -> bool:
    """Whether a checkpoint holds an autoencoder beside its denoiser."""
    if path.suffix != ".safetensors":
        return True
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        return any(key.startswith(("first_stage_model.", "vae.")) for key in file.keys())  # noqa: SIM118


def _dtype(spec: ModelSpec, device: torch.device) -> torch.dtype:
    if spec.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, spec.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _typed(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The loaders' argument, which diffusers has renamed and warns about under its old name."""
    is_renamed = Version(diffusers.__version__) >= Version("0.42")
    return {"dtype" if is_renamed else "torch_dtype": dtype}


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
