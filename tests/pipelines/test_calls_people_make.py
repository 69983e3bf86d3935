"""What people attach to a pipeline and change from call to call: every result stays plain's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import cast

import diffusers
import pytest
import tiny
import torch
from both import Both, picture
from diffusers.models.attention_processor import IPAdapterAttnProcessor
from diffusers.models.embeddings import ImageProjection
from torch import Tensor

from benchmarks.weights import randomise

CROSS = 64  # of the tiny SDXL's UNet
SDXL = {"prompt": "a red heart", "num_inference_steps": 5}


def _of(kind: type, name: str, **more: Callable[[], object]) -> Callable[[], object]:
    """Builds a pipeline of class `kind` from the parts of a tiny one and from new ones."""

    def make() -> object:
        added = {part: build() for part, build in more.items()}
        pipe = kind(**{**tiny.build(name).components, **added})
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return make


# IP-Adapter.
def _adapter_weights(unet: diffusers.UNet2DConditionModel) -> dict[str, dict[str, Tensor]]:
    """As an IP-Adapter file: keys and values of every cross attention, and a projection."""
    layers: dict[str, Tensor] = {}
    crossing = [name for name in unet.attn_processors if name.endswith("attn2.processor")]
    for index, name in enumerate(crossing):
        width = unet.get_submodule(name.removesuffix(".processor")).to_q.out_features
        made = IPAdapterAttnProcessor(hidden_size=width, cross_attention_dim=CROSS, scale=1.0)
        randomise(made, seed=index)
        for half in ("to_k_ip", "to_v_ip"):
            weight = made.state_dict()[f"{half}.0.weight"]
            layers[f"{2 * index + 1}.{half}.weight"] = weight
    projection = ImageProjection(CROSS, CROSS, num_image_text_embeds=4)
    randomise(projection, seed=99)
    named = projection.state_dict()
    proj = {name.replace("image_embeds.", "proj."): value for name, value in named.items()}
    return {"image_proj": proj, "ip_adapter": layers}


def _with_ip_adapter() -> object:
    pipe = tiny.build("sdxl")
    pipe.unet._load_ip_adapter_weights([_adapter_weights(pipe.unet)])
    return pipe


def _scaled(value: float) -> Callable[[object], object]:
    return lambda pipe: pipe.set_ip_adapter_scale(value)


def test_ip_adapter_strengths_in_turn() -> None:
    both = Both(_with_ip_adapter)
    embeds = [torch.randn(2, 1, CROSS, generator=torch.Generator().manual_seed(3))]
    options = {**SDXL, "height": 32, "width": 32, "ip_adapter_image_embeds": embeds}
    found = []
    for strength in (0.0, 0.5, 1.0, 0.5):
        both.change(_scaled(strength))
        found.append(both(**options))
    assert torch.equal(found[1], found[3])
    assert len({tuple(made.flatten().tolist()) for made in found}) == 3
    other = [torch.randn(2, 1, CROSS, generator=torch.Generator().manual_seed(4))]
    assert not torch.equal(both(**{**options, "ip_adapter_image_embeds": other}), found[3])

    def fade(pipe: object, step: int, time: object, tensors: dict[str, Tensor]) -> dict:
        pipe.set_ip_adapter_scale((0.5, 0.5, 1.0, 0.0)[min(step, 3)])
        return tensors

    both.change(_scaled(0.5))
    faded = both(**options, callback_on_step_end=fade)
    assert not torch.equal(faded, found[1])
    both.check_served(10)


# ControlNet.
def _controlnet() -> diffusers.ControlNetModel:
    unet = tiny.build("sdxl").unet
    model = diffusers.ControlNetModel.from_unet(
        unet, conditioning_embedding_out_channels=(8, 16, 16, 16)
    )
    randomise(model.eval(), seed=7)
    return model


@pytest.mark.parametrize("number", [1, 2], ids=["one", "two"])
def test_controlnets_of_any_strength_and_for_part_of_the_steps(number: int) -> None:
    def build() -> object:
        return _controlnet() if number == 1 else [_controlnet() for _ in range(number)]

    make = _of(diffusers.StableDiffusionXLControlNetPipeline, "sdxl", controlnet=build)
    both = Both(make, components=("denoiser",))
    found = []
    for seed, strength, end, guess in (
        (0, 0.5, 1.0, False), (1, 1.0, 1.0, False), (0, 0.5, 0.6, False),
        (0, 0.5, 1.0, True), (0, 0.5, 1.0, False),
    ):  # fmt: skip
        shown = [picture(seed + index) for index in range(number)]
        strengths = [strength] * number
        found.append(
            both(
                **SDXL,
                image=shown[0] if number == 1 else shown,
                controlnet_conditioning_scale=strength if number == 1 else strengths,
                control_guidance_end=end,
                guess_mode=guess,
            )
        )
    assert torch.equal(found[0], found[4])
    assert not any(torch.equal(found[0], other) for other in found[1:4])
    both.check_served(5, "denoiser", "denoiser:controlnet")


# Memory formats and precision.
def test_channels_last_before_graphs_and_under_them() -> None:
    both = Both(lambda: tiny.build("sdxl"))
    options = {**SDXL, "height": 32, "width": 64}
    both(**options)
    for order in (torch.channels_last, torch.contiguous_format):
        both.change(lambda pipe, order=order: pipe.unet.to(memory_format=order))
        both.change(lambda pipe, order=order: pipe.vae.to(memory_format=order))
        for seed in range(2):
            both(seed, **options, output_type="np")
    both.check_served(10)


@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_autocast_around_a_pipeline(name: str) -> None:
    both = Both(lambda: tiny.build(name))
    options = tiny.call_kwargs(name, size=32, steps=5)
    del options["generator"]
    plain = both(**options)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            lower = both(**options)
        assert not torch.equal(lower.float(), plain.float())
        assert torch.equal(both(**options), plain)
    both.check_served(10)


# Strengths, sizes, frames.
STARTING = [
    ("sdxl", diffusers.StableDiffusionXLImg2ImgPipeline),
    ("flux", diffusers.FluxImg2ImgPipeline),
    ("sd3", diffusers.StableDiffusion3Img2ImgPipeline),
    ("z-image", diffusers.ZImageImg2ImgPipeline),
    ("qwen-image", diffusers.QwenImageImg2ImgPipeline),
]


@pytest.mark.parametrize(("name", "kind"), STARTING, ids=[name for name, _ in STARTING])
def test_extreme_strengths(name: str, kind: type) -> None:
    """All steps, one step, all again; too few for any step is each pipeline's own answer."""
    both = Both(_of(kind, name), components=("denoiser",))
    options = tiny.call_kwargs(name, size=32, steps=5)
    taken = inspect.signature(kind.__call__).parameters
    for unwanted in ["generator", *(word for word in options if word not in taken)]:
        options.pop(unwanted, None)
    options["image"] = picture(1, 32, 32)
    found = [both(**options, strength=value) for value in (1.0, 0.99, 0.2, 0.6, 1.0)]
    assert torch.equal(found[0], found[4])
    assert not torch.equal(found[2], found[3])
    answers = []
    for pipe in (both.fast, both.plain):
        generator = torch.Generator().manual_seed(0)
        try:
            made = pipe(**options, strength=0.0, generator=generator, return_dict=False)
            answers.append(made[0].flatten().tolist())
        except Exception as error:
            answers.append(f"{type(error).__name__}: {error}")
    assert answers[0] == answers[1]
    assert torch.equal(both(**options, strength=1.0), found[0])
    both.check_served(8)


def test_numbers_of_frames_that_are_no_multiple_of_four_and_one() -> None:
    """Wan rounds them: 6 and 7 frames are those of 5, and find its graph."""
    both = Both(lambda: tiny.build("wan"), components=("denoiser",))
    options = tiny.call_kwargs("wan", size=32, steps=4)
    for unwanted in ("generator", "num_frames"):
        del options[unwanted]
    found = {number: both(**options, num_frames=number) for number in (5, 6, 7, 1, 9, 5)}
    assert torch.equal(found[5], found[6]) and torch.equal(found[5], found[7])
    assert found[9].shape != found[5].shape != found[1].shape
    assert both.part()["captures"] == 3
    both.check_served(10)


@pytest.mark.parametrize("name", ["sdxl", "qwen-image", "z-image"])
def test_batches_of_one_to_four_prompts(name: str) -> None:
    both = Both(lambda: tiny.build(name), components=("denoiser",))
    texts = ["a red heart", "x", "a blue star on white", "two words"]
    options = tiny.call_kwargs(name, size=32, steps=4)
    del options["generator"]
    for number in (1, 2, 3, 4, 2, 1):
        options |= {"prompt": texts[:number], "negative_prompt": ["bad"] * number}
        assert len(both(**options)) == number
    both.check_served(10)


# Editing.
def test_edits_of_pictures_of_equal_area_and_other_sides() -> None:
    """64 × 32 and 32 × 64 have as many tokens; only positions tell them apart."""
    both = Both(_of(diffusers.FluxKontextPipeline, "flux", image_encoder=lambda: None,
                    feature_extractor=lambda: None), components=("denoiser",))  # fmt: skip
    options = {"prompt": "a heart", "num_inference_steps": 5, "max_sequence_length": 32}
    found = []
    for seed, (height, width) in enumerate([(64, 32), (32, 64), (64, 32)]):
        shown = picture(seed % 2, height, width)
        size = {"height": height, "width": width, "max_area": height * width}
        found.append(both(**options, image=shown, _auto_resize=False, **size))
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(both(**options, height=64, width=32, max_area=2048), found[0])
    both.check_served(5)


def test_edits_of_one_and_of_two_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each picture adds its tokens and its size to the arguments; prompts differ in length."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as home

    monkeypatch.setattr(home, "VAE_IMAGE_SIZE", 32 * 32)
    monkeypatch.setattr(home, "CONDITION_IMAGE_SIZE", 32 * 32)
    make = _of(diffusers.QwenImageEditPlusPipeline, "qwen-image", processor=lambda: None)
    both = Both(make, components=("denoiser",))

    def embedded(seed: int, length: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        text = torch.randn(1, length, tiny.HIDDEN, generator=generator)
        return {"prompt_embeds": text, "prompt_embeds_mask": torch.ones(1, length).long()}

    negative = {f"negative_{name}": value for name, value in embedded(9, 4).items()}
    found = []
    for number, length in ((1, 7), (2, 7), (2, 11), (1, 7)):
        shown = [picture(index, 32, 32) for index in range(number)]
        options = {"image": shown, "true_cfg_scale": 2.0, "num_inference_steps": 4}
        found.append(both(**options, **embedded(1, length), **negative, height=32, width=32))
    assert torch.equal(found[0], found[3])
    assert len({tuple(cast(Tensor, made).flatten().tolist()) for made in found}) == 3
    both.check_served(5)
