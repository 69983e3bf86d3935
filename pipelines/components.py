"""Owns which parts of a pipeline can be replayed and how each is reached.

Must never know graphs. The surprising fact: pipelines call denoisers as modules but VAEs through
`vae.decode(...)`, which never passes `Module.__call__`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from dit_graphs.errors import ConfigError
from dit_graphs.signature import Signature

__all__ = ["LATENT_NAMES", "Component", "components_of", "describe_denoiser", "parts_of"]

Role = Literal["denoiser", "vae", "text_encoder"]

_DENOISER_CLASS_ENDINGS = (
    "Transformer1DModel",
    "Transformer2DModel",
    "Transformer3DModel",
    "TransformerModel",
    "DiTModel",
    "DiT2DModel",
    "UNet2DConditionModel",
    "UNet2DModel",
    "UNet3DConditionModel",
    "UNetMotionModel",
    "UNetSpatioTemporalConditionModel",
    "ControlNetModel",
    "PriorTransformer",
    "UNet",
    "Transformer",
)
_AUTOENCODER_NAMES = ("vae", "vqvae", "vqgan", "movq")
_DENOISER_NAMES = ("transformer", "unet", "controlnet", "prior", "decoder", "dit", "denoiser")


@dataclass(frozen=True, slots=True)
class Component:
    """One wrapped method: `name` is the pipeline's attribute, `label` what stats call it."""

    role: Role
    name: str
    label: str
    module: nn.Module
    method: str


def components_of(parts: Mapping[str, object]) -> Iterator[Component]:
    """The denoisers, VAE methods and text models among a pipeline's parts, most important first."""
    seen: set[int] = set()
    denoisers = 0
    for name, part in parts.items():
        if isinstance(part, nn.Module) and id(part) not in seen and _is_denoiser(name, part):
            seen.add(id(part))
            label = "denoiser" if denoisers == 0 else f"denoiser:{name}"
            denoisers += 1
            yield Component("denoiser", name, label, part, "forward")
    for name, part in parts.items():
        if not _is_autoencoder(name, part):
            continue
        for method in ("decode", "encode"):
            if isinstance(part, nn.Module) and callable(getattr(type(part), method, None)):
                label = "vae" if method == "decode" and name == "vae" else f"vae:{name}.{method}"
                yield Component("vae", name, label, part, method)
    yield from _text_models(parts)


def _text_models(parts: Mapping[str, object]) -> Iterator[Component]:
    """Encoders of prompts, and language models with a `generate` of their own."""
    seen: set[int] = set()
    writers = 0
    for name, part in parts.items():
        if not isinstance(part, nn.Module) or id(part) in seen:
            continue
        if "text_encoder" in name:
            seen.add(id(part))
            yield Component("text_encoder", name, name, part, "forward")
        can_write = getattr(part, "can_generate", None)
        if callable(getattr(type(part), "generate", None)) and callable(can_write) and can_write():
            seen.add(id(part))
            label = "decode" if writers == 0 else f"decode:{name}"
            writers += 1
            yield Component("text_encoder", name, label, part, "generate")


def _is_autoencoder(name: str, part: object) -> bool:
    """By what pipelines call it, or by where diffusers keeps its class (`sound_tokenizer`)."""
    home = type(part).__module__
    return name.split("_")[-1] in _AUTOENCODER_NAMES or home.startswith("diffusers.models.autoenc")


def _is_denoiser(name: str, module: nn.Module) -> bool:
    if "encoder" in name or name.endswith("vae"):
        return False
    kind = type(module).__name__
    named = any(name.startswith(word) for word in _DENOISER_NAMES)
    return kind.endswith(_DENOISER_CLASS_ENDINGS) or (named and hasattr(module, "config"))


def parts_of(target: object) -> Mapping[str, object]:
    """The named parts of a pipeline, a modular pipeline or a dict of components.

    Raises `ConfigError` for anything else.
    """
    if isinstance(target, Mapping):
        return target
    parts = getattr(target, "components", None)
    if isinstance(parts, Mapping):
        return parts
    raise ConfigError(
        f"expected a diffusers pipeline, a dict of components or a module, got "
        f"{type(target).__name__}"
    )


def describe_denoiser(signature: Signature) -> str:
    """A denoiser call as a user thinks of it; latent sizes, since the pixel factor varies."""
    shapes = {
        name: tuple(spec.shape)
        for name, spec in zip(_tensor_names(signature), signature.tensors, strict=False)
    }
    latent = next((s for n, s in shapes.items() if n.split("[")[0] in LATENT_NAMES), None)
    if latent is None:
        return signature.describe()
    text = next((s for n, s in shapes.items() if n.split("[")[0] in _TEXT_NAMES), None)
    words = [_size_words(latent)]
    batch = latent[0] if len(latent) in (3, 4) else 1
    lists = sum(1 for n in shapes if n.startswith("x["))
    batch = lists or batch
    words.append(f"batch {batch}")
    if text is not None:
        words.append(f"prompt {text[-2] if len(text) > 1 else text[-1]} tokens")
    dtype = next(spec.dtype for spec in signature.tensors)
    words.append(str(dtype).removeprefix("torch."))
    return ", ".join(words)


LATENT_NAMES = ("hidden_states", "sample", "x", "latent_model_input", "z")
_TEXT_NAMES = ("encoder_hidden_states", "cap_feats", "prompt_embeds")


def _size_words(shape: tuple[int, ...]) -> str:
    if len(shape) == 5:
        frames = shape[2]
        return f"latent {shape[3]}×{shape[4]}, {frames} latent frame{'s' if frames > 1 else ''}"
    if len(shape) == 4:
        return f"latent {shape[2]}×{shape[3]}"
    if len(shape) == 3:
        return f"{shape[1]} image tokens"
    return "×".join(map(str, shape))


def _tensor_names(signature: Signature) -> list[str]:
    names: list[str] = []
    _walk(signature.structure, "", names)
    return names


def _walk(node: object, path: str, names: list[str]) -> None:
    if node is torch.Tensor:
        names.append(path)
    elif isinstance(node, tuple) and len(node) == 2 and isinstance(node[0], type):
        kind, value = node
        if issubclass(kind, Mapping):
            for key, child in value:
                _walk(child, f"{path}.{key}" if path else str(key), names)
        elif issubclass(kind, (tuple, list)) and isinstance(value, tuple):
            for index, child in enumerate(value):
                _walk(child, f"{path}[{index}]", names)
