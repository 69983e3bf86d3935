"""Warm-up runs the largest call first, by the sizes the pipeline really gives its denoiser."""

from __future__ import annotations

import diffusers
import pytest
import tiny
import torch

import dit_graphs
from dit_graphs.wrapping import runner_of


def _captured(pipe: object, module: str = "unet") -> list[tuple[int, ...]]:
    """The latents' sizes of the denoiser's graphs, in the order of their captures."""
    runner = runner_of(getattr(pipe, module))
    held = runner.cache.held()
    assert all(entry.inputs is not None for entry in held)
    return [tuple(entry.signature.tensors[0].shape[2:]) for entry in held]


def _sdxl(kind: type = diffusers.StableDiffusionXLPipeline) -> object:
    pipe = kind(**tiny.build("sdxl").components, add_watermarker=False)
    pipe.set_progress_bar_config(disable=True)
    return dit_graphs.accelerate(pipe, backend="recorded", components=("denoiser",))


def test_a_call_without_a_size_counts_with_the_models_own() -> None:
    pipe = _sdxl()  # the UNet's sample size is 8: 64 pixels
    sizes = [{"height": 32, "width": 32}, {}, {"height": 96, "width": 64}]
    made = dit_graphs.warmup(pipe, sizes)
    assert _captured(pipe) == [(12, 8), (8, 8), (4, 4)]
    assert len(made) == 3


@pytest.mark.parametrize("calls", [{"height": 32}, "height", 3, None, [3], [{}, "x"]], ids=repr)
def test_calls_of_another_form_are_refused(calls: object) -> None:
    pipe = _sdxl()
    with pytest.raises(dit_graphs.ConfigError, match="expected a list of keyword arguments"):
        dit_graphs.warmup(pipe, calls)
    assert _captured(pipe) == []


@pytest.mark.parametrize("sides", [(32, 64), (64, 32)], ids=str)
def test_a_picture_says_how_large_its_call_is(sides: tuple[int, int]) -> None:
    pipe = _sdxl(diffusers.StableDiffusionXLImg2ImgPipeline)
    images = [torch.rand(1, 3, side, side) for side in sides]
    dit_graphs.warmup(pipe, [{"image": image} for image in images], num_inference_steps=4)
    assert _captured(pipe) == [(8, 8), (4, 4)]


def test_frames_and_batches_count() -> None:
    pipe = tiny.build("wan")
    dit_graphs.accelerate(pipe, backend="recorded", components=("denoiser",))
    calls = [
        {"num_frames": 1, "height": 48, "width": 48},
        {"num_frames": 9, "height": 32, "width": 32},
        {"num_frames": 1, "height": 32, "width": 32, "num_videos_per_prompt": 4},
    ]
    dit_graphs.warmup(pipe, calls, max_sequence_length=32)
    # latents: 3 frames of 4×4, 4 videos of 4×4, 1 frame of 6×6
    assert _captured(pipe, "transformer") == [(1, 4, 4), (3, 4, 4), (1, 6, 6)]


def test_looking_for_the_size_leaves_no_trace() -> None:
    pipe, plain = tiny.build("sdxl"), tiny.build("sdxl")
    dit_graphs.accelerate(pipe, backend="recorded")
    served = [vars(pipe.unet)["_compiled_call_impl"].serve, vars(pipe.vae)["decode"].serve]
    dit_graphs.warmup(pipe, [{"height": 32, "width": 32}, {}], output_type="pt")
    assert served == [
        vars(pipe.unet)["_compiled_call_impl"].serve,
        vars(pipe.vae)["decode"].serve,
    ]
    for label, part in dit_graphs.stats(pipe)["components"].items():
        if label in ("denoiser", "vae"):
            # two sizes with two steps, or one decode, each
            calls = part["replays"] + part["eager_calls"]
            assert calls == (4 if label == "denoiser" else 2), label
    mine, theirs = (
        tiny.latents(each, tiny.call_kwargs("sdxl", size=32, steps=4)) for each in (pipe, plain)
    )
    assert torch.equal(mine, theirs)


def test_an_error_of_the_pipeline_reaches_the_caller_and_leaves_it_served() -> None:
    pipe = _sdxl()
    with pytest.raises(ValueError, match="divisible by 8"):
        dit_graphs.warmup(pipe, [{"height": 33, "width": 32}, {}])
    assert runner_of(pipe.unet) is vars(pipe.unet)["_compiled_call_impl"].serve
    assert dit_graphs.warmup(pipe, [{}])


def test_a_part_without_denoiser_is_warmed_up_too() -> None:
    pipe = tiny.build("sdxl")
    dit_graphs.accelerate(pipe, backend="recorded", components=("vae",))
    sizes = [{"height": 32, "width": 32}, {"height": 64, "width": 64}]
    made = dit_graphs.warmup(pipe, sizes, output_type="pt")
    held = runner_of(pipe.vae, "decode").cache.held()
    assert [entry.signature.tensors[0].shape[-1] for entry in held] == [8, 4]
    assert len(made) == 2


def test_a_part_replaced_just_before_is_the_one_that_is_warmed_up() -> None:
    pipe = _sdxl()
    old, pipe.unet = pipe.unet, tiny.build("sdxl", seed=1).unet
    assert len(dit_graphs.warmup(pipe, [{"height": 32, "width": 32}, {}])) == 2
    assert _captured(pipe) == [(8, 8), (4, 4)]
    assert runner_of(old) is None


def test_a_graph_that_reads_like_an_earlier_one_is_counted() -> None:
    """Two strengths of a scale give two graphs of one description."""
    pipe = _sdxl()
    dit_graphs.warmup(pipe, [{}])
    pipe.unet.odd_scale = 2.0
    assert len(dit_graphs.warmup(pipe, [{}])) == 1
