"""Latents to colours by a fitted straight line."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from dit_graphs.app.demo.preview import Previewer


def _picture(latents: torch.Tensor, mixing: torch.Tensor) -> Image.Image:
    """The picture a linear decoder would make: colour = mixing @ channels + 0.5, 4x larger."""
    colours = torch.einsum("chw,cr->hwr", latents, mixing).add(0.5).clamp(0, 1)
    pixels = (colours.numpy() * 255).round().astype(np.uint8)
    return Image.fromarray(pixels).resize((64, 64), Image.Resampling.NEAREST)


def test_a_linear_decoder_is_learnt_from_two_pictures() -> None:
    torch.manual_seed(0)
    mixing = torch.randn(4, 3) * 0.05
    previewer = Previewer()
    for _ in range(2):
        latents = torch.randn(4, 16, 16)
        previewer.learn(latents[None], _picture(latents, mixing))
    unseen = torch.randn(4, 16, 16)
    guess = previewer.picture(unseen[None], 64, 64)
    assert guess is not None
    assert (guess.size, guess.mode) == ((16, 16), "RGB")
    truth = np.asarray(_picture(unseen, mixing).resize((16, 16), Image.Resampling.BOX), float)
    assert np.abs(np.asarray(guess, float) - truth).mean() < 4


def test_before_the_first_picture_only_brightness_is_shown() -> None:
    guess = Previewer().picture(torch.randn(1, 4, 8, 8), 64, 64)
    assert guess is not None
    assert guess.mode == "L"


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((1, 4, 8, 12), (12, 8)),  # a picture
        ((1, 4, 5, 8, 12), (12, 8)),  # a video: its middle frame
        ((1, 96, 64), (12, 8)),  # packed patches, 8 rows of 12 in a picture of 768x512
    ],
)
def test_every_usual_layout(shape: tuple[int, ...], size: tuple[int, int]) -> None:
    guess = Previewer().picture(torch.randn(shape), 768, 512)
    assert guess is not None
    assert guess.size == size


def test_an_unknown_layout_shows_nothing() -> None:
    assert Previewer().picture(torch.randn(1, 97, 64), 768, 512) is None
    assert Previewer().picture(torch.full((1, 4, 8, 8), torch.nan), 64, 64) is None
