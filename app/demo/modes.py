"""Owns what a loaded model can be asked for: text to image, image to image, edit, video.

Must never name a model. The surprising fact: a pipeline's own signature says it all. A strength
means that a picture is changed by degrees, a number of frames means a video, and a picture without
either means an edit; diffusers' own table knows which class is a text pipeline's image partner.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from enum import Enum

from diffusers import DiffusionPipeline

from dit_graphs.pipelines.generate import accepted_names, partner_class

__all__ = ["Mode", "ModePlan", "plans_of"]


class Mode(Enum):
    """What the user starts from and wants; the value is what links and tests say."""

    TEXT = "text"
    IMAGE = "image"
    EDIT = "edit"
    VIDEO = "video"

    @property
    def title(self) -> str:
        """The tab's label."""
        return _TITLES[self]


_TITLES = {
    Mode.TEXT: "Text to image",
    Mode.IMAGE: "Image to image",
    Mode.EDIT: "Edit",
    Mode.VIDEO: "Video",
}


@dataclass(frozen=True, slots=True)
class ModePlan:
    """A mode, the class that serves it, and which arguments that class takes."""

    mode: Mode
    pipeline_class: type[DiffusionPipeline]
    takes: frozenset[str]
    needs_image: bool = False

    @property
    def takes_image(self) -> bool:
        """Whether a picture can be given at all."""
        return self.mode is not Mode.TEXT and "image" in self.takes

    @property
    def needs_mask(self) -> bool:
        """Whether a second picture must say which part is drawn anew."""
        return self.mode is Mode.IMAGE and "mask_image" in self.takes


def plans_of(pipeline_class: type[DiffusionPipeline]) -> tuple[ModePlan, ...]:
    """Every mode the model can serve, the natural one first."""
    takes = frozenset(accepted_names(pipeline_class))
    if "num_frames" in takes:
        return (ModePlan(Mode.VIDEO, pipeline_class, takes, _requires_image(pipeline_class)),)
    if "image" in takes and "strength" in takes:
        own = ModePlan(Mode.IMAGE, pipeline_class, takes, needs_image=True)
        partner = partner_class(pipeline_class, "text")
        return (own, _text(partner)) if partner is not None else (own,)
    if "image" in takes:
        edit = ModePlan(Mode.EDIT, pipeline_class, takes, needs_image=True)
        return (edit,) if _requires_image(pipeline_class) else (_text(pipeline_class), edit)
    partner = partner_class(pipeline_class, "image")
    if partner is None:
        return (_text(pipeline_class),)
    accepted = frozenset(accepted_names(partner))
    image = ModePlan(Mode.IMAGE, partner, accepted, needs_image=True)
    return (_text(pipeline_class), image)


def _text(pipeline_class: type[DiffusionPipeline]) -> ModePlan:
    return ModePlan(Mode.TEXT, pipeline_class, frozenset(accepted_names(pipeline_class)))


def _requires_image(pipeline_class: type[DiffusionPipeline]) -> bool:
    """By the signature, or by the name where every argument has a default."""
    image = inspect.signature(pipeline_class.__call__).parameters.get("image")
    if image is None:
        return False
    has_default = image.default is not inspect.Parameter.empty
    return not has_default or "Edit" in pipeline_class.__name__
