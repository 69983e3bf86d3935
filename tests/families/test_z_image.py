"""Z-Image: one graph for all prompts within one multiple of 32 tokens, with eager's bits."""

from __future__ import annotations

import pytest
import tiny
import torch
from diffusers import DiffusionPipeline
from torch import Tensor
from torch.utils._pytree import tree_map_only
from twin import Twin, Where
from where import graphing

import dit_graphs
from benchmarks.sweep import CASES
from dit_graphs import ConfigError
from dit_graphs.app import demo_model

__all__ = ["graphing"]

KEY = "ZImageTransformer2DModel"


def _call(seed: int, *lengths: int, width: int = 16) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "x": [draw(16, 1, 16, width) for _ in lengths],
        "t": torch.rand(len(lengths), generator=generator),
        "cap_feats": [draw(length, 16) for length in lengths],
    }


def _twin(where: Where) -> Twin:
    with torch.no_grad():
        return Twin(CASES[KEY].build(), where)


def _placed(twin: Twin, inputs: dict[str, object]) -> dict[str, object]:
    device = twin.where.device
    placed = tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs)
    assert isinstance(placed, dict)
    return placed


def _serve(twin: Twin, *lengths: int, seed: int = 0, steps: int = 4) -> None:
    prompts = _placed(twin, _call(1000 + seed, *lengths))["cap_feats"]
    with torch.no_grad(), dit_graphs.request():
        for step in range(steps):
            inputs = _placed(twin, _call(10 * seed + step, *lengths))
            twin(**{**inputs, "cap_feats": prompts})


def test_prompts_within_one_multiple_of_32_share_a_graph(graphing: Where) -> None:
    twin = _twin(graphing)
    for seed, length in enumerate((5, 17, 31, 32, 1, 5)):
        _serve(twin, length, seed=seed)
    assert twin.graphs == 1 and twin.captures == 1
    # plain, observed, compared; then one compare for a prompt's first new values
    assert twin.replays >= 18
    for seed, length in enumerate((33, 40, 64)):
        _serve(twin, length, seed=seed)
    assert twin.graphs == 2, "the next multiple has its own"
    assert set(twin.fallbacks) == {"warming_up"}


@pytest.mark.parametrize("lengths", [(5, 17), (31, 2, 9)], ids=str)
def test_a_batch_of_ragged_prompts_in_one_multiple_is_one_signature(
    lengths: tuple[int, ...], graphing: Where
) -> None:
    twin = _twin(graphing)
    _serve(twin, *lengths)
    _serve(twin, *reversed(lengths), seed=1)
    _serve(twin, *(n + 1 for n in lengths), seed=2)
    assert twin.graphs == 1


def test_a_batch_of_prompts_in_different_multiples(graphing: Where) -> None:
    twin = _twin(graphing)
    for seed, lengths in enumerate(((5, 33), (20, 64), (33, 5), (60, 31))):
        _serve(twin, *lengths, seed=seed)
    assert twin.graphs == 2, "which sample is the longer one is part of the shapes"
    assert set(twin.fallbacks) == {"warming_up"}


def test_the_same_prompt_for_several_pictures(graphing: Where) -> None:
    twin = _twin(graphing)
    for seed in range(3):
        prompt = _placed(twin, _call(seed, 7, 7))["cap_feats"][0]
        with torch.no_grad(), dit_graphs.request():
            for step in range(4):
                inputs = _placed(twin, _call(10 * seed + step, 7, 7))
                twin(**{**inputs, "cap_feats": [prompt, prompt]})
    assert twin.graphs == 1 and twin.replays >= 6


def test_a_prompt_edited_in_place_between_steps(graphing: Where) -> None:
    twin = _twin(graphing)
    prompts = _placed(twin, _call(0, 5))["cap_feats"]
    with torch.no_grad(), dit_graphs.request():
        for step in range(8):
            if step == 5:
                prompts[0].mul_(0.5)
            twin(**{**_placed(twin, _call(step, 5)), "cap_feats": prompts})
    assert twin.graphs == 1 and twin.replays >= 4


def test_inference_mode_has_no_versions_and_still_the_same_bits(graphing: Where) -> None:
    twin = _twin(graphing)
    with torch.inference_mode():
        for step, length in enumerate((5, 5, 9, 9, 31, 5)):
            twin(**_placed(twin, _call(step, length)))
    assert twin.graphs == 1


@pytest.mark.parametrize("words", [(1, 4, 20), (40, 60, 45)], ids=["one multiple", "two"])
def test_the_tiny_pipeline_uses_one_graph_for_prompts_of_many_lengths(
    words: tuple[int, ...],
) -> None:
    plain, fast = tiny.build("z-image"), tiny.build("z-image")
    dit_graphs.accelerate(fast, backend="recorded", components=("denoiser",))
    for seed, count in enumerate(words):
        arguments = {"size": 32, "steps": 4, "prompt": "a" * count, "negative_prompt": "b"}
        expected = tiny.latents(plain, tiny.call_kwargs("z-image", seed=seed, **arguments))
        got = tiny.latents(fast, tiny.call_kwargs("z-image", seed=seed, **arguments))
        assert torch.equal(got, expected)
    report = dit_graphs.stats(fast)["components"]["denoiser"]
    lengths = {graph["signature"] for graph in report["graphs"]}
    assert len(report["graphs"]) == len(lengths) <= 2
    assert report["replays"] >= 8


def test_the_bundled_model_draws_any_short_prompt_from_one_graph() -> None:
    pipes = [DiffusionPipeline.from_pretrained(demo_model.path()) for _ in range(2)]
    for pipe in pipes:
        pipe.set_progress_bar_config(disable=True)
    plain, fast = pipes
    dit_graphs.accelerate(fast, backend="recorded", components=("denoiser",))

    def latents(pipe: DiffusionPipeline, prompt: str) -> Tensor:
        found = pipe(
            prompt,
            height=64,
            width=64,
            num_inference_steps=4,
            guidance_scale=2.0,
            max_sequence_length=64,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
            return_dict=False,
        )[0]
        assert isinstance(found, Tensor)
        return found

    for prompt in ("a red heart", "a cat", "two green apples on a table", "sun"):
        assert torch.equal(latents(fast, prompt), latents(plain, prompt))
    report = dit_graphs.stats(fast)["components"]["denoiser"]
    assert report["captures"] == 1 and report["replays"] >= 8


def test_the_omni_mode_is_left_alone() -> None:
    from dit_graphs.pipelines.families.z_image import ZImage

    family = ZImage(CASES[KEY].build())
    nested = {"x": [[torch.zeros(1)]], "cap_feats": [[torch.zeros(3, 16)]]}
    assert family.prepare(nested) is nested


def test_prompt_buckets_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="another picture"):
        dit_graphs.wrap(CASES[KEY].build(), backend="recorded", prompt_buckets=(32, 64))
    pipe = tiny.build("z-image")
    with pytest.raises(ConfigError, match="prompt_buckets: Z-Image"):
        dit_graphs.accelerate(pipe, backend="recorded", prompt_buckets=(32, 64))
    assert "_compiled_call_impl" not in vars(pipe.transformer), "nothing is left behind"
