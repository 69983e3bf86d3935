"""What cannot be loaded is said in one sentence that names the option and what would do."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import diffusers
import pytest
import tiny
import torch
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save_file

from dit_graphs.pipelines.generate import (
    GenerateRequest,
    InputError,
    ModelSpec,
    accepted_names,
    check_reference,
    check_sizes,
    generate,
    load_pipeline,
    resolve_class,
)
from dit_graphs.pipelines.generate.errors import is_out_of_memory
from dit_graphs.pipelines.generate.setup import _adapter_file


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdxl")
    tiny.build("sdxl").save_pretrained(folder, variant="fp16")
    return folder


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)


def test_a_hub_out_of_reach_is_said_at_once_and_as_such(no_network: None) -> None:
    """The hub's library tries for half a minute, then says that the repository lacks a file."""
    start = time.perf_counter()
    with pytest.raises(InputError) as caught:
        resolve_class(ModelSpec(model="owner/name"))
    assert time.perf_counter() - start < 5
    assert caught.value.option == "model"
    assert caught.value.problem == (
        "'owner/name' is no folder here and was not downloaded before, and the hub at "
        "huggingface.co cannot be reached: Name or service not known"
    )


def test_what_was_downloaded_is_used_without_the_hub(no_network: None) -> None:
    place = Path(constants.HF_HUB_CACHE) / "models--owner--name"
    (place / "snapshots" / "0").mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0")
    (place / "snapshots" / "0" / "model_index.json").write_text(
        '{"_class_name": "ZImagePipeline", "_diffusers_version": "0.38.0"}'
    )
    assert resolve_class(ModelSpec(model="owner/name")) is diffusers.ZImagePipeline


def test_the_other_components_of_a_file_are_named_with_the_option_for_them(
    no_network: None, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"model.diffusion_model.x": torch.zeros(1)}, path)
    with pytest.raises(InputError, match=r"^base: the other components of .* come from 'stable-"):
        resolve_class(ModelSpec(model=str(path)))


def test_a_file_cut_short_is_said_to_be_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(InputError, match=r"^model: '.*x.safetensors' cannot be read: "):
        resolve_class(ModelSpec(model=str(path)))


@pytest.mark.parametrize("index", ["[]", "{}", '"x"', "[" * 100_000, "{"])
def test_an_index_that_names_no_pipeline_is_said_to_be_one(tmp_path: Path, index: str) -> None:
    (tmp_path / "model_index.json").write_text(index)
    with pytest.raises(InputError, match=r"^model: .*(names no pipeline|cannot be loaded)"):
        resolve_class(ModelSpec(model=str(tmp_path)))


def test_more_than_any_memory_is_out_of_memory() -> None:
    for number in (2**40, 2**62):
        with pytest.raises(RuntimeError) as caught:
            torch.zeros(number)
        assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(("asked", "got"), [(None, "'none'"), ("bf16", "'bf16'")])
def test_a_wrong_variant_lists_those_the_folder_has(
    sdxl: Path, asked: str | None, got: str
) -> None:
    with pytest.raises(InputError, match=rf"^variant: expected fp16 for '.*', got {got}$"):
        load_pipeline(ModelSpec(model=str(sdxl), variant=asked))


@pytest.mark.parametrize("name", ["WanPipeline", "FluxPipeline"])
def test_a_class_that_does_not_fit_the_model_is_named(sdxl: Path, name: str) -> None:
    spec = ModelSpec(model=str(sdxl), pipeline=name, variant="fp16")
    with pytest.raises(InputError, match=rf"^pipeline: '.*' cannot be loaded as {name}: "):
        load_pipeline(spec)


def test_a_file_that_does_not_fit_its_base_is_named(sdxl: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(tiny.build("flux").transformer.state_dict(), path)
    spec = ModelSpec(model=str(path), base=str(sdxl), variant="fp16")
    with pytest.raises(InputError, match=r"^base: '.*x.safetensors' cannot be loaded beside '"):
        load_pipeline(spec)


@pytest.mark.parametrize(
    ("name", "own", "wrong"),
    [
        ("z-image", diffusers.ZImagePipeline, {"height": 100}),
        ("z-image", diffusers.ZImageImg2ImgPipeline, {"height": 100, "width": 64}),
        ("sdxl", diffusers.StableDiffusionXLPipeline, {"width": 33, "height": 64}),
        ("wan", diffusers.WanPipeline, {"height": 40, "width": 64}),
        ("sd3", diffusers.StableDiffusion3Pipeline, {"height": 60}),
        ("flux", diffusers.FluxPipeline, None),
        ("qwen-image", diffusers.QwenImagePipeline, None),
    ],
)
def test_a_size_is_refused_without_a_weight(
    name: str, own: type[diffusers.DiffusionPipeline], wrong: dict[str, int] | None, tmp_path: Path
) -> None:
    """The folder has no weights left; what the loaded pipeline takes must pass all the same."""
    tiny.build(name).save_pretrained(tmp_path)
    for path in tmp_path.rglob("*.safetensors"):
        path.unlink()
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    spec = ModelSpec(model=str(tmp_path))
    given: dict[str, object] = {"prompt": "x"}
    if "image" in accepted_names(own):
        given["image"] = str(tmp_path / "a.png")
    right = GenerateRequest.from_mapping({**given, "height": 64, "width": 64})
    check_sizes(spec, own, [right])
    if wrong is not None:
        bad = GenerateRequest.from_mapping({**given, **wrong})
        with pytest.raises(InputError, match=r"refuses it: .*(divisible|multiple)") as caught:
            check_sizes(spec, own, [right, bad])
        assert "height" in caught.value.option


@pytest.mark.parametrize(
    ("own", "option"),
    [
        (diffusers.StableDiffusionXLInstructPix2PixPipeline, "image"),
        (diffusers.StableDiffusionXLControlNetPipeline, "control_image"),
    ],
)
def test_a_picture_that_is_missed_is_named_as_it_is_given(
    own: type[diffusers.DiffusionPipeline], option: str, sdxl: Path, tmp_path: Path
) -> None:
    """Each says `image`, of which one is typed as --control-image; both said it after loading."""
    if option == "control_image":
        pipe = tiny.build("sdxl")
        control = diffusers.ControlNetModel.from_unet(pipe.unet)
        keys, _ = own._get_signature_keys(own)
        parts = {key: part for key, part in pipe.components.items() if key in keys}
        sdxl = tmp_path
        own(**parts, controlnet=control).save_pretrained(sdxl)
    with pytest.raises(InputError, match="refuses it: ") as caught:
        check_sizes(ModelSpec(model=str(sdxl)), own, [GenerateRequest(prompt="x")])
    assert caught.value.option == option


def test_an_adapters_folder_stands_for_its_one_weight_file(tmp_path: Path) -> None:
    encoder = tmp_path / "models" / "image_encoder"
    encoder.mkdir(parents=True)
    (encoder / "config.json").touch()
    (encoder / "model.safetensors").touch()
    with pytest.raises(InputError, match="expected a folder with a weight file, got"):
        _adapter_file(str(tmp_path))
    (tmp_path / "models" / "a.bin").touch()
    assert _adapter_file(str(tmp_path)) == "models/a.bin"
    (tmp_path / "models" / "a.safetensors").touch()
    assert _adapter_file(str(tmp_path)) == "models/a.safetensors"
    (tmp_path / "models" / "b.safetensors").touch()
    with pytest.raises(InputError, match=r"expected .*models/a.safetensors or .*/b.safetensors"):
        _adapter_file(str(tmp_path))


def test_an_adapter_and_its_reference_picture_belong_together(tmp_path: Path) -> None:
    """Each alone was a traceback from deep inside the denoiser or the encoder."""
    own = diffusers.StableDiffusionXLPipeline
    alone = GenerateRequest(prompt="x")
    with pytest.raises(InputError, match=r"^ip_adapter_image: an IP-Adapter needs one"):
        check_reference(own, alone, has_adapter=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(InputError, match=r"^ip_adapter: a reference picture needs one"):
        generate(tiny.build("sdxl"), "x", ip_adapter_image=str(tmp_path / "a.png"))
    check_reference(own, alone, has_adapter=False)
    check_reference(diffusers.ZImagePipeline, alone, has_adapter=True)


def test_a_package_a_pipeline_forgot_to_look_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tiny.build("z-image")

    def encode(*_: object, **__: object) -> None:
        ftfy  # type: ignore[name-defined] # noqa: B018, F821

    monkeypatch.setattr(pipe, "encode_prompt", encode)
    with pytest.raises(InputError, match=r"^model: ZImagePipeline needs a .*: pip install ftfy$"):
        generate(pipe, "x", height=32, width=32)
    monkeypatch.setattr(pipe, "encode_prompt", lambda *_, **__: nowhere)  # noqa: F821
    with pytest.raises(NameError, match="nowhere"):
        generate(pipe, "x", height=32, width=32)
