"""The bundled model as it ships: it loads, stays small, names its sources and draws what is asked.

Knows the training by its log only. Surprise: the card is compared with what its script writes, so a
number that was typed in, or weights that changed without a new card, fail here.
"""

from __future__ import annotations

import json

import pytest
import torch
from diffusers import DiffusionPipeline, ZImagePipeline
from PIL import Image

from dit_graphs.app import demo_model
from dit_graphs.app.demo_model.training import card

FOLDER = demo_model.path().parent
MAX_BYTES = 16_000_000
MAX_GRID_BYTES = 600_000


@pytest.fixture(scope="module")
def pipe() -> ZImagePipeline:
    loaded = DiffusionPipeline.from_pretrained(demo_model.path())
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="module")
def defaults() -> dict[str, int | float]:
    return json.loads((demo_model.path() / "dit_graphs.json").read_text())


def _draw(pipe: ZImagePipeline, prompt: str, defaults: dict[str, int | float]) -> torch.Tensor:
    """Returns the picture of seed 0 in 0..1: [3, 128, 128]."""
    generator = torch.Generator().manual_seed(0)
    return pipe(prompt, generator=generator, output_type="pt", **defaults).images[0].float()


def _centre_and_border(picture: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the mean colour of the middle 32 x 32 pixels and of an 8-pixel frame: [3] each."""
    outside = torch.ones(picture.shape[1:], dtype=torch.bool)
    outside[8:-8, 8:-8] = False
    return picture[:, 48:80, 48:80].mean((1, 2)), picture[:, outside].mean(1)


def test_the_folder_is_there_and_is_a_stock_pipeline(pipe: ZImagePipeline) -> None:
    assert demo_model.path().is_dir()
    assert type(pipe) is ZImagePipeline


def test_what_ships_is_small() -> None:
    shipped = [
        file
        for file in FOLDER.rglob("*")
        if file.is_file()
        and not file.is_relative_to(FOLDER / "training")
        and "__pycache__" not in file.parts
    ]
    assert any(file.name == "diffusion_pytorch_model.safetensors" for file in shipped)
    assert sum(file.stat().st_size for file in shipped) <= MAX_BYTES


def test_a_red_heart_is_red_before_something_light(
    pipe: ZImagePipeline, defaults: dict[str, int | float]
) -> None:
    assert defaults["num_inference_steps"] == 8
    centre, border = _centre_and_border(_draw(pipe, "a red heart", defaults))
    red, green, blue = centre.tolist()
    assert red > 0.7 and red > green + 0.3 and red > blue + 0.3, centre
    assert border.min() > 0.6, border


def test_the_prompt_decides_the_colour(
    pipe: ZImagePipeline, defaults: dict[str, int | float]
) -> None:
    """The check above must not hold for whatever the model draws."""
    centre, border = _centre_and_border(_draw(pipe, "a turtle under water", defaults))
    assert centre[0] < centre[1] + 0.3, centre
    assert border.min() < 0.6, border


def test_the_notice_names_both_licences() -> None:
    notice = " ".join((FOLDER / "NOTICE").read_text().split())
    for words in (
        "Fluent Emoji",
        "Copyright (c) Microsoft Corporation",
        "emojibase-data",
        "Copyright (c) 2017-2019 Miles Johnson",
        "Permission is hereby granted, free of charge",
    ):
        assert words in notice
    assert notice.count("MIT License") == 2


def test_the_card_is_what_its_script_writes() -> None:
    assert (FOLDER / "README.md").read_text() == card.render()


def test_the_grid_shows_every_prompt_at_twice_its_size() -> None:
    file = FOLDER / "grid.png"
    assert file.stat().st_size <= MAX_GRID_BYTES
    with Image.open(file) as grid:
        assert grid.size == (6 * 256, 4 * 256)
