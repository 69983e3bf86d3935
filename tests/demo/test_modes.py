"""What a pipeline class can be asked for, read from its signature."""

from __future__ import annotations

import diffusers
import pytest

from dit_graphs.app.demo.modes import Mode, plans_of


@pytest.mark.parametrize(
    ("name", "modes"),
    [
        ("ZImagePipeline", [Mode.TEXT, Mode.IMAGE]),
        ("StableDiffusionXLPipeline", [Mode.TEXT, Mode.IMAGE]),
        ("QwenImagePipeline", [Mode.TEXT, Mode.IMAGE]),
        ("FluxPipeline", [Mode.TEXT, Mode.IMAGE]),
        ("SanaPipeline", [Mode.TEXT]),
        ("Flux2KleinPipeline", [Mode.TEXT, Mode.EDIT]),
        ("FluxKontextPipeline", [Mode.TEXT, Mode.EDIT]),
        ("QwenImageEditPipeline", [Mode.EDIT]),
        ("ZImageImg2ImgPipeline", [Mode.IMAGE, Mode.TEXT]),
        ("StableDiffusionXLInpaintPipeline", [Mode.IMAGE, Mode.TEXT]),
        ("WanPipeline", [Mode.VIDEO]),
        ("WanImageToVideoPipeline", [Mode.VIDEO]),
    ],
)
def test_modes_of_a_class(name: str, modes: list[Mode]) -> None:
    assert [plan.mode for plan in plans_of(getattr(diffusers, name))] == modes


def test_image_to_image_uses_the_partner_class() -> None:
    text, image = plans_of(diffusers.ZImagePipeline)
    assert text.pipeline_class is diffusers.ZImagePipeline
    assert image.pipeline_class is diffusers.ZImageImg2ImgPipeline
    assert image.needs_image
    assert "strength" in image.takes


def test_a_class_that_draws_a_part_anew_needs_a_mask_and_no_other_does() -> None:
    masked, text = plans_of(diffusers.FluxInpaintPipeline)
    assert (masked.needs_mask, text.needs_mask) == (True, False)
    assert not any(plan.needs_mask for plan in plans_of(diffusers.FluxPipeline))


def test_only_a_video_of_a_picture_needs_one() -> None:
    (words,) = plans_of(diffusers.WanPipeline)
    (picture,) = plans_of(diffusers.WanImageToVideoPipeline)
    assert not words.takes_image
    assert picture.takes_image
    assert picture.needs_image
