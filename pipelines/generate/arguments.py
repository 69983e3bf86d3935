"""Owns the way from a request to the keyword arguments of one pipeline's `__call__`.

Must never drop an argument: what the pipeline's signature does not name is an `InputError` that
lists what it does. The surprising fact: `guidance_scale` means two things. In guidance-distilled
models it feeds an embedding; where a pipeline has `true_cfg_scale` and its denoiser no such
embedding, the user's guidance goes there. A control picture, too, has two names: where a pipeline
with a ControlNet calls it `image`, `control_image` reaches that.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy

from diffusers import DiffusionPipeline

from .errors import InputError
from .fitting import is_sized_by_picture
from .inputs import InputFile
from .partners import calls_control_image, partner_class
from .request import IMAGE_OPTIONS, GenerateRequest, Json

__all__ = [
    "accepted_names",
    "call_arguments",
    "check_names",
    "check_reference",
    "guidance_note",
]

# What a request cannot carry as JSON, or what would make the answer something else than pictures.
_RESERVED = {
    "self",
    "args",
    "kwargs",
    "generator",
    "latents",
    "output_type",
    "return_dict",
    "callback",
    "callback_steps",
    "callback_on_step_end",
    "callback_on_step_end_tensor_inputs",
    "num_images_per_prompt",
    "num_videos_per_prompt",
    "batch_size",
}
# An argument that only pipelines of videos have.
_VIDEO = {"num_frames", "video_length", "video", "frames"}
_NOT_ARGUMENTS = {"seed", "num_images", "fps", "set"}


def accepted_names(pipeline_class: type[DiffusionPipeline]) -> tuple[str, ...]:
    """The arguments of the pipeline's `__call__` that a request may set, sorted."""
    names = inspect.signature(pipeline_class.__call__).parameters
    return tuple(
        sorted(n for n in names if n not in _RESERVED and not n.endswith(("_embeds", "_mask")))
    )


def check_names(pipeline_class: type[DiffusionPipeline], request: GenerateRequest) -> None:
    """Raise `InputError` for the first thing asked that the pipeline does not take."""
    accepted = accepted_names(pipeline_class)
    others = _other_names(pipeline_class)
    for name in _asked(request):
        if name not in accepted and name not in others:
            raise InputError(name, _refusal(pipeline_class, name, request))
    for name in request.set:
        if name not in accepted:
            raise InputError(
                "set",
                f"{pipeline_class.__name__} does not take {name!r}; it takes {', '.join(accepted)}",
            )
        if name in _asked(request):
            raise InputError("set", f"{name!r} was given twice; {name} has an option of its own")
    parameters = inspect.signature(pipeline_class.__call__).parameters
    if request.fps is not None and not _VIDEO & set(parameters):
        raise InputError("fps", f"{pipeline_class.__name__} makes no video")
    for name in ("image", "mask_image"):
        is_needed = "strength" in accepted and not _VIDEO & set(parameters)
        if is_needed and name in accepted and not getattr(request, name):
            raise InputError(name, f"{pipeline_class.__name__} needs one")
    if "strength" in accepted and len(request.image) > 1:
        raise InputError(
            "image", f"{pipeline_class.__name__} starts from one picture, got {len(request.image)}"
        )
    if calls_control_image(pipeline_class) == "image" and request.image and request.control_image:
        raise InputError("control_image", f"{pipeline_class.__name__} takes it or an image")
    prompt = parameters.get("prompt")
    if prompt is not None and request.prompt is None and not _has_other_subject(request, accepted):
        raise InputError("prompt", f"{pipeline_class.__name__} needs a prompt")
    # Beside a picture no words are a choice; alone they are a shell variable that was not set.
    is_alone = not any(getattr(request, name) for name in IMAGE_OPTIONS)
    if request.prompt is not None and not request.prompt.strip() and is_alone:
        raise InputError("prompt", f"expected words, got {request.prompt!r}")


def check_reference(
    pipeline_class: type[DiffusionPipeline], request: GenerateRequest, *, has_adapter: bool
) -> None:
    """Raise `InputError` where an IP-Adapter and its reference picture are not given together."""
    if "ip_adapter_image" not in accepted_names(pipeline_class):
        return
    if has_adapter and request.ip_adapter_image is None:
        raise InputError("ip_adapter_image", "an IP-Adapter needs one")
    if request.ip_adapter_image is not None and not has_adapter:
        raise InputError("ip_adapter", "a reference picture needs one")


def _other_names(pipeline_class: type[DiffusionPipeline]) -> set[str]:
    """Fields that reach the pipeline although its signature has not their name."""
    names = {"guidance_scale"} if "true_cfg_scale" in accepted_names(pipeline_class) else set()
    if is_sized_by_picture(pipeline_class):
        names |= {"height", "width"}
    return names | ({"control_image"} if calls_control_image(pipeline_class) == "image" else set())


def _refusal(pipeline_class: type[DiffusionPipeline], name: str, request: GenerateRequest) -> str:
    """What the pipeline takes, and which class of the same components takes `name`."""
    accepted = ", ".join(accepted_names(pipeline_class))
    sentence = f"{pipeline_class.__name__} does not take it; it takes {accepted}"
    partner = partner_class(pipeline_class, "mask" if name == "mask_image" else "image")
    if partner is None or name not in accepted_names(partner):
        return sentence
    where = "takes it" if request.image else "takes it beside an image"
    return f"{sentence}; {partner.__name__} {where}"


def call_arguments(
    pipe: DiffusionPipeline, request: GenerateRequest, inputs: Sequence[InputFile] = ()
) -> dict[str, object]:
    """Fresh keyword arguments for one call of `pipe`; the generator is not among them.

    Raises `InputError` for anything the pipeline does not take. Values are copies: pipelines pop
    keys from dictionaries they are given.
    """
    check_names(type(pipe), request)
    takes = inspect.signature(type(pipe).__call__).parameters
    arguments: dict[str, object] = {}
    for name, value in _asked(request).items():
        if name in ("height", "width") and name not in takes:
            continue  # the picture has this size by now
        target = _guidance_name(pipe) if name == "guidance_scale" else name
        if name == "control_image":
            target = calls_control_image(type(pipe))
        pictures: list[object] = [item.image for item in inputs if item.option == name]
        if pictures:
            arguments[target] = pictures[0] if len(pictures) == 1 else pictures
        else:
            arguments[target] = value
    if "max_area" in takes and request.height and request.width:
        # Such a pipeline keeps the shape it is asked for and takes the size from its area.
        arguments["max_area"] = request.height * request.width
    settings = {name: _in_kind(takes[name], value) for name, value in request.set.items()}
    return arguments | deepcopy(settings)


def _in_kind(parameter: inspect.Parameter, value: Json) -> object:
    """`value` as the pipeline's annotation wants it, where JSON has no such kind or another."""
    hint = str(parameter.annotation).lower()
    if isinstance(value, list) and "tuple[" in hint and "list[" not in hint:
        return tuple(value)  # added to other tuples there
    is_mapping = re.fullmatch(r"(typing\.optional\[)?(typing\.)?dict\[.*\]( \| none)?\]?", hint)
    if is_mapping and value is not None and not isinstance(value, dict):
        raise InputError("set", f"{parameter.name}: expected a JSON object, got {value!r}")
    return value


def guidance_note(pipe: DiffusionPipeline, request: GenerateRequest) -> str | None:
    """A sentence for the user where the asked guidance cannot act, else None."""
    if request.guidance_scale is None or request.negative_prompt is not None:
        return None
    if _guidance_name(pipe) != "true_cfg_scale" or request.guidance_scale <= 1:
        return None
    return (
        f"guidance_scale is true_cfg_scale in {type(pipe).__name__} and acts only beside a "
        "negative prompt (a blank one will do)"
    )


def _asked(request: GenerateRequest) -> Mapping[str, Json]:
    given = request.to_mapping()
    return {name: value for name, value in given.items() if name not in _NOT_ARGUMENTS}


def _has_other_subject(request: GenerateRequest, accepted: Sequence[str]) -> bool:
    """Pictures or extra arguments can stand in for words (image to video, class labels); a picture
    that is changed by degrees is changed towards words."""
    return bool(request.set or (request.image and "strength" not in accepted))


def _guidance_name(pipe: DiffusionPipeline) -> str:
    names = inspect.signature(type(pipe).__call__).parameters
    if "true_cfg_scale" not in names:
        return "guidance_scale"
    if "guidance_scale" not in names:
        return "true_cfg_scale"
    denoiser = getattr(pipe, "transformer", None)
    has_embedding = bool(getattr(getattr(denoiser, "config", None), "guidance_embeds", False))
    return "guidance_scale" if has_embedding else "true_cfg_scale"
