"""Owns the shape of an input picture: what is changed by degrees has the size that was asked for.

Must never change an upload: the fitted picture is a file beside it, so that a record can name it.
The surprising fact: pipelines differ. Some stretch a picture of another shape, some fail deep in
their arithmetic; after this they are all given pictures they need not touch.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from pathlib import Path

from diffusers import DiffusionPipeline
from PIL import Image, ImageOps

from dit_graphs.pipelines.generate import GenerateRequest, InputError, accepted_names

__all__ = ["fitted"]


def fitted(pipeline_class: type[DiffusionPipeline], request: GenerateRequest) -> GenerateRequest:
    """`request` with input pictures of its own width and height, scaled and cropped at the centre.

    Only for pipelines with a strength and a size. Raises `InputError` for an unreadable picture.
    """
    size = (request.width, request.height)
    if not {"strength", "width", "height"} <= set(accepted_names(pipeline_class)):
        return request
    if size[0] is None or size[1] is None:
        return request
    paths = tuple(str(_fitted_file(Path(path), (size[0], size[1]))) for path in request.image)
    return replace(request, image=paths)


def _fitted_file(path: Path, size: tuple[int, int]) -> Path:
    try:
        with Image.open(path) as opened:
            picture = ImageOps.exif_transpose(opened).convert("RGB")
    except OSError as error:
        raise InputError("image", "expected a picture that can be read") from error
    if picture.size == size:
        return path
    target = path.with_name(f"{path.stem}-{size[0]}x{size[1]}.png")
    if not target.exists():
        part = target.with_name(f"{secrets.token_hex(8)}.png")
        ImageOps.fit(picture, size, Image.Resampling.LANCZOS).save(part)
        os.replace(part, target)
    return target
