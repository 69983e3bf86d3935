"""Owns what is changed on a loaded pipeline: scheduler, adapters, VAE modes, offloading, device.

Must never go on after a half-done step. The surprising fact: diffusers only warns where LoRA
weights match nothing in the model, and then draws with the base model; here that is an error.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import diffusers
import torch
from diffusers import DiffusionPipeline

from .errors import InputError, listed
from .hub import hub_arguments, is_on_disk
from .model import ModelSpec

__all__ = ["has_ip_adapter", "set_up"]

_ADAPTER_FILES = (".safetensors", ".bin")


def set_up(pipe: DiffusionPipeline, spec: ModelSpec, device: torch.device) -> None:
    """`pipe` is on `device` (or offloaded) with everything `spec` names. Raises `InputError`."""
    if spec.scheduler is not None:
        _set_scheduler(pipe, spec.scheduler)
    _set_vae_modes(pipe, spec)
    if spec.lora:
        _load_lora(pipe, spec)
    if spec.ip_adapter is not None:
        _load_ip_adapter(pipe, spec)
    _place(pipe, spec.offload, device)


def _set_scheduler(pipe: DiffusionPipeline, name: str) -> None:
    current = getattr(pipe, "scheduler", None)
    if current is None:
        raise InputError("scheduler", f"{type(pipe).__name__} has no scheduler to replace")
    allowed = sorted(c.__name__ for c in current.compatibles)
    if name not in allowed:
        raise InputError(
            "scheduler", f"expected {listed(allowed)} for {type(pipe).__name__}, got {name!r}"
        )
    pipe.scheduler = getattr(diffusers, name).from_config(current.config)


def _set_vae_modes(pipe: DiffusionPipeline, spec: ModelSpec) -> None:
    for option, method in (("vae_tiling", "enable_tiling"), ("vae_slicing", "enable_slicing")):
        if not getattr(spec, option):
            continue
        vae = getattr(pipe, "vae", None)
        if not hasattr(vae, method):
            raise InputError(option, f"the VAE of {type(pipe).__name__} cannot do it")
        getattr(vae, method)()


def _load_lora(pipe: DiffusionPipeline, spec: ModelSpec) -> None:
    if not hasattr(pipe, "load_lora_weights"):
        raise InputError("lora", f"{type(pipe).__name__} takes no LoRA weights")
    if importlib.util.find_spec("peft") is None:
        raise InputError("lora", "the package peft is missing: pip install peft")
    names = [f"lora_{index}" for index in range(len(spec.lora))]
    for name, adapter in zip(names, spec.lora, strict=True):
        folder, weight_name = _split_place(adapter.path)
        where = hub_arguments("lora", folder)
        try:
            pipe.load_lora_weights(folder, weight_name=weight_name, adapter_name=name, **where)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            line = str(error).strip().partition("\n")[0]
            raise InputError("lora", f"{adapter.path!r} cannot be loaded: {line}") from error
        if not any(name in found for found in pipe.get_list_adapters().values()):
            raise InputError("lora", f"{adapter.path!r} holds no weights for this pipeline")
    pipe.set_adapters(names, [adapter.scale for adapter in spec.lora])


def _load_ip_adapter(pipe: DiffusionPipeline, spec: ModelSpec) -> None:
    adapter = spec.ip_adapter
    assert adapter is not None
    if not hasattr(pipe, "load_ip_adapter"):
        raise InputError("ip_adapter", f"{type(pipe).__name__} takes no IP-Adapter")
    folder, weight_name = _split_place(adapter.path)
    if weight_name is None:
        weight_name = _adapter_file(folder)
    subfolder, _, file_name = weight_name.rpartition("/")
    where = hub_arguments("ip_adapter", folder)
    try:
        pipe.load_ip_adapter(folder, subfolder=subfolder, weight_name=file_name, **where)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        line = str(error).strip().partition("\n")[0]
        raise InputError("ip_adapter", f"{adapter.path!r} cannot be loaded: {line}") from error
    pipe.set_ip_adapter_scale(adapter.scale)


def has_ip_adapter(pipe: DiffusionPipeline) -> bool:
    """Whether IP-Adapter weights act in the denoiser; each kind keeps its projection elsewhere."""
    denoiser = getattr(pipe, "unet", None) or getattr(pipe, "transformer", None)
    hidden = getattr(denoiser, "encoder_hid_proj", None)
    return hasattr(hidden, "image_projection_layers") or (
        getattr(denoiser, "image_proj", None) is not None
    )


def _adapter_file(folder: str) -> str:
    """The one weight file of an IP-Adapter's folder, relative to it; an image encoder is none."""
    if not is_on_disk(folder):
        raise InputError("ip_adapter", f"expected a weight file in it, got {folder!r}")
    inside = sorted(path for path in Path(folder).rglob("*") if path.suffix in _ADAPTER_FILES)
    files = [path for path in inside if not (path.parent / "config.json").is_file()]
    # the same weights in two formats are one choice, and .safetensors is it
    found = {path.with_suffix(""): path for path in sorted(files, key=lambda p: p.suffix)}
    names = [path.relative_to(folder).as_posix() for path in found.values()]
    if len(names) == 1:
        return names[0]
    expected = listed(f"{folder}/{name}" for name in sorted(names)) or "a folder with a weight file"
    raise InputError("ip_adapter", f"expected {expected}, got {folder!r}")


def _split_place(place: str) -> tuple[str, str | None]:
    """(folder or hub id, weight file in it or None): what diffusers' loaders want apart."""
    path = Path(place)
    if path.is_file():
        return str(path.parent), path.name
    if path.exists():
        return place, None
    owner, name, *rest = place.split("/")
    return f"{owner}/{name}", "/".join(rest) or None


def _place(pipe: DiffusionPipeline, offload: str, device: torch.device) -> None:
    if offload == "none":
        pipe.to(device)
        return
    if device.type == "cpu":
        raise InputError("offload", f"expected none where the device is cpu, got {offload!r}")
    if offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif offload == "sequential":
        pipe.enable_sequential_cpu_offload(device=device)
    else:
        pipe.enable_group_offload(
            onload_device=device, offload_type="leaf_level", use_stream=device.type == "cuda"
        )
