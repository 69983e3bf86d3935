"""Owns the way from what was typed into the page to a request, and from a file back to the page.

Must never guess: an empty field leaves the model's own default, a wrong one is an `InputError`. The
surprising fact: limits live here, because a page that strangers can reach must refuse a size that
would take the machine down before anything is allocated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from PIL import Image

from dit_graphs.pipelines.generate import Adapter, GenerateRequest, InputError, Json, read_record

from .modes import Mode, ModePlan

__all__ = ["Form", "Limits", "Restored", "adapters_of", "request_of", "restore_form", "sizes_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most one request may ask for."""

    side: int = 2048
    steps: int = 200
    images: int = 8
    frames: int = 257


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The page's fields as they were typed; None and "" mean "left open"."""

    mode: Mode = Mode.TEXT
    prompt: str = ""
    negative_prompt: str = ""
    width: float | None = None
    height: float | None = None
    num_frames: float | None = None
    steps: float | None = None
    guidance: float | None = None
    seed: int | None = None
    count: float | None = 1
    images: tuple[str, ...] = ()
    strength: float | None = None
    lora: str = ""
    extra: str = ""
    fps: float | None = None


@dataclass(frozen=True, slots=True)
class Restored:
    """A form that makes a file again, and what could not be restored, in words."""

    form: Form
    notes: tuple[str, ...] = field(default=())


def request_of(form: Form, plan: ModePlan, limits: Limits) -> GenerateRequest:
    """The request the form asks for. Raises `InputError` with the field and the allowed values."""
    prompt = form.prompt.strip()
    if not prompt and "prompt" in plan.takes:
        raise InputError("prompt", "say what the picture should show")
    values: dict[str, object] = {
        "prompt": prompt or None,
        "negative_prompt": form.negative_prompt.strip() or None,
        "width": _whole("width", form.width, limits.side),
        "height": _whole("height", form.height, limits.side),
        "num_inference_steps": _whole("num_inference_steps", form.steps, limits.steps),
        "guidance_scale": form.guidance,
        "seed": _whole("seed", form.seed, None),
        "num_images": _whole("num_images", form.count, limits.images) or 1,
        "set": _extra(form.extra),
    }
    if plan.mode is Mode.VIDEO:
        values["num_frames"] = _whole("num_frames", form.num_frames, limits.frames)
        values["fps"] = _whole("fps", form.fps, 120)
    if plan.takes_image:
        values["image"] = form.images
        if plan.needs_image and not form.images:
            raise InputError("image", "expected a picture: drop one into the field")
    if "strength" in plan.takes:
        values["strength"] = form.strength
    known = plan.takes | {"seed", "num_images", "set", "fps", "prompt"}
    if "true_cfg_scale" in plan.takes:
        known |= {"guidance_scale"}
    return GenerateRequest.from_mapping(
        {name: value for name, value in values.items() if value is not None and name in known}
    )


def adapters_of(text: str) -> tuple[Adapter, ...]:
    """The LoRA weights of one `PATH:SCALE` per line. Raises `InputError`."""
    return tuple(Adapter.parse("lora", line.strip()) for line in text.splitlines() if line.strip())


def sizes_of(text: str, limits: Limits) -> list[tuple[int, int]]:
    """(width, height) of each `WIDTHxHEIGHT`, separated by commas. Raises `InputError`."""
    sizes = []
    for word in text.replace("×", "x").replace(";", ",").split(","):
        parts = word.strip().lower().split("x")
        if not word.strip():
            continue
        if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
            raise InputError("sizes", f"expected sizes such as 512x512, 768x512, got {word!r}")
        width, height = (int(part) for part in parts)
        for side in (width, height):
            if not 1 <= side <= limits.side:
                raise InputError("sizes", f"expected sides from 1 to {limits.side}, got {side}")
        sizes.append((width, height))
    if not sizes:
        raise InputError("sizes", "expected at least one size such as 512x512")
    return sizes


def restore_form(path: Path, plans: tuple[ModePlan, ...], model: str, pipeline: str) -> Restored:
    """The form that made this PNG or sidecar. Raises `InputError` where it holds no record.

    `model` and `pipeline` are what is loaded now; a file of another model is restored as far as
    its settings go, with a note.
    """
    record = read_record(path)
    asked = cast(Mapping[str, Json], record["request"])
    request = GenerateRequest.from_mapping(asked)
    spec = cast(Mapping[str, Json], record.get("model") or {})
    notes: list[str] = []
    if str(spec.get("model")) != model:
        notes.append(f"it was made with the model {spec.get('model')}: the same picture needs it")
    images = tuple(name for name in request.image if Path(name).is_file())
    missing = len(request.image) - len(images)
    if missing:
        notes.append(f"{missing} input picture(s) are not on this machine any more")
    width, height = _size(path, request)
    mode = _mode_of(request, str(record.get("pipeline") or pipeline), plans)
    loras = cast(list[str], spec.get("lora") or [])
    form = Form(
        mode=mode,
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
        strength=request.strength,
        lora="\n".join(loras),
        extra=json.dumps(dict(request.set)) if request.set else "",
        fps=request.fps,
    )
    return Restored(form, tuple(notes))


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


def _whole(name: str, value: float | None, high: int | None) -> int | None:
    """A whole number from the page, which sends 8.0 for 8."""
    if value is None:
        return None
    if value != int(value):
        raise InputError(name, f"expected a whole number, got {value:g}")
    if high is not None and value > high:
        raise InputError(name, f"expected at most {high} here, got {int(value)}")
    return int(value)


def _extra(text: str) -> Mapping[str, Json]:
    if not text.strip():
        return {}
    try:
        values = json.loads(text)
    except ValueError as error:
        raise InputError("set", f'expected JSON such as {{"eta": 0.5}}: {error}') from error
    if not isinstance(values, dict):
        raise InputError("set", f"expected a JSON object, got {text.strip()[:60]!r}")
    return values
