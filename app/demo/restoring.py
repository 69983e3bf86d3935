"""Owns the way from a file made here back to the page's fields.

Must never trust the file: anybody can write one, so its paths are looked up rather than opened and
its values are checked as if they had been typed. The surprising fact: a record that cannot be drawn
here (too large, another model) is still restored, with a note; the user may want only its prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from PIL import Image

from dit_graphs.pipelines.generate import Adapter, GenerateRequest, InputError, Json, read_record

from . import films
from .form import Form, request_of
from .modes import Mode, ModePlan
from .problems import problem_of
from .studio import Studio

__all__ = ["Restored", "restore_form"]

_MAX_SHOWN = 2**53  # the largest whole number a browser keeps exact
_MAX_JSON_BYTES = 1 << 20
_PNG = b"\x89PNG\r\n\x1a\n"
_NO_FIELD = ("control_image", "last_image", "ip_adapter_image")
# Noted in words of their own, or where it runs rather than what it draws.
_NOT_COMPARED = {"model", "lora", "pipeline", "device", "offload"}
_MAX_NAME = 200
_MAX_NAMED = 8
_NUMBERS = ("width", "height", "num_frames", "num_inference_steps", "num_images", "fps")


@dataclass(frozen=True, slots=True)
class Restored:
    """A form that makes a file again, and what could not be restored, in words."""

    form: Form
    notes: tuple[str, ...] = field(default=())


def restore_form(path: Path, studio: Studio, may_open: Callable[[str], bool]) -> Restored:
    """The form that made this PNG, MP4 or sidecar. Raises `InputError` where it holds no record.

    `may_open` says which input pictures the record names may be shown again. A file of another
    model is restored as far as its settings go, with a note.
    """
    try:
        return _restored(path, studio, may_open)
    except InputError:
        raise
    except Exception as error:  # whatever a forged record runs into, it is the file's fault
        raise InputError("from", "the record in this file is damaged") from error


def _restored(path: Path, studio: Studio, may_open: Callable[[str], bool]) -> Restored:
    record = _record(path)
    request = GenerateRequest.from_mapping(cast(Mapping[str, Json], record["request"]))
    if any((getattr(request, name) or 0) > _MAX_SHOWN for name in _NUMBERS):
        raise InputError("from", "the record in this file holds impossible numbers")
    spec = cast(Mapping[str, Json], record.get("model") or {})
    notes: list[str] = []
    images = tuple(name for name in request.image if may_open(name))
    mask = request.mask_image if request.mask_image and may_open(request.mask_image) else None
    missing = len(request.image) - len(images) + (request.mask_image is not None and mask is None)
    if missing:
        notes.append(f"{missing} input picture(s) must be dropped into their field again")
    notes += _unlike(record, request, studio)
    loras = [
        (adapter, studio.loras.line(adapter))
        for adapter in (Adapter(*_place_and_scale(text)) for text in _texts(spec.get("lora")))
    ]
    if any(line is None for _, line in loras):
        notes.append("LoRA weights it was made with are not offered here")
    own = studio.plans[0].pipeline_class.__name__
    width, height = _size(path, request)
    form = Form(
        mode=_mode_of(request, str(record.get("pipeline") or own), studio.plans),
        prompt=request.prompt or "",
        negative_prompt=request.negative_prompt or "",
        width=width,
        height=height,
        num_frames=request.num_frames,
        steps=request.num_inference_steps,
        guidance=request.guidance_scale,
        seed=request.seed,
        count=request.num_images,
        images=images,
        mask=mask,
        strength=request.strength,
        lora="\n".join(line for _, line in loras if line is not None),
        extra=json.dumps(dict(request.set)) if request.set else "",
        fps=request.fps,
    )
    return Restored(form, (*notes, *_refusal(form, studio)))


def _unlike(record: Mapping[str, Json], request: GenerateRequest, studio: Studio) -> Iterator[str]:
    """What made the file and is not here, so that this page draws another picture."""
    spec = cast(Mapping[str, Json], record.get("model") or {})
    own = studio.model_settings
    if str(spec.get("model")) != studio.model_name:
        made_with = str(spec.get("model"))[:_MAX_NAME]
        yield f"it was made with the model {made_with}: the same picture needs it"
    else:
        names = sorted({*spec, *own} - _NOT_COMPARED)
        others = [name[:_MAX_NAME] for name in names if spec.get(name) != own.get(name)]
        if others:
            words = ", ".join(others[:_MAX_NAMED])
            yield f"the demo was started with another {words}: the same picture needs the file's"
    made_by = record.get("pipeline")
    if made_by and made_by not in [plan.pipeline_class.__name__ for plan in studio.plans]:
        yield f"it was made by {str(made_by)[:_MAX_NAME]}: the same picture needs it"
    lost = [name.replace("_", " ") for name in _NO_FIELD if getattr(request, name) is not None]
    if lost:
        yield f"this page has no field for its {', '.join(lost)}: the same picture needs it"


def _record(path: Path) -> dict[str, Json]:
    if path.suffix.lower() == ".png":
        with path.open("rb") as file:  # Pillow would try every reader it has on what is called so
            if file.read(len(_PNG)) != _PNG:
                raise InputError("from", "this file is no PNG that can be read")
        return read_record(path)
    if path.suffix.lower() == films.SUFFIX:
        with TemporaryDirectory() as folder:  # a film's record is checked as a sidecar is
            sidecar = Path(folder) / path.name
            sidecar.write_text(films.record_text(path), encoding="utf-8")
            return read_record(sidecar)
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise InputError("from", f"expected at most {_MAX_JSON_BYTES >> 20} MiB of JSON")
    return read_record(path)


def _refusal(form: Form, studio: Studio) -> tuple[str, ...]:
    """Why the restored form cannot be drawn here, if it cannot."""
    try:
        request_of(form, studio.plan(form.mode), studio.limits)
    except InputError as error:
        if error.option in (
            "image",
            "mask_image",
        ):  # said already: the picture must be dropped again
            return ()
        problem = problem_of(error)
        return (f"{problem.title}: {problem.text.rstrip('.')}",)
    return ()


def _texts(value: Json) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _place_and_scale(text: str) -> tuple[str, float]:
    """`PATH:SCALE` as records write it; the path is only compared, never opened."""
    place, _, scale = text.rpartition(":")
    return place, float(scale)


def _size(path: Path, request: GenerateRequest) -> tuple[int | None, int | None]:
    """The size that was asked for; of a picture whose size was left open, the one it has."""
    if path.suffix.lower() != ".png" or (request.width and request.height):
        return request.width, request.height
    with Image.open(path) as picture:
        return picture.size


def _mode_of(request: GenerateRequest, pipeline: str, plans: tuple[ModePlan, ...]) -> Mode:
    fitting = [plan for plan in plans if plan.pipeline_class.__name__ == pipeline]
    with_image = [plan for plan in fitting or plans if plan.needs_image == bool(request.image)]
    return (with_image or fitting or list(plans))[0].mode
