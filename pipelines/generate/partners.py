"""Owns which class serves a request: the model's own, or the partner that starts from a picture.

Must never name a model: diffusers' own auto-pipeline tables know which classes share components.
The surprising fact: those tables are kept by model family, so a text pipeline, its image-to-image
class and its inpaint class are three entries under one key.
"""

from __future__ import annotations

import inspect
from typing import Literal, TypeAlias

from diffusers import DiffusionPipeline
from diffusers.pipelines.auto_pipeline import (
    AUTO_IMAGE2IMAGE_PIPELINES_MAPPING,
    AUTO_INPAINT_PIPELINES_MAPPING,
    AUTO_TEXT2IMAGE_PIPELINES_MAPPING,
)

from .request import GenerateRequest

__all__ = ["Start", "calls_control_image", "partner_class", "serving_class"]

# What a picture is drawn from: words, a picture, or the masked part of one.
Start: TypeAlias = Literal["text", "image", "mask"]
_TABLES = {
    "text": AUTO_TEXT2IMAGE_PIPELINES_MAPPING,
    "image": AUTO_IMAGE2IMAGE_PIPELINES_MAPPING,
    "mask": AUTO_INPAINT_PIPELINES_MAPPING,
}


def partner_class(
    pipeline_class: type[DiffusionPipeline], start: Start
) -> type[DiffusionPipeline] | None:
    """The class that shares this one's components and starts from `start`, None where none does."""
    for source, table in _TABLES.items():
        for family, known in table.items():
            found = _TABLES[start].get(family)
            if source == start or known is not pipeline_class or found is None:
                continue
            if found is not pipeline_class and _starts_from(found, start):
                return found  # type: ignore[no-any-return]
    return None


def serving_class(
    pipeline_class: type[DiffusionPipeline], request: GenerateRequest
) -> type[DiffusionPipeline]:
    """The class `request` needs: `pipeline_class`, or its partner for a picture it cannot take."""
    takes = inspect.signature(pipeline_class.__call__).parameters
    needs = {"image"} | ({"mask_image"} if request.mask_image is not None else set())
    is_taken = request.control_image is not None and calls_control_image(pipeline_class) == "image"
    if not request.image or (needs <= set(takes) and not is_taken):
        return pipeline_class
    start: Start = "image" if request.mask_image is None else "mask"
    return partner_class(pipeline_class, start) or pipeline_class


def calls_control_image(pipeline_class: type[DiffusionPipeline]) -> str:
    """The argument a control picture is: `image` where the ControlNet alone looks at a picture."""
    takes = set(inspect.signature(pipeline_class.__call__).parameters)
    parts = inspect.signature(pipeline_class.__init__).parameters
    is_image = "controlnet" in parts and "image" in takes
    return "image" if is_image and not {"control_image", "strength"} & takes else "control_image"


def _starts_from(pipeline_class: type[DiffusionPipeline], start: Start) -> bool:
    """A strength means a picture changed by degrees; an edit of a picture has none."""
    takes = inspect.signature(pipeline_class.__call__).parameters
    if start == "text":
        return "strength" not in takes
    return "strength" in takes and ("mask_image" in takes) == (start == "mask")
