"""Owns which files a page may make this machine open: what a browser uploaded, and nothing else.

Must never look at a file before its place was checked. The surprising fact: a field's value is a
path that the client names. Gradio would also fetch an address, or open a picture of any size,
before an event sees it; so the check stands in front of Gradio rather than in the events.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import gradio as gr
from gradio.blocks import BlockFunction
from gradio.utils import get_upload_folder
from PIL import Image

from dit_graphs.pipelines.generate import InputError

from .form import Limits
from .problems import problem_of

__all__ = ["GuardedBlocks", "checked_file", "checked_picture", "is_upload"]

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_NOT_UPLOADED = "expected a file that was uploaded here: drop it into the field"


def is_upload(path: str) -> bool:
    """Whether `path` is a file in the server's own folder of uploads, links followed."""
    try:
        place = Path(path).resolve()
        return place.is_relative_to(Path(get_upload_folder()).resolve()) and place.is_file()
    except (OSError, ValueError):  # a name that is too long, or holds a zero byte
        return False


def checked_file(option: str, path: str, limits: Limits) -> Path:
    """The uploaded file at `path`. Raises `InputError` for any other, and for one too large."""
    if not is_upload(path):
        raise InputError(option, _NOT_UPLOADED)
    place = Path(path)
    if place.stat().st_size > limits.upload_bytes:
        raise InputError(option, f"expected at most {limits.upload_bytes >> 20} MiB")
    return place


def checked_picture(option: str, path: str, limits: Limits) -> str:
    """The path of an uploaded picture that is small enough to be decoded. Raises `InputError`.

    Only the header is read: a few bytes of a file may stand for gigabytes of pixels.
    """
    place = checked_file(option, path, limits)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(place, formats=_FORMATS) as picture:
                width, height = picture.size
    except Image.DecompressionBombError:
        raise InputError(option, _too_many(limits)) from None
    except (OSError, ValueError, SyntaxError) as error:
        names = ", ".join(_FORMATS)
        raise InputError(option, f"expected a picture that can be read: {names}") from error
    if width * height > limits.input_pixels:
        raise InputError(option, f"{_too_many(limits)}, got {width}×{height}")
    return str(place)


def _too_many(limits: Limits) -> str:
    return f"expected a picture of at most {limits.input_pixels / 1e6:g} million pixels"


class GuardedBlocks(gr.Blocks):  # type: ignore[misc]
    """A page whose events take no file that was not uploaded to it, whatever field names it."""

    def __init__(self, limits: Limits, **options: object) -> None:
        super().__init__(**options)
        self._limits = limits

    async def preprocess_data(
        self, block_fn: BlockFunction, inputs: list[object], *rest: object, **more: object
    ) -> list[object]:
        """The values of the fields, as Gradio reads them once their files were checked."""
        try:
            for field, value in zip(block_fn.inputs, inputs, strict=False):
                for path in _places(value):
                    if isinstance(field, gr.Image):
                        checked_picture("image", path, self._limits)
                    else:
                        checked_file("file", path, self._limits)
        except InputError as error:
            problem = problem_of(error)
            words = f"{problem.title}: {problem.text}"
            raise gr.Error(words, print_exception=False) from error
        return cast("list[object]", await super().preprocess_data(block_fn, inputs, *rest, **more))


def _places(value: object) -> Iterator[str]:
    """Every place that Gradio could read while it looks at `value`."""
    if isinstance(value, list):
        for item in value:
            yield from _places(item)
    elif isinstance(value, dict):
        if value.get("path") is not None:
            yield str(value["path"])
        if str(value.get("url") or "").startswith("data:"):  # a file inside the message
            yield str(value["url"])
        for item in value.values():
            yield from _places(item)
