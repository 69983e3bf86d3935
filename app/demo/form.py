"""Owns the way from what was typed into the page to a request.

Must never guess: an empty field leaves the model's own default, a wrong one is an `InputError`. The
surprising fact: limits live here, because a page that strangers can reach must refuse a size that
would take the machine down before anything is allocated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from dit_graphs.pipelines.generate import GenerateRequest, InputError, Json

from .modes import Mode, ModePlan

__all__ = ["Form", "Limits", "request_of", "sizes_of", "text_of"]

_MAX_EXTRA = 4000
_MAX_NUMBER = 8192
_MAX_DEPTH = 5
_FILE_WORDS = ("image", "video", "audio", "mask", "file", "path", "dir")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most one request may ask for."""

    side: int = 2048
    steps: int = 200
    images: int = 8
    frames: int = 257
    text: int = 10_000
    sizes: int = 16
    input_pixels: int = 36_000_000
    upload_bytes: int = 32 << 20


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
    mask: str | None = None
    strength: float | None = None
    lora: str = ""
    extra: str = ""
    fps: float | None = None


def request_of(form: Form, plan: ModePlan, limits: Limits) -> GenerateRequest:
    """The request the form asks for. Raises `InputError` with the field and the allowed values."""
    prompt = text_of("prompt", form.prompt, limits)
    if not prompt and "prompt" in plan.takes:
        raise InputError("prompt", "say what the picture should show")
    values: dict[str, object] = {
        "prompt": prompt or None,
        "negative_prompt": text_of("negative_prompt", form.negative_prompt, limits) or None,
        "width": _whole("width", form.width, limits.side),
        "height": _whole("height", form.height, limits.side),
        "num_inference_steps": _whole("num_inference_steps", form.steps, limits.steps),
        "guidance_scale": form.guidance,
        "seed": _whole("seed", form.seed, None),
        "num_images": _whole("num_images", form.count, limits.images),
        "set": _extra(form.extra, limits),
    }
    if plan.mode is Mode.VIDEO:
        values["num_frames"] = _whole("num_frames", form.num_frames, limits.frames)
        values["fps"] = _whole("fps", form.fps, 120)
    if plan.takes_image:
        values["image"] = form.images
        if plan.needs_image and not form.images:
            raise InputError("image", "expected a picture: drop one into the field")
    if plan.needs_mask:
        values["mask_image"] = form.mask
        if not form.mask:
            raise InputError("mask_image", "expected a mask: drop one into the field")
    if "strength" in plan.takes:
        values["strength"] = form.strength
    known = plan.takes | {"seed", "num_images", "set", "fps", "prompt"}
    if "true_cfg_scale" in plan.takes:
        known |= {"guidance_scale"}
    return GenerateRequest.from_mapping(
        {name: value for name, value in values.items() if value is not None and name in known}
    )


def sizes_of(text: str, limits: Limits) -> list[tuple[int, int]]:
    """(width, height) of each `WIDTHxHEIGHT`, separated by commas. Raises `InputError`."""
    sizes: list[tuple[int, int]] = []
    for word in text.replace("×", "x").replace(";", ",").split(","):
        parts = word.strip().lower().split("x")
        if not word.strip():
            continue
        if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
            raise InputError("sizes", f"expected sizes such as 512x512, 768x512, got {word[:40]!r}")
        if len(sizes) == limits.sizes:
            raise InputError("sizes", f"expected at most {limits.sizes} sizes")
        width, height = (int(part.strip()[:9]) for part in parts)
        for side in (width, height):
            if not 1 <= side <= limits.side:
                raise InputError("sizes", f"expected sides from 1 to {limits.side}, got {side}")
        sizes.append((width, height))
    if not sizes:
        raise InputError("sizes", "expected at least one size such as 512x512")
    return sizes


def _whole(name: str, value: float | None, high: int | None) -> int | None:
    """A whole number from the page, which sends 8.0 for 8."""
    if value is None:
        return None
    if not math.isfinite(value) or value != int(value):
        raise InputError(name, f"expected a whole number, got {value:g}")
    if high is not None and value > high:
        raise InputError(name, f"expected at most {high} here, got {value:.9g}")
    return int(value)


def text_of(name: str, text: str, limits: Limits) -> str:
    """`text` without the space around it. Raises `InputError` where it is too long."""
    if len(text) > limits.text:
        raise InputError(
            name, f"expected at most {limits.text:,} characters here, got {len(text):,}"
        )
    return text.strip()


def _extra(text: str, limits: Limits) -> Mapping[str, Json]:
    """Other arguments: only what has no field (and so no limit) of its own, and opens no file."""
    if not text.strip():
        return {}
    if len(text) > _MAX_EXTRA:
        raise InputError("set", f"expected at most {_MAX_EXTRA} characters, got {len(text)}")
    try:
        values = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        words = "too deeply nested" if isinstance(error, RecursionError) else str(error)
        raise InputError("set", f'expected JSON such as {{"eta": 0.5}}: {words}') from error
    if not isinstance(values, dict):
        raise InputError("set", f"expected a JSON object, got {text.strip()[:60]!r}")
    for name, value in values.items():
        if name in GenerateRequest.__slots__:
            raise InputError("set", f"expected {name!r} in its own field")
        _check_extra(name, value, limits, _MAX_DEPTH)
    return values


def _check_extra(name: str, value: Json, limits: Limits, depth: int) -> None:
    """Numbers, short lists and words; no place a pipeline could read from. Raises `InputError`."""
    if depth == 0:
        raise InputError("set", f"{name!r} is too deeply nested")
    if isinstance(value, str):
        if any(word in name for word in _FILE_WORDS) or "://" in value:
            raise InputError("set", f"{name!r} cannot be given as text here")
    elif isinstance(value, (int, float)):
        if not abs(value) <= _MAX_NUMBER:
            raise InputError("set", f"expected at most {_MAX_NUMBER} for {name!r}")
    elif isinstance(value, list):
        if len(value) > limits.steps:
            raise InputError("set", f"expected at most {limits.steps} values for {name!r}")
        for item in value:
            _check_extra(name, item, limits, depth - 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_extra(f"{name}.{key}", item, limits, depth - 1)


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no number")
