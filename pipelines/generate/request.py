"""Owns what can be asked of a pipeline: `GenerateRequest`, checked when it is built.

Must never know torch or a pipeline class: which arguments a pipeline takes is decided later, by its
own signature. The surprising fact: flags, JSON lines and records are all made from these fields, so
a field's name and help text live here and nowhere else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TypeAlias, cast

from .errors import InputError

__all__ = ["GenerateRequest", "Json", "described", "json_key"]

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MAX_SEED = 2**63 - 1
MAX_IMAGES = 2**32
IMAGE_OPTIONS = ("image", "mask_image", "control_image", "last_image", "ip_adapter_image")
_NOTHING: Mapping[str, Json] = {}


def described(text: str, metavar: str | None = None) -> dict[str, str]:
    """Field metadata from which a front end makes its flag."""
    return {"help": text} | ({"metavar": metavar} if metavar else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt and everything a call is given with it; None leaves the pipeline's own default.

    Image `i` of `num_images` is a call of its own with seed `seed + i`, so each can be made again
    alone. Raises `InputError` on a wrong value.
    """

    prompt: str | None = None
    negative_prompt: str | None = field(
        default=None, metadata=described("what the picture should not show")
    )
    height: int | None = field(default=None, metadata=described("pixels"))
    width: int | None = field(default=None, metadata=described("pixels"))
    num_frames: int | None = field(default=None, metadata=described("frames of a video"))
    num_inference_steps: int | None = field(default=None, metadata=described("denoising steps"))
    guidance_scale: float | None = field(
        default=None,
        metadata=described("classifier-free guidance; true_cfg_scale where a pipeline calls it so"),
    )
    seed: int | None = field(
        default=None, metadata=described("seed of the first image; image i uses seed + i")
    )
    num_images: int = field(default=1, metadata=described("images or videos per prompt"))
    image: tuple[str, ...] = field(
        default=(), metadata=described("input image; may be given several times", "FILE")
    )
    mask_image: str | None = field(
        default=None, metadata=described("white where the image may change", "FILE")
    )
    strength: float | None = field(
        default=None, metadata=described("how far the input image is changed, 0 to 1")
    )
    control_image: str | None = field(default=None, metadata=described("control image", "FILE"))
    last_image: str | None = field(
        default=None, metadata=described("last frame of a video", "FILE")
    )
    ip_adapter_image: str | None = field(
        default=None, metadata=described("reference image of the IP-Adapter", "FILE")
    )
    fps: int | None = field(
        default=None, metadata=described("frames per second of the saved video (default 16)")
    )
    set: Mapping[str, Json] = field(
        default_factory=lambda: _NOTHING,
        metadata=described("any other argument of the pipeline; may be given several times"),
    )

    def __post_init__(self) -> None:
        for name in ("height", "width", "num_frames", "num_inference_steps", "fps"):
            _check_whole(self, name, 1)
        _check_whole(self, "num_images", 1, MAX_IMAGES)
        _check_whole(self, "seed", 0, MAX_SEED + 1 - self.num_images)
        _check_number(self, "guidance_scale", -math.inf, math.inf)
        _check_number(self, "strength", 0.0, 1.0)
        for name in ("prompt", "negative_prompt", *IMAGE_OPTIONS[1:]):
            value: object = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InputError(name, f"expected text, got {value!r}")
        image: object = self.image
        paths = (image,) if isinstance(image, str) else image
        if not isinstance(paths, (tuple, list)) or not all(isinstance(p, str) for p in paths):
            raise InputError("image", f"expected a path or a list of paths, got {image!r}")
        object.__setattr__(self, "image", tuple(paths))
        if not isinstance(self.set, Mapping):
            raise InputError("set", f"expected a mapping of names to values, got {self.set!r}")
        object.__setattr__(self, "set", dict(self.set))
        try:
            for name, given in self.to_mapping().items():
                _check_json(name, given)
        except RecursionError:
            raise InputError("set", "expected values, got lists nested too deep") from None

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> GenerateRequest:
        """The request of one JSON object; an unknown key raises `InputError` with the list."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise InputError(name, f"no such key; a request has {', '.join(known)}")
        return cls(**values)  # type: ignore[arg-type]

    def to_mapping(self) -> dict[str, Json]:
        """The fields that were given, as plain JSON; `from_mapping` gives the request back."""
        values = cast(dict[str, Json], asdict(self))
        values["image"] = list(self.image)
        unset = {f.name: f.default for f in fields(self)}
        return {
            name: value
            for name, value in values.items()
            if value not in (None, [], {}) and value != unset[name]
        }

    def with_defaults(self, defaults: Mapping[str, Json]) -> GenerateRequest:
        """A copy in which fields left open take the value of `defaults`."""
        given = {name: value for name, value in defaults.items() if name not in self.to_mapping()}
        return GenerateRequest.from_mapping({**given, **self.to_mapping()})

    def single(self, index: int) -> GenerateRequest:
        """The request that makes image `index` of this one alone; `seed` must be known."""
        if self.seed is None:
            raise InputError("seed", "expected a seed before a request is split into items")
        return replace(self, seed=self.seed + index, num_images=1)


def json_key(value: Json) -> str:
    """The same text for equal JSON values, whatever the order of their keys."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _check_whole(request: GenerateRequest, name: str, low: int, high: int | None = None) -> None:
    value: object = getattr(request, name)
    if value is None and name != "num_images":
        return
    allowed = f"a whole number ≥ {low}" + (f" and ≤ {high}" if high is not None else "")
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not low <= cast(int, value) <= (math.inf if high is None else high):
        raise InputError(name, f"expected {allowed}, got {value!r}")


def _check_number(request: GenerateRequest, name: str, low: float, high: float) -> None:
    value: object = getattr(request, name)
    if value is None:
        return
    allowed = "a finite number" if math.isinf(low) else f"a number from {low:g} to {high:g}"
    try:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        number = float(cast(float, value)) if is_number else math.nan
    except OverflowError:  # a whole number may have any length
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high:
        raise InputError(name, f"expected {allowed}, got {value!r}")
    object.__setattr__(request, name, number)


def _check_json(name: str, value: Json) -> None:
    """What a record could not hold is found here, not after the picture is drawn."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, or a file name that is no UTF-8
        raise InputError(name, f"expected Unicode text, got {value!r}") from None
    except (TypeError, ValueError) as error:
        raise InputError(name, f"expected JSON values ({error}), got {value!r:.60}") from error
