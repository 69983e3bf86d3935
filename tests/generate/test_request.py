"""A request is checked when it is built, survives JSON, and splits into items that stand alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dit_graphs.pipelines.generate import Adapter, GenerateRequest, InputError, ModelSpec


def _nested(depth: int) -> object:
    value: object = 1.0
    for _ in range(depth):
        value = [value]
    return value


REFUSED = [
    ("height", 0),
    ("height", 64.0),
    ("width", True),
    ("num_frames", -1),
    ("num_inference_steps", 0),
    ("num_images", 0),
    ("num_images", None),
    ("num_images", 10**30),
    ("seed", -1),
    ("seed", 2**63),
    ("guidance_scale", float("nan")),
    ("guidance_scale", float("inf")),
    ("guidance_scale", "high"),
    ("guidance_scale", 10**400),
    ("strength", 1.01),
    ("strength", -0.1),
    ("fps", 0),
    ("prompt", "half a pair: \ud83d"),
    ("negative_prompt", 3),
    ("mask_image", 3),
    ("image", 3),
    ("image", [3]),
    ("image", ["caf\udce9.png"]),
    ("set", [1]),
    ("set", {"sigmas": [float("nan")]}),
    ("set", {"sigmas": {1, 2}}),
    ("set", {"sigmas": _nested(500)}),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_a_wrong_value_names_its_option_and_what_is_allowed(name: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"^{name}: expected ") as caught:
        GenerateRequest.from_mapping({"prompt": "x", name: value})
    assert caught.value.option == name
    assert "got" in caught.value.problem


def test_the_last_seed_of_a_request_is_the_largest_one() -> None:
    assert GenerateRequest(seed=2**63 - 3, num_images=3).single(2).seed == 2**63 - 1
    with pytest.raises(InputError, match=rf"≤ {2**63 - 3}, got {2**63 - 2}$"):
        GenerateRequest(seed=2**63 - 2, num_images=3)


def test_an_unknown_key_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"no such key; a request has prompt, .*num_frames"):
        GenerateRequest.from_mapping({"prompt": "x", "frames": 3})


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "prompt": st.text(),
            "negative_prompt": st.text(),
            "height": st.integers(1, 4096),
            "num_images": st.integers(1, 9),
            "seed": st.integers(0, 2**40),
            "strength": st.floats(0, 1),
            "guidance_scale": st.floats(-20, 20),
            "image": st.lists(st.text(min_size=1), max_size=3),
            "set": st.dictionaries(st.text(), st.none() | st.integers() | st.lists(st.text())),
        },
    )
)
def test_a_request_survives_json(values: dict[str, object]) -> None:
    request = GenerateRequest.from_mapping(values)
    through_json = json.loads(json.dumps(request.to_mapping()))
    assert GenerateRequest.from_mapping(through_json) == request


def test_zero_is_a_value_and_not_a_gap() -> None:
    request = GenerateRequest(prompt="x", strength=0.0, guidance_scale=0.0, seed=0)
    assert request.to_mapping() == {
        "prompt": "x",
        "strength": 0.0,
        "guidance_scale": 0.0,
        "seed": 0,
    }
    assert request.with_defaults({"strength": 0.9, "height": 64}).strength == 0.0


def test_item_i_has_its_own_seed_and_no_siblings() -> None:
    request = GenerateRequest(prompt="x", seed=7, num_images=3)
    assert [request.single(i).seed for i in range(3)] == [7, 8, 9]
    assert all(request.single(i).num_images == 1 for i in range(3))


@pytest.mark.parametrize(
    ("text", "path", "scale"),
    [
        ("a.safetensors", "a.safetensors", 1.0),
        ("a.safetensors:0.5", "a.safetensors", 0.5),
        ("owner/name:0", "owner/name", 0.0),
        (r"C:\loras\a.safetensors", r"C:\loras\a.safetensors", 1.0),
        (r"C:\loras\a.safetensors:2", r"C:\loras\a.safetensors", 2.0),
    ],
)
def test_adapter_text(text: str, path: str, scale: float) -> None:
    assert Adapter.parse("lora", text) == Adapter(path, scale)


@pytest.mark.parametrize("text", ["a.safetensors:strong", ":0.5", ""])
def test_adapter_text_without_a_number_or_path_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^lora: expected PATH:SCALE"):
        Adapter.parse("lora", text)


def test_a_model_spec_survives_json_with_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    spec = ModelSpec(model="model", lora=(Adapter("a.safetensors", 0.25),), vae_tiling=True)
    values = json.loads(json.dumps(spec.to_mapping()))
    monkeypatch.chdir("/")
    again = ModelSpec.from_mapping(values)
    assert again.model == str(tmp_path / "model")
    assert again.lora == (Adapter(str(tmp_path / "a.safetensors"), 0.25),)
    assert again.vae_tiling and again.dtype == "auto"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "/nowhere"),
        ("model", "missing.safetensors"),
        ("dtype", "int8"),
        ("device", "tpu"),
        ("model", 5),
        ("base", 5),
        ("pipeline", 5),
        ("variant", 5),
        ("vae_tiling", "no"),
        ("device", 5),
        ("device", "cuda:x"),
        ("device", "cuda:01"),
        ("device", "cuda:99999999999999999999"),
        ("offload", "some"),
        ("lora", ["missing.safetensors:1"]),
        ("lora", ["./folder/missing:1"]),
        ("lora", "a:1"),
        ("lora", ["owner/name:nan"]),
        ("lora", ["owner/name:1e400"]),
        ("ip_adapter", "owner/name:-inf"),
        ("ip_adapter", "missing.bin"),
        ("quality", 3),
    ],
)
def test_a_wrong_model_word_is_refused_before_anything_loads(field: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        ModelSpec.from_mapping({"model": "owner/name", field: value})
    assert caught.value.option == field


def test_a_folder_without_an_index_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no model_index.json"):
        ModelSpec(model=str(tmp_path))
