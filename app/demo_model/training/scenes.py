"""Backgrounds: twelve plain colours and eleven simple drawn scenes, each in several variants.

Owns how the entries of `captions.COLOURS` and `captions.SCENES` look. Knows nothing of sprites.
Surprise: everything is drawn at twice the size and averaged, which is cheaper to write than smooth
edges.

    python -m dit_graphs.app.demo_model.training.scenes --out DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from dit_graphs.app.demo_model.training.captions import COLOURS, SCENES

Array = npt.NDArray[np.float32]
SIDE = 128
_DRAWN = 2 * SIDE
_Y, _X = (np.mgrid[0:_DRAWN, 0:_DRAWN].astype(np.float32) + 0.5) / _DRAWN
RGB: dict[str, tuple[int, int, int]] = {
    "white": (250, 250, 250), "gray": (176, 180, 186), "light blue": (176, 218, 250),
    "light green": (188, 236, 190), "light yellow": (253, 240, 178), "pink": (252, 190, 212),
    "red": (206, 52, 52), "orange": (246, 150, 52), "blue": (48, 98, 206), "green": (52, 152, 76),
    "purple": (126, 74, 182), "black": (28, 28, 32),
}  # fmt: skip


def _blend(top: tuple[int, int, int], bottom: tuple[int, int, int], y: Array = _Y) -> Array:
    mix = np.clip(y, 0, 1)[..., None]
    return (np.array(top) * (1 - mix) + np.array(bottom) * mix).astype(np.float32)


def _paint(
    canvas: Array, mask: npt.NDArray[np.bool_] | Array, colour: tuple[int, int, int]
) -> Array:
    alpha = mask.astype(np.float32)[..., None]
    return canvas * (1 - alpha) + np.array(colour, np.float32) * alpha


def _disc(x: float, y: float, radius: float, flat: float = 1.0) -> npt.NDArray[np.bool_]:
    return (_X - x) ** 2 + ((_Y - y) / flat) ** 2 < radius**2


def _hills(rng: np.random.Generator, height: float, size: float) -> npt.NDArray[np.bool_]:
    phase, rate = rng.uniform(0, 6.28, 2), rng.uniform((3, 7), (6, 11))
    line = (
        height + size * np.sin(rate[0] * _X + phase[0]) + size / 2 * np.sin(rate[1] * _X + phase[1])
    )
    return line < _Y


def _dots(
    canvas: Array, rng: np.random.Generator, num: int, colour: tuple[int, int, int],
    size: tuple[float, float], bottom: float = 1.0,
) -> Array:  # fmt: skip
    for _ in range(num):
        spot = _disc(rng.uniform(0, 1), rng.uniform(0, bottom), rng.uniform(*size))
        canvas = _paint(canvas, spot * rng.uniform(0.5, 1), colour)
    return canvas


def _clouds(canvas: Array, rng: np.random.Generator, num: int, bottom: float) -> Array:
    for _ in range(num):
        x, y = rng.uniform(0, 1), rng.uniform(0.05, bottom)
        for shift in (-0.07, 0.0, 0.07):
            size = rng.uniform(0.05, 0.08)
            canvas = _paint(canvas, _disc(x + shift, y, size, 0.6) * 0.9, (255, 255, 255))
    return canvas


def _meadow(rng: np.random.Generator) -> Array:
    canvas = _clouds(_blend((120, 196, 250), (206, 236, 255)), rng, 2, 0.3)
    canvas = _paint(canvas, _hills(rng, 0.58, 0.04), (126, 198, 96))
    return _paint(canvas, _hills(rng, 0.74, 0.03), (92, 172, 74))


def _desert(rng: np.random.Generator) -> Array:
    canvas = _blend((250, 214, 150), (255, 238, 204))
    canvas = _paint(canvas, _disc(rng.uniform(0.1, 0.9), 0.16, 0.08), (255, 246, 200))
    canvas = _paint(canvas, _hills(rng, 0.56, 0.05), (232, 182, 108))
    return _paint(canvas, _hills(rng, 0.75, 0.04), (214, 156, 84))


def _snow(rng: np.random.Generator) -> Array:
    canvas = _blend((150, 178, 206), (204, 220, 236))
    canvas = _paint(canvas, _hills(rng, 0.6, 0.04), (228, 236, 246))
    canvas = _paint(canvas, _hills(rng, 0.76, 0.03), (248, 251, 255))
    return _dots(canvas, rng, 26, (255, 255, 255), (0.006, 0.014))


def _night(rng: np.random.Generator) -> Array:
    canvas = _dots(
        _blend((14, 20, 58), (44, 56, 112)), rng, 24, (255, 250, 220), (0.004, 0.009), 0.7
    )
    x = rng.uniform(0.12, 0.88)
    canvas = _paint(canvas, _disc(x, 0.15, 0.075), (250, 240, 200))
    return _paint(canvas, _hills(rng, 0.82, 0.03), (20, 30, 52))


def _space(rng: np.random.Generator) -> Array:
    canvas = _blend((10, 6, 24), (20, 10, 40))
    x, y = rng.uniform(0.2, 0.8, 2)
    glow = np.exp(-((_X - x) ** 2 + (_Y - y) ** 2) / 0.06)
    canvas = _paint(canvas, 0.45 * glow, (122, 56, 168))
    return _dots(canvas, rng, 44, (255, 255, 255), (0.003, 0.009))


def _sunset(rng: np.random.Generator) -> Array:
    canvas = _blend((106, 66, 142), (255, 160, 92), _Y * 1.4)
    canvas = _paint(canvas, _disc(rng.uniform(0.2, 0.8), 0.66, 0.13), (255, 226, 130))
    return _paint(canvas, _Y > 0.72, (92, 50, 84))


def _under_water(rng: np.random.Generator) -> Array:
    canvas = _blend((66, 178, 220), (8, 62, 128))
    for _ in range(3):
        x = rng.uniform(0, 1)
        ray = np.abs(_X - x - 0.25 * (_Y - 0.2)) < 0.04
        canvas = _paint(canvas, ray * np.clip(0.3 - 0.35 * _Y, 0, 1), (255, 255, 255))
    canvas = _dots(canvas, rng, 14, (186, 230, 250), (0.008, 0.02))
    return _paint(canvas, _hills(rng, 0.9, 0.02), (196, 178, 126))


def _beach(rng: np.random.Generator) -> Array:
    canvas = _clouds(_blend((130, 206, 250), (214, 240, 255)), rng, 1, 0.2)
    canvas = _paint(canvas, _Y > 0.44, (40, 150, 206))
    canvas = _paint(canvas, _hills(rng, 0.61, 0.012), (240, 250, 255))
    return _paint(canvas, _hills(rng, 0.65, 0.012), (246, 220, 160))


def _sky(rng: np.random.Generator) -> Array:
    return _clouds(_blend((82, 164, 240), (182, 222, 252)), rng, 5, 0.95)


def _forest(rng: np.random.Generator) -> Array:
    canvas = _blend((172, 216, 186), (128, 186, 140))
    for depth, colour in ((0.0, (84, 146, 96)), (0.06, (48, 108, 66))):
        for x in np.arange(-0.05, 1.1, 0.16) + rng.uniform(0, 0.16):
            top = rng.uniform(0.02, 0.22) + depth
            tree = (np.abs(_X - x) < 0.22 * (_Y - top)) & (np.abs(_X - x) < 0.12) & (top < _Y)
            canvas = _paint(canvas, tree, colour)
    return _paint(canvas, _hills(rng, 0.78, 0.015), (72, 96, 52))


def _table(rng: np.random.Generator) -> Array:
    canvas = _blend((240, 222, 196), (226, 202, 170))
    top = rng.uniform(0.6, 0.66)
    canvas = _paint(canvas, top < _Y, (168, 108, 62))
    grain = (np.sin(_Y * 150 + 2 * np.sin(_X * 7 + rng.uniform(0, 6))) > 0.8) & (top < _Y)
    canvas = _paint(canvas, grain * 0.5, (142, 88, 48))
    return _paint(canvas, (top < _Y) & (top + 0.02 > _Y), (192, 130, 80))


_DRAWERS = (
    _meadow, _desert, _snow, _night, _space, _sunset, _under_water, _beach, _sky, _forest, _table,
)  # fmt: skip
assert len(_DRAWERS) == len(SCENES)


def _plain(colour: str, rng: np.random.Generator) -> Array:
    base = np.array(RGB[colour], np.float32) + rng.uniform(-5, 5, 3).astype(np.float32)
    slope = rng.uniform(0, 12) * (0.5 - _Y[..., None])
    return (base + slope).astype(np.float32)


def draw_backgrounds(num_variants: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Returns all backgrounds: uint8 [NUM_BACKGROUNDS, num_variants, 128, 128, 3]."""
    rng = np.random.default_rng(seed)
    kinds = []
    for index in range(len(COLOURS) + len(SCENES)):
        variants = []
        for _ in range(num_variants):
            if index < len(COLOURS):
                drawn = _plain(COLOURS[index], rng)
            else:
                drawn = _DRAWERS[index - len(COLOURS)](rng) + rng.uniform(-6, 6, 3)
            small = drawn.reshape(SIDE, 2, SIDE, 2, 3).mean((1, 3)).clip(0, 255)
            variants.append(small.round().astype(np.uint8))
        kinds.append(np.stack(variants))
    return np.stack(kinds)


def load_backgrounds(file: Path) -> torch.Tensor:
    """Returns those of `main`: float16 [NUM_BACKGROUNDS, variants, 3, 128, 128] in 0..1."""
    sheet = torch.from_numpy(np.array(Image.open(file).convert("RGB")))
    tiles = sheet.unflatten(0, (-1, SIDE)).unflatten(2, (-1, SIDE)).permute(0, 2, 4, 1, 3)
    return tiles.half() / 255


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", type=int, default=32)
    args = parser.parse_args()
    drawn = draw_backgrounds(args.variants)
    sheet = drawn.transpose(0, 2, 1, 3, 4).reshape(len(drawn) * SIDE, -1, 3)
    args.out.mkdir(parents=True, exist_ok=True)
    Image.fromarray(sheet).save(args.out / "backgrounds.webp", quality=95, method=4)


if __name__ == "__main__":
    main()
