"""From the page's fields to a request, and from a file back to the fields."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import pytest
import tiny
import torch
from demo_studio import a_form, run_job, studio_of
from PIL import Image
from PIL.PngImagePlugin import PngInfo

pytest.importorskip("gradio")

from dit_graphs import GraphConfig
from dit_graphs.app.demo import work
from dit_graphs.app.demo.filling import form_of
from dit_graphs.app.demo.form import Form, Limits, request_of, sizes_of
from dit_graphs.app.demo.layout import FIELDS
from dit_graphs.app.demo.modes import Mode, plans_of
from dit_graphs.app.demo.restoring import restore_form
from dit_graphs.app.demo.starting import start_form
from dit_graphs.app.demo.studio import Studio
from dit_graphs.pipelines.generate import InputError, LoadedPipeline, ModelSpec

PLANS = plans_of(diffusers.ZImagePipeline)
TEXT, IMAGE = PLANS
LIMITS = Limits(side=512, steps=50, images=4)


def never(path: str) -> bool:
    """No input picture may be opened again."""
    return False


def test_open_fields_leave_the_pipelines_defaults() -> None:
    request = request_of(Form(prompt=" a cat "), TEXT, LIMITS)
    assert request.to_mapping() == {"prompt": "a cat"}


def test_every_field_reaches_the_request() -> None:
    request = request_of(a_form(count=3, negative_prompt="blue"), TEXT, LIMITS)
    assert request.to_mapping() == {
        "prompt": "a red heart",
        "negative_prompt": "blue",
        "width": 64,
        "height": 64,
        "num_inference_steps": 4,
        "guidance_scale": 2.0,
        "seed": 7,
        "num_images": 3,
        "set": {"max_sequence_length": 64},
    }


@pytest.mark.parametrize(
    ("fields", "option", "words"),
    [
        ({"prompt": "  "}, "prompt", "say what the picture should show"),
        ({"width": 9000}, "width", "at most 512 here, got 9000"),
        ({"height": 64.5}, "height", "a whole number, got 64.5"),
        ({"height": 0}, "height", "a whole number ≥ 1, got 0"),
        ({"steps": 51}, "num_inference_steps", "at most 50"),
        ({"count": 5}, "num_images", "at most 4"),
        ({"extra": "{"}, "set", "expected JSON"),
        ({"extra": "[1]"}, "set", "expected a JSON object"),
    ],
)
def test_a_wrong_field_is_named_with_what_is_allowed(
    fields: dict[str, object], option: str, words: str
) -> None:
    with pytest.raises(InputError, match=words) as caught:
        request_of(a_form(**fields), TEXT, LIMITS)
    assert caught.value.option == option


@pytest.mark.parametrize(("device", "side"), [("cpu", 1024), ("cuda", 2048)])
def test_a_step_nobody_can_wait_for_is_not_begun(device: str, side: int) -> None:
    """A stop waits for the step at work, and on a CPU that is minutes at 2048 × 2048."""
    pipe = tiny.build("z-image")
    loaded = LoadedPipeline(pipe, ModelSpec(model="unsaved/x"), torch.device(device), {})
    studio = Studio(loaded, GraphConfig(backend="off"))
    try:
        request_of(a_form(width=side), TEXT, studio.limits)
        with pytest.raises(InputError, match=f"at most {side} here"):
            request_of(a_form(width=side + 16), TEXT, studio.limits)
    finally:
        studio.close()


def test_a_mode_that_starts_from_a_picture_wants_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a picture"):
        request_of(a_form(mode=Mode.IMAGE), IMAGE, LIMITS)
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 8)).save(path)
    form = a_form(mode=Mode.IMAGE, images=(str(path),), strength=0.4)
    request = request_of(form, IMAGE, LIMITS)
    assert (request.image, request.strength) == ((str(path),), 0.4)
    # typed before the tab was changed: the text mode takes neither and does not complain
    assert request_of(form, TEXT, LIMITS).image == ()


def test_sizes_of_a_warm_up() -> None:
    assert sizes_of("512x256, 64×64;", LIMITS) == [(512, 256), (64, 64)]
    for wrong in ("", "512", "ax64", "1024x64", "0x64"):
        with pytest.raises(InputError):
            sizes_of(wrong, LIMITS)


def test_the_pages_values_are_read_in_the_order_of_its_fields() -> None:
    values = dict.fromkeys(FIELDS)
    values |= {"prompt": "x", "seed": " 12 ", "steps": 8.0, "image": "p.png"}
    form = form_of(["image", *values.values()])
    assert (form.mode, form.prompt, form.seed, form.steps) == (Mode.IMAGE, "x", 12, 8.0)
    assert form.images == ("p.png",)
    with pytest.raises(InputError, match="a whole number"):
        form_of(["text", *{**values, "seed": "-1"}.values()])


def test_a_file_made_here_restores_the_form_that_made_it() -> None:
    form = a_form(negative_prompt="blue", seed=2**40)
    with studio_of() as studio:
        job = run_job(studio, lambda job: work.generate(studio, form, job))
        path = job.results[0].item.files[0]  # type: ignore[attr-defined]
        restored = restore_form(path, studio, never)
        assert restored.notes == ()
        assert restored.form == a_form(
            negative_prompt="blue", seed=2**40, fps=None, strength=None, count=1
        )
        studio.name = "other/model"
        sidecar = restore_form(path.with_suffix(".json"), studio, never)
        assert sidecar.form == restored.form
        assert "unsaved/ZImagePipeline" in sidecar.notes[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"request": {"control_image": "pose.png"}}, "no field for its control image"),
        (
            {"request": {"last_image": "a.png", "ip_adapter_image": "b.png"}},
            "last image, ip",
        ),
        ({"model": {"scheduler": "UniPCMultistepScheduler"}}, "with another scheduler"),
        ({"model": {"dtype": "float16", "vae_tiling": True}}, "with another dtype, vae_tiling"),
        ({"model": {"device": "cuda:1", "offload": "model"}}, ""),
        ({"pipeline": "ZImageControlNetPipeline"}, "made by ZImageControlNetPipeline"),
        ({}, ""),
    ],
)
def test_what_this_page_cannot_repeat_is_said(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    """It drew another picture from such a file, without a word."""
    with studio_of() as studio:
        record = {
            "format": 1,
            "pipeline": "ZImagePipeline",
            "model": studio.model_settings,
            "request": {"prompt": "x", "seed": 1, "width": 64, "height": 64},
        }
        for name, value in changes.items():
            old = record[name]
            record[name] = {**old, **value} if isinstance(value, dict) else value  # type: ignore[dict-item]
        path = tmp_path / "a.json"
        path.write_text(json.dumps(record), encoding="utf-8")
        notes = restore_form(path, studio, never).notes
    assert len(notes) == (1 if words else 0)
    assert words in "".join(notes)


def test_only_a_png_is_read_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dozens of readers stand behind Pillow's `open`, and a name promises nothing."""
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 8)).save(path, format="TIFF")
    monkeypatch.setattr(Image, "open", lambda *args, **kwargs: pytest.fail("was opened"))
    with studio_of() as studio, pytest.raises(InputError, match="no PNG that can be read"):
        restore_form(path, studio, never)


def test_a_picture_from_elsewhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 8)).save(path)
    with studio_of() as studio, pytest.raises(InputError, match="holds no record"):
        restore_form(path, studio, never)


@pytest.mark.parametrize(
    ("name", "guidance", "steps", "frames"),
    [("z-image", 5.0, 50, None), ("wan", 5.0, 50, 81), ("qwen-image", 4.0, 50, None)],
)
def test_the_page_starts_with_the_pipelines_own_defaults(
    name: str, guidance: float, steps: int, frames: int | None
) -> None:
    """Gradio shows an empty number as 0, and 0 is a guidance too."""
    with studio_of(pipe=tiny.build(name)) as studio:
        form = start_form(studio)
    assert (form.guidance, form.steps, form.num_frames) == (guidance, steps, frames)
    assert form.width
    assert form.height


def test_a_size_that_was_left_open_is_read_from_the_picture(tmp_path: Path) -> None:
    record = {
        "format": 1,
        "pipeline": "ZImagePipeline",
        "model": {"model": "unsaved/ZImagePipeline"},
        "request": {"prompt": "x", "seed": 1},
    }
    info = PngInfo()
    info.add_itxt("dit-graphs", json.dumps(record))
    path = tmp_path / "a.png"
    Image.new("RGB", (48, 32)).save(path, pnginfo=info)
    with studio_of() as studio:
        restored = restore_form(path, studio, never)
    assert (restored.form.width, restored.form.height) == (48, 32)
    assert restored.notes == ()
