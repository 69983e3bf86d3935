"""Which class draws from a picture, and the size the picture gets on the way there."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest
import tiny
from PIL import Image

import dit_graphs
from dit_graphs.pipelines.generate import (
    GenerateRequest,
    LoadedPipeline,
    generate,
    generate_batch,
    open_images,
    partner_class,
    serving_class,
)
from dit_graphs.pipelines.generate.fitting import fitted
from dit_graphs.pipelines.generate.run import as_loaded

SMALL = {"num_inference_steps": 2, "set": {"max_sequence_length": 32}, "seed": 1}
PICTURE = {"image": ("a.png",)}
MASKED = {**PICTURE, "mask_image": "b.png"}


@pytest.fixture
def wide(tmp_path: Path) -> str:
    path = tmp_path / "wide.png"
    Image.effect_noise((75, 41), 80).convert("RGB").save(path)
    return str(path)


@pytest.mark.parametrize(
    ("own", "fields", "expected"),
    [
        ("ZImagePipeline", {}, "ZImagePipeline"),
        ("ZImagePipeline", PICTURE, "ZImageImg2ImgPipeline"),
        ("ZImagePipeline", MASKED, "ZImageInpaintPipeline"),
        ("ZImagePipeline", {"mask_image": "b.png"}, "ZImagePipeline"),
        ("ZImageImg2ImgPipeline", PICTURE, "ZImageImg2ImgPipeline"),
        ("ZImageImg2ImgPipeline", MASKED, "ZImageInpaintPipeline"),
        ("StableDiffusionXLPipeline", PICTURE, "StableDiffusionXLImg2ImgPipeline"),
        ("StableDiffusionXLPipeline", MASKED, "StableDiffusionXLInpaintPipeline"),
        ("StableDiffusionXLControlNetPipeline", PICTURE, "StableDiffusionXLControlNetPipeline"),
        (
            "StableDiffusionControlNetPipeline",
            {**PICTURE, "control_image": "b.png"},
            "StableDiffusionControlNetImg2ImgPipeline",
        ),
        ("QwenImageEditPipeline", PICTURE, "QwenImageEditPipeline"),
        ("QwenImageEditPipeline", MASKED, "QwenImageEditInpaintPipeline"),
        ("Flux2KleinPipeline", PICTURE, "Flux2KleinPipeline"),
        ("WanPipeline", PICTURE, "WanPipeline"),
        ("SanaPipeline", PICTURE, "SanaPipeline"),
    ],
)
def test_the_class_a_request_needs(own: str, fields: dict[str, object], expected: str) -> None:
    request = GenerateRequest.from_mapping({"prompt": "x", **fields})
    assert serving_class(getattr(diffusers, own), request).__name__ == expected


def test_every_class_of_the_tables_keeps_what_starts_from_its_kind() -> None:
    assert partner_class(diffusers.ZImageImg2ImgPipeline, "text") is diffusers.ZImagePipeline
    assert partner_class(diffusers.FluxKontextPipeline, "image") is None
    assert partner_class(diffusers.WanPipeline, "image") is None


@pytest.mark.parametrize(
    ("name", "own", "step"),
    [
        ("z-image", diffusers.ZImageImg2ImgPipeline, 16),
        ("qwen-image", diffusers.QwenImageImg2ImgPipeline, 16),
        ("sd3", diffusers.StableDiffusion3Img2ImgPipeline, 16),
    ],
)
def test_a_size_left_open_is_the_pictures_own_as_the_pipeline_allows(
    name: str, own: type[diffusers.DiffusionPipeline], step: int, wide: str
) -> None:
    """75 × 41 pixels; latents of an eighth of a side in patches of two: multiples of sixteen."""
    components = tiny.build(name).components
    keys, _ = own._get_signature_keys(own)
    pipe = own(**{key: part for key, part in components.items() if key in keys})

    def size(**given: int) -> tuple[int | None, int | None]:
        request = GenerateRequest.from_mapping({"prompt": "x", "image": wide, **given})
        request, inputs = fitted(pipe, request, open_images(request))
        assert inputs[0].image.size == (request.width, request.height)
        return request.width, request.height

    assert size() == (75 // step * step, 41 // step * step)
    assert size(width=32) == (32, 17 // step * step)  # 41 · 32 / 75 = 17.5
    assert size(height=32) == (58 // step * step, 32)  # 75 · 32 / 41 = 58.5
    assert size(width=32, height=64) == (32, 64)


def test_a_size_asked_of_a_pipeline_that_takes_the_pictures_becomes_the_pictures(wide: str) -> None:
    components = tiny.build("sdxl").components
    own = diffusers.StableDiffusionXLImg2ImgPipeline
    keys, _ = own._get_signature_keys(own)
    pipe = own(**{key: part for key, part in components.items() if key in keys})
    small = {"num_inference_steps": 2, "seed": 1, "strength": 0.5, "image": wide}
    (item,) = generate(pipe, "x", width=32, height=48, **small)
    assert item.media[0].describe() == {"width": 32, "height": 48}
    assert item.resized == ("wide.png 75x41 -> 32x48",)
    (item,) = generate(pipe, "x", **small)
    assert item.media[0].describe()["width"] == 75 // 8 * 8 and not item.resized


def test_an_edit_and_a_video_get_the_picture_as_it_is(wide: str) -> None:
    request = GenerateRequest.from_mapping({"prompt": "x", "image": wide, "width": 32})
    opened = open_images(request)
    for own in (diffusers.QwenImageEditPipeline, diffusers.WanImageToVideoPipeline):
        same, inputs = fitted(object.__new__(own), request, opened)
        assert same == request and inputs == opened


def test_the_library_draws_from_a_picture_and_leaves_the_pipeline_alone(wide: str) -> None:
    pipe = dit_graphs.accelerate(tiny.build("z-image"), backend="recorded")
    before = dit_graphs.stats(pipe)["components"].keys()
    (item,) = generate(pipe, "x", image=wide, strength=0.5, **SMALL)
    assert item.record["pipeline"] == "ZImageImg2ImgPipeline"
    assert item.record["model"]["pipeline"] == "ZImageImg2ImgPipeline"
    assert item.graph_use.replays + item.graph_use.eager_calls > 0
    assert type(pipe) is diffusers.ZImagePipeline
    assert dit_graphs.stats(pipe)["components"].keys() == before
    plain = diffusers.ZImageImg2ImgPipeline(**tiny.build("z-image").components)
    (same,) = generate(plain, "x", image=wide, strength=0.5, **SMALL)
    assert same.media[0].sha256 == item.media[0].sha256


def test_a_loaded_pipeline_keeps_its_partner(wide: str, tmp_path: Path) -> None:
    loaded = as_loaded(tiny.build("z-image"))
    assert isinstance(loaded, LoadedPipeline)
    requests = [
        GenerateRequest.from_mapping({"prompt": "x", "height": 32, "width": 32, **SMALL}),
        GenerateRequest.from_mapping({"prompt": "x", "image": wide, **SMALL}),
    ]
    report = generate_batch(loaded, requests, output=tmp_path / "out")
    assert not report.failures
    (partner,) = loaded.partners.values()
    assert partner.pipe.transformer is loaded.pipe.transformer
    again = generate_batch(loaded, requests, output=tmp_path / "out")
    assert again.num_skipped == 2
    assert list(loaded.partners.values()) == [partner]
