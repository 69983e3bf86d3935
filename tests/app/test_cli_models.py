"""Models of several kinds through the command line: adapters, schedulers, single files, video.

Rows B22, B24, B52, B54 and B73 of the public bug log: LoRA strengths without effect, strengths that
leave no step, frames that are rounded, records that do not bring back what they say.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import diffusers
import pytest
import tiny
import torch
from cli_process import MODEL, Done, run_many
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from PIL import Image
from safetensors.torch import save_file

SMALL = ["--seed", "1", "--num-inference-steps", "2", *MODEL]
VIDEO = ["--height", "32", "--width", "32", "--num-inference-steps", "1", "--seed", "1"]
EDIT = ["--pipeline", "ZImageImg2ImgPipeline", "--image", "in.png", "--strength"]


def _bundled() -> Path:
    from dit_graphs.app import demo_model

    return Path(MODEL[1]) if MODEL else demo_model.path()


def _prepare(folder: Path) -> None:
    """Input pictures, LoRA files, a single file and two tiny models."""
    Image.new("RGB", (128, 128), (200, 30, 30)).save(folder / "red.png")
    Image.new("RGB", (128, 128), (30, 30, 200)).save(folder / "in.png")
    pipe = diffusers.ZImagePipeline.from_pretrained(_bundled())
    weights = {k: v.contiguous() for k, v in pipe.transformer.state_dict().items()}
    save_file(weights, folder / "denoiser.safetensors")
    torch.manual_seed(0)
    pipe.transformer.add_adapter(
        LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False)
    )
    layers = get_peft_model_state_dict(pipe.transformer)
    pipe.save_lora_weights(folder, transformer_lora_layers=layers, weight_name="lora.safetensors")
    save_file({"unet.x.lora_A.weight": torch.zeros(4, 8)}, folder / "foreign.safetensors")
    tiny.build("wan").save_pretrained(folder / "wan")
    tiny.build("sdxl").save_pretrained(folder / "sdxl")
    tiny.build("qwen-image").save_pretrained(folder / "qwen")


def _commands() -> dict[str, list[str]]:
    tiles = ["--vae-tiling", "--vae-slicing"]
    single = ["--model", "denoiser.safetensors", "--base", str(_bundled())]
    size = ["--height", "128", "--width", "128", "--set", "max_sequence_length=64"]
    single += [*size, "--guidance-scale", "2", "--seed", "1", "--num-inference-steps", "2"]
    qwen = ["x", "--model", "qwen", *VIDEO]
    sdxl = ["x", "--model", "sdxl", *VIDEO]
    commands = {
        "plain": ["x", *SMALL],
        "lora 0": ["x", *SMALL, "--lora", "lora.safetensors:0"],
        "lora half": ["x", *SMALL, "--lora", "lora.safetensors:0.5"],
        "lora one": ["x", *SMALL, "--lora", "lora.safetensors"],
        "lora half again": ["--from", "lora half/x-1.json"],
        "lora foreign": ["x", *SMALL, "--lora", "foreign.safetensors"],
        "single file": ["x", *single],
        "edit": ["x", *SMALL, *EDIT, "0.5"],
        "edit all": ["x", *SMALL, *EDIT, "1"],
        "edit none": ["x", *SMALL, *EDIT, "0"],
        "edit tiled": ["x", *SMALL, *EDIT, "0.5", *tiles],
        "edit again": ["--from", "edit/x-1.png"],
        "edit changed": ["--from", "edit/x-1.png"],
        "edit other": ["--from", "edit/x-1.png", "--image", "red.png"],
        "wan": ["x", "--model", "wan", "--num-frames", "7", *VIDEO],
        "wan again": ["--from", "wan/x-1.json"],
        "wan one": ["x", "--model", "wan", "--num-frames", "1", *VIDEO],
        "qwen 1": [*qwen, "--negative-prompt", "y", "--guidance-scale", "1"],
        "qwen 4": [*qwen, "--negative-prompt", "y", "--guidance-scale", "4"],
        "qwen no negative": [*qwen, "--guidance-scale", "4"],
        "ddim": [*sdxl, "--scheduler", "DDIMScheduler"],
        "ddim again": ["--from", "ddim/x-1.png"],
        "no scheduler": [*sdxl, "--scheduler", "FlowMatchEulerDiscreteScheduler"],
        "edit gone": ["--from", "edit/x-1.png"],
    }
    return {
        name: ["generate", *words, "--output", name.replace(" again", "")]
        for name, words in commands.items()
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Done]]:
    folder = tmp_path_factory.mktemp("models")
    _prepare(folder)
    commands = _commands()
    flat: list[tuple[str, list[str]]] = []
    for name, words in commands.items():
        if name == "edit changed":
            flat.append(("", ["!copy", "red.png", "in.png"]))
        if name == "edit gone":
            flat.append(("", ["!remove", "in.png"]))
        flat.append((name, words))
    results = run_many([words for _, words in flat], folder)
    return folder, {name: done for (name, _), done in zip(flat, results, strict=True) if name}


def _pixels(made: tuple[Path, dict[str, Done]], name: str) -> bytes:
    assert made[1][name].code == 0, made[1][name].err
    with Image.open(made[0] / name / "x-1.png") as picture:
        return picture.tobytes()


def test_b22_strength_zero_is_no_lora_and_each_strength_is_its_own(
    made: tuple[Path, dict[str, Done]],
) -> None:
    pixels = [_pixels(made, f"lora {name}") for name in ("0", "half", "one")]
    assert pixels[0] == _pixels(made, "plain")
    assert len(set(pixels)) == 3


def test_b24_lora_weights_that_match_nothing_are_an_error_and_not_the_base_model(
    made: tuple[Path, dict[str, Done]],
) -> None:
    done = made[1]["lora foreign"]
    assert done.code == 2
    assert "--lora: 'foreign.safetensors'" in done.err
    assert not (made[0] / "lora foreign").exists()


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("lora half again", "lora half/x-1.json"),
        ("edit again", "edit/x-1.png"),
        ("wan again", "wan/x-1.json"),
        ("ddim again", "ddim/x-1.png"),
    ],
)
def test_b73_every_kind_is_made_again_with_the_same_bytes(
    made: tuple[Path, dict[str, Done]], name: str, source: str
) -> None:
    done = made[1][name]
    assert done.code == 0, done.out + done.err
    assert done.out.splitlines()[-1] == f"same bytes as {source}"
    kept = [p for p in (made[0] / source).parent.iterdir() if p.suffix in (".png", ".mp4")]
    assert len(kept) == 2
    assert kept[0].read_bytes() == kept[1].read_bytes()


def test_a_changed_input_is_said_and_a_new_one_is_used(
    made: tuple[Path, dict[str, Done]],
) -> None:
    changed, other = made[1]["edit changed"], made[1]["edit other"]
    assert changed.code == 1
    assert "in.png has changed since" in changed.err
    assert "not the same as edit/x-1.png:" in changed.out
    assert re.search(r"^  inputs: ", changed.out, re.M)
    assert other.code == 0 and "request.image" in other.out


def test_a_missing_input_is_refused_before_the_model_is_loaded(
    made: tuple[Path, dict[str, Done]],
) -> None:
    done = made[1]["edit gone"]
    assert (done.code, done.out) == (2, "")
    assert "--image: the input file is missing: " in done.err and "in.png" in done.err
    assert not (made[0] / "edit gone").exists()


def test_b52_a_strength_that_leaves_no_step_is_refused(
    made: tuple[Path, dict[str, Done]],
) -> None:
    done = made[1]["edit none"]
    assert done.code == 2 and "--strength" in done.err
    assert _pixels(made, "edit") != _pixels(made, "edit all")


def test_vae_modes_draw(made: tuple[Path, dict[str, Done]]) -> None:
    assert len(_pixels(made, "edit tiled")) == 128 * 128 * 3
    record = json.loads((made[0] / "edit tiled" / "x-1.json").read_text())["record"]
    assert record["model"]["vae_tiling"] and record["model"]["vae_slicing"]


def test_a_denoiser_in_a_file_of_its_own_draws_the_same(
    made: tuple[Path, dict[str, Done]],
) -> None:
    assert _pixels(made, "single file") == _pixels(made, "plain")


def test_b54_rounded_frames_are_said_and_recorded(made: tuple[Path, dict[str, Done]]) -> None:
    done = made[1]["wan"]
    assert done.code == 0, done.err
    assert "warning: --num-frames: asked for 7, the pipeline used 5" in done.err
    sidecar = json.loads((made[0] / "wan" / "x-1.json").read_text())
    assert sidecar["record"]["request"]["num_frames"] == 7
    assert sidecar["files"][0]["num_frames"] == 5
    assert (made[0] / "wan one" / "x-1.png").exists()
    assert "asked for" not in made[1]["wan one"].err


def test_guidance_acts_as_true_cfg_and_says_when_it_cannot(
    made: tuple[Path, dict[str, Done]],
) -> None:
    assert _pixels(made, "qwen 1") != _pixels(made, "qwen 4")
    assert "acts only beside a negative prompt" in made[1]["qwen no negative"].err


def test_a_scheduler_is_replaced_or_the_possible_ones_are_listed(
    made: tuple[Path, dict[str, Done]],
) -> None:
    assert made[1]["ddim"].code == 0
    done = made[1]["no scheduler"]
    assert done.code == 2
    assert "DDIMScheduler, DDPMScheduler" in done.err and "UniPCMultistepScheduler" in done.err
