"""The bundled model writes the captions it was taught, from graphs on any machine."""

from __future__ import annotations

from pathlib import Path

import diffusers as df
import pytest
import torch

import dit_graphs

WEIGHTS = Path(dit_graphs.__file__).parent.parent / "app" / "demo_model" / "weights"
NAMES = ("cat", "pizza", "rocket")
CALL = {
    "height": 128,
    "width": 128,
    "num_inference_steps": 2,
    "guidance_scale": 2.0,
    "max_sequence_length": 64,
    "output_type": "pt",
}


@pytest.fixture(scope="module")
def pipe() -> df.DiffusionPipeline:
    pipe = df.DiffusionPipeline.from_pretrained(WEIGHTS)
    pipe.set_progress_bar_config(disable=True)
    return dit_graphs.accelerate(pipe, backend="recorded", components=("text_encoder",))


@pytest.mark.parametrize("name", NAMES)
def test_a_short_prompt_becomes_a_caption_of_the_same_thing(pipe, name):
    caption = dit_graphs.rewrite_prompt(pipe, f"a {name}", temperature=0)
    assert caption.startswith("a 3d illustration of ") and name in caption
    assert len(caption.split()) > 12
    with dit_graphs.disabled(pipe):
        assert dit_graphs.rewrite_prompt(pipe, f"a {name}", temperature=0) == caption


def test_a_caption_is_drawn_as_without_graphs(pipe):
    """Rewritten, encoded and drawn: the same pixels as the plain pipeline's."""

    def draw():
        caption = dit_graphs.rewrite_prompt(pipe, "a cat", seed=3)
        return pipe(caption, generator=torch.Generator().manual_seed(0), **CALL).images

    with dit_graphs.disabled(pipe):
        plain = draw()
    for _ in range(4):
        assert torch.equal(draw(), plain)
    assert dit_graphs.stats(pipe)["components"]["text_encoder"]["replays"] >= 1


def test_writing_comes_from_graphs(pipe):
    before = dit_graphs.stats(pipe)["components"]["decode"]
    dit_graphs.rewrite_prompt(pipe, "a cat", temperature=0)
    after = dit_graphs.stats(pipe)["components"]["decode"]
    assert after["replays"] > before["replays"] + 15
    assert after["eager_calls"] == before["eager_calls"]
