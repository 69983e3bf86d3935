"""Owns the input pictures of a request: read once, hashed, given to the pipeline as PIL images.

Must never know which pipeline asks. The surprising fact: the hash is of the file's bytes, so a
picture that was saved again is a changed input even where it looks the same.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageOps

from .errors import InputError
from .request import IMAGE_OPTIONS, GenerateRequest

__all__ = ["UNREADABLE", "InputFile", "file_sha256", "image_paths", "open_images"]

# What reading a picture raises: for a file that is none, for wrong parts, for too many pixels.
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input picture: the request field it came from, its absolute path, hash and pixels."""

    option: str
    path: str
    sha256: str
    image: Image.Image


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of the file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def image_paths(request: GenerateRequest) -> Iterator[tuple[str, str]]:
    """(field, path) of every input picture the request names, in a fixed order."""
    for option in IMAGE_OPTIONS:
        value = getattr(request, option)
        for path in value if isinstance(value, tuple) else [value]:
            if path is not None:
                yield option, path


def open_images(request: GenerateRequest) -> list[InputFile]:
    """Every input picture, decoded. A missing or unreadable file raises `InputError`."""
    return [_open(option, path) for option, path in image_paths(request)]


def _open(option: str, text: str) -> InputFile:
    path = Path(os.path.expanduser(text))  # Path.expanduser fails for an unknown user
    if not path.is_file():
        raise InputError(option, f"no such file: {text!r}")
    try:
        with Image.open(path) as image:
            # A mask stays grey; everything else becomes the RGB that pipelines expect.
            pixels = ImageOps.exif_transpose(image).convert(
                "L" if option == "mask_image" else "RGB"
            )
    except UNREADABLE as error:
        why = f": {error}" if isinstance(error, Image.DecompressionBombError) else ""
        raise InputError(option, f"{text!r} is not a picture that can be read{why}") from error
    return InputFile(option, str(path.resolve()), file_sha256(path), pixels)
