"""Owns the small pictures shown while a picture is being made: latents turned into colours.

Must never call the VAE: a preview may not cost a step or count as a call. The surprising fact: a
straight line is good enough. Each latent position is mapped to a colour by a linear map fitted to
the pictures this pipeline has finished so far; before the first one only brightness is shown.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from PIL import Image
from torch import Tensor

__all__ = ["Previewer"]

_RIDGE = 1e-2
_MEMORY = 0.8  # how much an older picture still counts when a new one is fitted


class Previewer:
    """Turns latents into pictures; learns from every finished one. One per pipeline."""

    def __init__(self) -> None:
        self._inner: np.ndarray | None = None
        self._outer: np.ndarray | None = None
        self._map: np.ndarray | None = None

    def picture(self, latents: Tensor, width: int, height: int) -> Image.Image | None:
        """`latents` as a picture of latent resolution, None where their layout is unknown."""
        grid = _grid(latents, width, height)
        if grid is None:
            return None
        if self._map is None or self._map.shape[0] != grid.shape[-1] + 1:
            return _brightness(grid)
        colours = _with_one(grid.reshape(-1, grid.shape[-1])) @ self._map
        pixels = (colours.reshape(*grid.shape[:2], 3).clip(0, 1) * 255).round().astype(np.uint8)
        return Image.fromarray(pixels)

    def learn(self, latents: Tensor, picture: Image.Image) -> None:
        """A finished picture and the latents it was decoded from improve the map."""
        grid = _grid(latents, *picture.size)
        if grid is None:
            return
        height, width, channels = grid.shape
        small = picture.convert("RGB").resize((width, height), Image.Resampling.BOX)
        colours = np.asarray(small, dtype=np.float64).reshape(-1, 3) / 255
        rows = _with_one(grid.reshape(-1, channels))
        inner, outer = rows.T @ rows / len(rows), rows.T @ colours / len(rows)
        if self._inner is not None and self._inner.shape == inner.shape:
            assert self._outer is not None
            inner, outer = inner + _MEMORY * self._inner, outer + _MEMORY * self._outer
        self._inner, self._outer = inner, outer
        self._map = np.linalg.solve(inner + _RIDGE * np.eye(channels + 1), outer)


def _grid(latents: Tensor, width: int, height: int) -> np.ndarray | None:
    """The first item's first frame as [rows, columns, channels], from any usual layout."""
    values = latents.detach()[0].float()
    if values.ndim == 4:  # [C, F, H, W]
        values = values[:, values.shape[1] // 2]
    if values.ndim == 3:
        values = values.permute(1, 2, 0)
    elif values.ndim == 2:  # packed: one row per patch
        shape = _patches(values.shape[0], width, height)
        if shape is None:
            return None
        values = values.reshape(*shape, values.shape[-1])
    else:
        return None
    array = values.to("cpu", torch.float64).numpy()
    return array if np.isfinite(array).all() else None


def _patches(count: int, width: int, height: int) -> tuple[int, int] | None:
    """(rows, columns) of `count` patches in a picture of this aspect."""
    rows = round(math.sqrt(count * height / max(width, 1)))
    if rows < 1 or count % rows:
        return None
    return rows, count // rows


def _brightness(grid: np.ndarray) -> Image.Image:
    """Only how strongly each place differs from the mean: colours are not known yet."""
    values = np.sqrt(((grid - grid.mean(axis=(0, 1))) ** 2).mean(axis=-1))
    span = float(values.max() - values.min()) or 1.0
    pixels = ((values - values.min()) / span * 200 + 28).round().astype(np.uint8)
    return Image.fromarray(pixels)


def _with_one(rows: np.ndarray) -> np.ndarray:
    return np.concatenate([rows, np.ones((len(rows), 1))], axis=1)
