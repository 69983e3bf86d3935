"""Owns the size of a picture that is changed by degrees: input pictures become width × height.

Must never change a file: the pixels are fitted in memory, and a record names the user's own file.
The surprising fact: pipelines differ. Some stretch a picture of another shape, some fail deep in
their arithmetic; after this they are all given pictures they need not touch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from diffusers import DiffusionPipeline
from PIL import Image, ImageOps

from .inputs import InputFile
from .request import GenerateRequest

__all__ = ["fitted", "is_sized_by_picture", "size_changes"]

# What must keep lying on the picture is fitted by the same rule.
_FITTED = ("image", "mask_image", "control_image")


def is_sized_by_picture(pipeline_class: type[DiffusionPipeline]) -> bool:
    """Whether what comes out has the input picture's size, and the call names none."""
    takes = inspect.signature(pipeline_class.__call__).parameters
    return {"image", "strength"} <= set(takes) and not {"height", "width"} & set(takes)


def fitted(
    pipe: DiffusionPipeline, request: GenerateRequest, inputs: Sequence[InputFile]
) -> tuple[GenerateRequest, list[InputFile]]:
    """`request` with a width and a height, and its pictures scaled and cropped to them (centre).

    Only for pipelines with an image and a strength; others are left alone. A size that is not
    given is the pipeline's default where it has one, else the first picture's own, rounded down to
    what the pipeline allows. A pipeline that takes its size from the picture gets the picture as
    it is, unless a size was asked for.
    """
    takes = inspect.signature(type(pipe).__call__).parameters
    pictures = [item.image for item in inputs if item.option == "image"]
    if not pictures or not {"image", "strength"} <= set(takes):
        return request, list(inputs)
    if is_sized_by_picture(type(pipe)) and request.width is request.height is None:
        return request, list(inputs)
    defaults = {name: takes[name].default for name in ("width", "height") if name in takes}
    request = request.with_defaults({n: v for n, v in defaults.items() if isinstance(v, int)})
    size = _size(request, pictures[0], _multiple(pipe))
    request = replace(request, width=size[0], height=size[1])
    return request, [_fit(item, size) if item.option in _FITTED else item for item in inputs]


def size_changes(before: Sequence[InputFile], after: Sequence[InputFile]) -> tuple[str, ...]:
    """`a.png 201x140 -> 128x128` for every picture whose size is another one now."""
    return tuple(
        f"{Path(old.path).name} {_words(old.image)} -> {_words(new.image)}"
        for old, new in zip(before, after, strict=True)
        if old.image.size != new.image.size
    )


def _words(picture: Image.Image) -> str:
    return f"{picture.width}x{picture.height}"


def _size(request: GenerateRequest, picture: Image.Image, multiple: int) -> tuple[int, int]:
    """(width, height): what is not given keeps the picture's shape."""
    scale = 1.0
    if request.width is not None:
        scale = request.width / picture.width
    elif request.height is not None:
        scale = request.height / picture.height

    def rounded(pixels: int) -> int:
        return max(multiple, int(pixels * scale) // multiple * multiple)

    return request.width or rounded(picture.width), request.height or rounded(picture.height)


def _multiple(pipe: DiffusionPipeline) -> int:
    """Pixels a side must be a multiple of: latents, and the patches the denoiser cuts them into."""
    processor = getattr(getattr(pipe, "image_processor", None), "config", {})
    patch = getattr(getattr(getattr(pipe, "transformer", None), "config", None), "patch_size", 1)
    patch = patch[-1] if isinstance(patch, (tuple, list)) else patch
    latent = int(getattr(pipe, "vae_scale_factor", 1))
    return math.lcm(int(processor.get("vae_scale_factor", 1)), latent * int(patch or 1))


def _fit(item: InputFile, size: tuple[int, int]) -> InputFile:
    if item.image.size == size:
        return item
    return replace(item, image=ImageOps.fit(item.image, size, Image.Resampling.LANCZOS))
