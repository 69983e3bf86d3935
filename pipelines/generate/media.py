"""Owns what a pipeline returned, as pictures, a video or sound, and its bytes.

Must never decide where a file goes. The surprising fact: one call may return several pictures
(layers), and video and sound together; each is one `Medium` with a suffix of its own.
"""

from __future__ import annotations

import hashlib
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from .errors import InputError

__all__ = ["Medium", "media_of"]

_VIDEO_NAMES = ("frames", "videos", "video")
_AUDIO_NAMES = ("audios", "audio")


@dataclass(frozen=True, slots=True, eq=False)
class Medium:
    """One picture, video or sound: `frames` holds PIL pictures, `samples` is [channels, time]."""

    frames: tuple[Image.Image, ...] = ()
    samples: np.ndarray | None = None
    label: str = ""

    @property
    def suffix(self) -> str:
        """The file suffix; a video of one frame is a picture."""
        if self.samples is not None:
            return ".wav"
        return ".png" if len(self.frames) == 1 else ".mp4"

    @property
    def sha256(self) -> str:
        """Hash of the pixels or samples, whatever file they are put in."""
        digest = hashlib.sha256()
        for frame in self.frames:
            digest.update(f"{frame.mode}{frame.size}".encode())
            digest.update(frame.tobytes())
        if self.samples is not None:
            digest.update(str(self.samples.shape).encode())
            digest.update(np.ascontiguousarray(self.samples).tobytes())
        return digest.hexdigest()

    def describe(self) -> dict[str, int]:
        """Actual size: width and height in pixels and number of frames, or samples of a sound."""
        if self.samples is not None:
            return {"num_samples": int(self.samples.shape[-1])}
        width, height = self.frames[0].size
        num_frames = {"num_frames": len(self.frames)} if len(self.frames) > 1 else {}
        return {"width": width, "height": height, **num_frames}

    def write(self, path: Path, *, fps: int, sample_rate: int, text: str) -> None:
        """The finished file is at `path`; `text` goes into a PNG's metadata."""
        if self.samples is not None:
            _write_wave(self.samples, path, sample_rate)
        elif len(self.frames) == 1:
            info = PngInfo()
            info.add_itxt("dit-graphs", text)
            self.frames[0].save(path, format="PNG", pnginfo=info)
        else:
            _write_video(self.frames, path, fps)


def media_of(output: object) -> list[Medium]:
    """Everything one call with one prompt returned, in order."""
    fields = output if isinstance(output, dict) else vars(output)
    media: list[Medium] = []
    images = fields.get("images")
    if images is not None:
        pictures = [picture for item in images for picture in _pictures(item)]
        for index, picture in enumerate(pictures):
            media.append(Medium((picture,), label=f"-{index}" if len(pictures) > 1 else ""))
    for name in _VIDEO_NAMES:
        if fields.get(name) is not None:
            media.append(Medium(tuple(_pictures(_first(fields[name])))))
            break
    for name in _AUDIO_NAMES:
        if fields.get(name) is not None:
            samples = np.atleast_2d(_array(_first(fields[name])).squeeze())
            media.append(Medium(samples=samples.astype(np.float32)))
            break
    if not media:
        raise InputError("model", f"it returned {sorted(fields)}: no picture, video or sound")
    return media


def _first(value: object) -> object:
    """The only item of a batch of one."""
    if isinstance(value, (list, tuple)):
        # PIL frames of one video may come with or without the batch around them.
        return value if value and isinstance(value[0], Image.Image) else value[0]
    array = _array(value)
    return array[0] if array.ndim > 1 else array


def _pictures(value: object) -> Sequence[Image.Image]:
    if isinstance(value, Image.Image):
        return [value]
    if isinstance(value, (list, tuple)):
        return [picture for item in value for picture in _pictures(item)]
    array = _array(value)
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.ndim == 4 and array.shape[-1] not in (1, 3, 4):
        array = array.transpose(0, 2, 3, 1)
    if array.dtype != np.uint8:
        array = (array.astype(np.float32).clip(0, 1) * 255).round().astype(np.uint8)
    frames = array if array.ndim == 4 else array[None]
    return [
        Image.fromarray(frame.squeeze(-1) if frame.shape[-1] == 1 else frame) for frame in frames
    ]


def _array(value: object) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        return np.asarray(value.detach().float().cpu().numpy())
    return np.asarray(value)


def _write_video(frames: Sequence[Image.Image], path: Path, fps: int) -> None:
    from diffusers.utils import export_to_video

    # Two, not the default sixteen: the encoder must not resize what the pipeline drew.
    export_to_video(list(frames), str(path), fps=fps, macro_block_size=2)


def _write_wave(samples: np.ndarray, path: Path, sample_rate: int) -> None:
    pcm = (samples.clip(-1, 1) * 32767).round().astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(pcm.shape[0])
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes(pcm.T.tobytes())
