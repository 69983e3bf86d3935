"""Composes training pictures on the device from specifications.

Owns where things stand and how they are drawn over a background. Knows nothing of captions beyond
`Spec`. Surprise: it makes no host decision at all, so the composer can be part of a captured
training step.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from dit_graphs.app.demo_model.training.captions import LAYOUTS, NUM_BACKGROUNDS, Spec
from dit_graphs.app.demo_model.training.scenes import load_backgrounds

SPRITE = 128
MAX_THINGS = 4
# Per layout up to four (x, y, size) in pixels; size 0 draws nothing.
_PLACES: dict[str, tuple[tuple[int, int, int], ...]] = {
    "single": ((64, 64, 98),),
    "big": ((64, 64, 124),),
    "small": ((64, 64, 54),),
    "left": ((34, 64, 64),),
    "right": ((94, 64, 64),),
    "top": ((64, 34, 64),),
    "bottom": ((64, 94, 64),),
    "two": ((33, 64, 64), (95, 64, 64)),
    "three": ((64, 33, 62), (33, 94, 62), (95, 94, 62)),
    "four": ((34, 34, 60), (94, 34, 60), (34, 94, 60), (94, 94, 60)),
    "beside": ((33, 64, 66), (95, 64, 66)),
    "above": ((64, 33, 64), (64, 95, 64)),
}
_TWO_THINGS = ("beside", "above")


def load_sprites(file: Path, num: int) -> torch.Tensor:
    """Returns premultiplied sprites and their blurred alpha: float32 [num, 5, 128, 128] in 0..1."""
    sheet = torch.from_numpy(np.array(Image.open(file).convert("RGBA"))).float() / 255
    columns = sheet.shape[1] // SPRITE
    tiles = sheet.unflatten(0, (-1, SPRITE)).unflatten(2, (columns, SPRITE))
    tiles = tiles.permute(0, 2, 4, 1, 3).flatten(0, 1)[:num]
    alpha = tiles[:, 3:]
    ramp = torch.linspace(-2, 2, 21).square().neg().exp()
    kernel = (ramp / ramp.sum())[None, None]
    blurred = F.conv2d(
        F.conv2d(alpha, kernel[..., None], padding=(10, 0)), kernel[:, :, None], padding=(0, 10)
    )
    return torch.cat((tiles[:, :3] * alpha, alpha, blurred), 1)


class Composer:
    """Draws a `Spec` on its device; sprites and backgrounds are uploaded once."""

    def __init__(self, data: Path, num_concepts: int, device: torch.device) -> None:
        self.sprites = load_sprites(data / "sprites.webp", num_concepts).to(device)
        # Small things are drawn from a half-size copy: sampling the full one would skip pixels.
        self.half = F.avg_pool2d(self.sprites, 2)
        self.backgrounds = load_backgrounds(data / "backgrounds.webp").to(device)
        self.num_variants = self.backgrounds.shape[1]
        rows = [
            [*_PLACES[name], *[(64, 64, 0)] * (MAX_THINGS - len(_PLACES[name]))] for name in LAYOUTS
        ]
        self.places = torch.tensor(rows, device=device, dtype=torch.float32)
        self.has_two = torch.tensor([name in _TWO_THINGS for name in LAYOUTS], device=device)
        line = (torch.arange(SPRITE, device=device) + 0.5) / (SPRITE / 2) - 1
        self.grid = torch.stack(torch.meshgrid(line, line, indexing="ij"))
        self.device = device
        assert self.backgrounds.shape[0] == NUM_BACKGROUNDS

    @torch.no_grad()
    def __call__(self, spec: Spec, jitter: float = 1.0) -> torch.Tensor:
        """Returns pictures in -1..1: [B, 3, 128, 128] float32; always the same with `jitter` 0."""
        picture = self.backgrounds[spec.background, spec.variant % self.num_variants].float()
        num = len(picture)
        noise = jitter * (2 * torch.rand(MAX_THINGS, 4, num, device=self.device) - 1)
        places = self.places[spec.layout]
        for slot in range(MAX_THINGS):
            second = self.has_two[spec.layout] & (slot == 1)
            concept = torch.where(second, spec.second, spec.first)
            x, y, size = places[:, slot].unbind(1)
            size = size * (1 + 0.05 * noise[slot, 2])
            picture = self._draw(
                picture,
                concept,
                x + 3 * noise[slot, 0],
                y + 3 * noise[slot, 1],
                size,
                0.1 * noise[slot, 3],
            )
        return picture.clamp(0, 1) * 2 - 1

    def _draw(
        self,
        picture: torch.Tensor,
        concept: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        size: torch.Tensor,
        angle: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the picture with one more thing and its shadow; size 0 leaves it as it is."""
        shown = (size > 0)[:, None, None, None]
        scale = SPRITE / size.clamp(min=1) * (116 / 128)
        cos, sin = scale * angle.cos(), scale * angle.sin()
        v, u = self.grid
        layers = []
        for drop in (0.0, 0.05):
            dx, dy = (x - 64) / 64, (y + drop * size - 64) / 64
            rows = (cos, sin, -cos * dx - sin * dy, -sin, cos, sin * dx - cos * dy)
            row = [r[:, None, None] for r in rows]
            # Not affine_grid: its matrix product may run in TF32, which moves pixels.
            grid = torch.stack(
                (row[0] * u + row[1] * v + row[2], row[3] * u + row[4] * v + row[5]), -1
            )
            full = self.sprites[concept, :4] if not drop else self.sprites[concept, 4:]
            half = self.half[concept, :4] if not drop else self.half[concept, 4:]
            is_small = (size < 80)[:, None, None, None]
            layers.append(
                torch.where(
                    is_small,
                    F.grid_sample(half, grid, align_corners=False),
                    F.grid_sample(full, grid, align_corners=False),
                )
            )
        colour, alpha = layers[0][:, :3], layers[0][:, 3:]
        shaded = picture * (1 - 0.28 * layers[1])
        return torch.where(shown, shaded * (1 - alpha) + colour, picture)
