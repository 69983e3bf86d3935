"""Owns what the page's fields show at first: the values a call without arguments would use.

Must never invent a default. The surprising fact: an empty number field is shown as 0 by Gradio, so
every number has its true default in it: the model folder's own, else the pipeline's signature's.
"""

from __future__ import annotations

import inspect
from typing import cast

from dit_graphs.pipelines.generate import GenerateRequest, Json

from .form import Form
from .studio import Studio

__all__ = ["start_form"]

_FALLBACK_SIDE = 512
_FALLBACK_STEPS = 20


def start_form(studio: Studio) -> Form:
    """The form of a call with a prompt and nothing else."""
    request = GenerateRequest.from_mapping(_defaults(studio))
    side = _side(studio)
    return Form(
        width=request.width or side,
        height=request.height or side,
        num_frames=request.num_frames,
        steps=request.num_inference_steps or _FALLBACK_STEPS,
        guidance=request.guidance_scale,
        strength=request.strength if request.strength is not None else 0.6,
        lora="\n".join(filter(None, map(studio.loras.line, studio.start_adapters))),
        fps=request.fps or 16,
    )


def _defaults(studio: Studio) -> dict[str, Json]:
    """Numbers of the signature, under the model folder's own."""
    found: dict[str, Json] = {}
    parameters = inspect.signature(type(studio.pipe).__call__).parameters
    for name, parameter in parameters.items():
        if name in GenerateRequest.__slots__ and isinstance(parameter.default, (int, float)):
            found[name] = parameter.default
    scale = parameters.get("true_cfg_scale")
    if scale is not None and "guidance_scale" not in found:
        found["guidance_scale"] = cast(Json, scale.default)
    own = {n: v for n, v in studio.defaults.items() if n in GenerateRequest.__slots__}
    return {**found, **cast("dict[str, Json]", own)}


def _side(studio: Studio) -> int:
    """Pixels per side that the model was made for, where the pipeline says so."""
    size = getattr(studio.pipe, "default_sample_size", None)
    scale = getattr(studio.pipe, "vae_scale_factor", None)
    side = size * scale if isinstance(size, int) and isinstance(scale, int) else _FALLBACK_SIDE
    return min(side, studio.limits.side)
