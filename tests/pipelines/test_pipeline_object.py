"""The pipeline stays the user's object: what accelerate puts on it, what restore takes off it."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from pathlib import Path
from types import MappingProxyType

import diffusers
import pytest
import tiny
import torch
from torch import nn

import dit_graphs
from dit_graphs import ConfigError, GraphConfig
from dit_graphs.wrapping import runner_of


def _state(pipe: object) -> dict[str, object]:
    """Every instance attribute of the pipeline, of its parts and of all their submodules."""
    found: dict[str, object] = {f"pipe.{k}": v for k, v in vars(pipe).items()}
    for name, part in pipe.components.items():
        modules = part.named_modules() if isinstance(part, nn.Module) else [("", part)]
        for path, child in modules:
            for key, value in getattr(child, "__dict__", {}).items():
                found[f"{name}.{path}.{key}"] = dict(value) if isinstance(value, dict) else value
    return found


def _changed(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """Names that came, went, or stand for another object."""
    return [
        name
        for name in {**before, **after}
        if name not in before
        or name not in after
        or not (
            before[name] is after[name]
            or (isinstance(before[name], dict) and before[name] == after[name])
            or (isinstance(before[name], (str, int, float)) and before[name] == after[name])
        )
    ]


@pytest.mark.parametrize("name", tiny.NAMES)
def test_restore_gives_back_exactly_what_was_there(name: str) -> None:
    pipe = tiny.build(name)
    tiny.latents(pipe, tiny.call_kwargs(name, size=32, steps=2))  # lazy tables exist
    before = _state(pipe)
    assert dit_graphs.accelerate(pipe, backend="recorded") is pipe
    tiny.latents(pipe, tiny.call_kwargs(name, size=32, steps=5))
    assert _changed(before, _state(pipe)), "nothing was installed"
    assert dit_graphs.restore(pipe) is pipe
    left = _changed(before, _state(pipe))
    assert [n for n in left if not n.startswith(("scheduler.", "pipe._"))] == []
    assert not any("dit_graphs" in n for n in _state(pipe))
    with pytest.raises(ConfigError, match="accelerate"):
        dit_graphs.stats(pipe)
    plain = tiny.latents(tiny.build(name), tiny.call_kwargs(name, size=32))
    assert torch.equal(tiny.latents(pipe, tiny.call_kwargs(name, size=32)), plain)
    dit_graphs.restore(pipe)


def test_accelerate_is_idempotent_and_another_config_replaces_the_first() -> None:
    pipe = tiny.build("flux")
    dit_graphs.accelerate(pipe, GraphConfig(backend="recorded", max_graphs=3))
    runner = runner_of(pipe.transformer)
    dit_graphs.accelerate(pipe, backend="recorded", max_graphs=3)
    assert runner_of(pipe.transformer) is runner
    dit_graphs.accelerate(pipe, backend="recorded", max_graphs=5)
    assert runner_of(pipe.transformer) is not runner
    assert runner_of(pipe.transformer).config.max_graphs == 5
    with pytest.raises(ConfigError, match="max_graphs"):
        dit_graphs.accelerate(pipe, max_graphs=0)
    assert runner_of(pipe.transformer).config.max_graphs == 5, "a wrong config changed something"


def test_components_left_out_stay_untouched() -> None:
    pipe = tiny.build("sdxl")
    dit_graphs.accelerate(pipe, backend="recorded", components=("denoiser",))
    assert runner_of(pipe.unet) is not None
    assert "decode" not in vars(pipe.vae)
    assert list(dit_graphs.stats(pipe)["components"]) == ["denoiser"]


def test_backends_are_chosen_per_component() -> None:
    pipe = tiny.build("sdxl")
    dit_graphs.accelerate(pipe, backend={"denoiser": "recorded", "vae": "off"})
    tiny.latents(pipe, tiny.call_kwargs("sdxl", size=32, steps=5))
    parts = dit_graphs.stats(pipe)["components"]
    assert parts["denoiser"]["backend"] == "recorded"
    assert parts["vae"]["backend"] == "off"
    assert parts["denoiser"]["replays"] > 0


def test_a_dict_of_components_and_a_bare_module() -> None:
    pipe, plain = tiny.build("flux"), tiny.build("flux")
    parts = {"transformer": pipe.transformer, "scheduler": pipe.scheduler}
    assert dit_graphs.accelerate(parts, backend="recorded") is parts
    arguments = tiny.call_kwargs("flux", size=32, steps=5)
    expected = tiny.latents(plain, tiny.call_kwargs("flux", size=32, steps=5))
    assert torch.equal(tiny.latents(pipe, arguments), expected)
    assert dit_graphs.stats(parts)["components"]["denoiser"]["replays"] > 0
    dit_graphs.restore(parts)
    assert set(parts) == {"transformer", "scheduler"}
    assert runner_of(pipe.transformer) is None

    assert dit_graphs.accelerate(pipe.transformer, backend="recorded") is pipe.transformer
    arguments = tiny.call_kwargs("flux", size=32, steps=5)
    assert torch.equal(tiny.latents(pipe, arguments), expected)
    assert dit_graphs.stats(pipe.transformer)["components"]["denoiser"]["replays"] > 0
    dit_graphs.restore(pipe.transformer)


@pytest.mark.parametrize("made", [dict, MappingProxyType], ids=lambda made: made.__name__)
def test_an_accelerated_dict_of_components_is_what_a_pipeline_is_built_of(made) -> None:
    plain = tiny.build("flux")
    parts = made(tiny.build("flux").components)
    modules = [part for part in parts.values() if isinstance(part, nn.Module)]
    dit_graphs.accelerate(parts, backend="recorded")
    other = dict(parts)
    pipe = type(plain)(**parts)
    pipe.set_progress_bar_config(disable=True)
    arguments = [tiny.call_kwargs("flux", size=32, steps=5) for _ in range(2)]
    assert torch.equal(tiny.latents(pipe, arguments[0]), tiny.latents(plain, arguments[1]))
    assert dit_graphs.stats(parts)["components"]["denoiser"]["replays"] == 2
    with pytest.raises(ConfigError, match="not accelerated"):
        dit_graphs.stats(other)
    assert copy.deepcopy(parts["transformer"]).config == plain.transformer.config
    dit_graphs.restore(parts)
    ours = [v for m in modules for v in vars(m).values() if "dit_graphs" in type(v).__module__]
    assert ours == []


def test_a_dict_whose_parts_were_exchanged_gives_the_old_ones_back_too() -> None:
    old = tiny.build("flux").transformer
    parts = {"transformer": old, "vae": tiny.build("flux").vae}
    before = dict(vars(old))
    dit_graphs.accelerate(parts, backend="recorded")
    parts["transformer"] = tiny.build("flux").transformer
    dit_graphs.restore(parts)
    assert vars(old) == before


def test_pixels_equal_too_and_the_vae_is_served() -> None:
    pipe, plain = tiny.build("sdxl"), tiny.build("sdxl")
    dit_graphs.accelerate(pipe, backend="recorded")
    for seed in range(5):
        mine, theirs = (
            p(**{**tiny.call_kwargs("sdxl", size=32, steps=2, seed=seed), "output_type": "pt"})
            for p in (pipe, plain)
        )
        assert type(mine) is type(theirs)
        assert torch.equal(mine.images, theirs.images)
    assert dit_graphs.stats(pipe)["components"]["vae"]["replays"] >= 2


def test_b39_a_warmed_up_size_is_served_without_another_capture() -> None:
    pipe = tiny.build("flux")
    dit_graphs.accelerate(pipe, backend="recorded", capture="warmup_only")
    sizes = [{"height": 32, "width": 32}, {"height": 64, "width": 32}]
    made = dit_graphs.warmup(pipe, sizes, max_sequence_length=32, guidance_scale=3.5)
    assert sum(text.startswith("denoiser") for text in made) == 2
    denoiser = dit_graphs.stats(pipe)["components"]["denoiser"]
    captures, eager = denoiser["captures"], denoiser["eager_calls"]
    plain = tiny.build("flux")
    for size in ((32, 32), (64, 32)):
        for seed in range(2):
            mine, theirs = (
                tiny.latents(p, tiny.call_kwargs("flux", size=size, steps=4, seed=seed))
                for p in (pipe, plain)
            )
            assert torch.equal(mine, theirs)
    denoiser = dit_graphs.stats(pipe)["components"]["denoiser"]
    assert denoiser["captures"] == captures
    # a compare per graph and leaf group that warm-up's own prompt had not shown
    assert denoiser["eager_calls"] - eager <= 4
    assert denoiser["replays"] >= 12
    tiny.latents(pipe, tiny.call_kwargs("flux", size=48, steps=3))
    assert dit_graphs.stats(pipe)["components"]["denoiser"]["fallbacks"]["warmup_only"] == 3


def test_warmup_refuses_arguments_the_pipeline_does_not_take() -> None:
    pipe = tiny.build("flux")
    dit_graphs.accelerate(pipe, backend="recorded")
    with pytest.raises(ConfigError, match="heigth"):
        dit_graphs.warmup(pipe, [{"heigth": 64}])


def test_disabled_for_a_block() -> None:
    pipe, plain = tiny.build("flux"), tiny.build("flux")
    dit_graphs.accelerate(pipe, backend="recorded")
    tiny.latents(pipe, tiny.call_kwargs("flux", size=32, steps=5))
    before = dit_graphs.stats(pipe)["components"]["denoiser"]["replays"]
    with dit_graphs.disabled(pipe):
        mine = tiny.latents(pipe, tiny.call_kwargs("flux", size=32))
    assert torch.equal(mine, tiny.latents(plain, tiny.call_kwargs("flux", size=32)))
    assert dit_graphs.stats(pipe)["components"]["denoiser"]["replays"] == before
    tiny.latents(pipe, tiny.call_kwargs("flux", size=32))
    assert dit_graphs.stats(pipe)["components"]["denoiser"]["replays"] > before


def test_b28_everything_that_works_on_the_bare_pipeline_works(tmp_path: Path) -> None:
    """Pipelines re-install hooks, save, copy and type-check their parts; none of it may notice."""
    pipe, plain = tiny.build("sdxl"), tiny.build("sdxl")
    dit_graphs.accelerate(pipe, backend="recorded")
    arguments = tiny.call_kwargs("sdxl", size=32, steps=4)
    tiny.latents(pipe, arguments)
    pipe.maybe_free_model_hooks()
    assert list(pipe.components) == list(plain.components)
    assert isinstance(pipe.unet, diffusers.UNet2DConditionModel)
    assert list(pipe.unet.state_dict()) == list(plain.unet.state_dict())
    assert pipe.unet.config == plain.unet.config
    assert pipe.dtype == plain.dtype and pipe.device == plain.device
    assert pipe.vae.enable_slicing() is None and pipe.vae.disable_slicing() is None
    assert pipe.to(torch.float32) is pipe

    other = diffusers.StableDiffusionXLImg2ImgPipeline.from_pipe(pipe)
    assert other.unet is pipe.unet
    pipe.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "model_index.json").read_text())
    plain.save_pretrained(tmp_path / "plain")
    assert saved == json.loads((tmp_path / "plain" / "model_index.json").read_text())
    loaded = diffusers.StableDiffusionXLPipeline.from_pretrained(tmp_path)
    for key, value in plain.unet.state_dict().items():
        assert torch.equal(loaded.unet.state_dict()[key], value)


def test_a_copy_of_an_accelerated_pipeline_is_a_plain_one() -> None:
    pipe = tiny.build("flux")
    dit_graphs.accelerate(pipe, backend="recorded")
    expected = tiny.latents(pipe, tiny.call_kwargs("flux", size=32))
    other = copy.deepcopy(pipe)
    assert runner_of(other.transformer) is None
    before = dit_graphs.stats(pipe)["components"]["denoiser"]
    assert torch.equal(tiny.latents(other, tiny.call_kwargs("flux", size=32)), expected)
    after = dit_graphs.stats(pipe)["components"]["denoiser"]
    assert (after["replays"], after["eager_calls"]) == (before["replays"], before["eager_calls"])
    dit_graphs.accelerate(other, backend="recorded")
    assert torch.equal(tiny.latents(other, tiny.call_kwargs("flux", size=32)), expected)


def test_a_component_replaced_by_the_user_is_served_too() -> None:
    pipe, plain = tiny.build("flux"), tiny.build("flux")
    dit_graphs.accelerate(pipe, backend="recorded")
    tiny.latents(pipe, tiny.call_kwargs("flux", size=32))
    for target in (pipe, plain):
        target.register_modules(transformer=tiny.build("flux", seed=1).transformer)
    old = dit_graphs.stats(pipe)["components"]["denoiser"]["replays"]
    for seed in range(2):
        mine, theirs = (
            tiny.latents(p, tiny.call_kwargs("flux", size=32, steps=5, seed=seed))
            for p in (pipe, plain)
        )
        assert torch.equal(mine, theirs)
    assert runner_of(pipe.transformer) is not None
    assert dit_graphs.stats(pipe)["components"]["denoiser"]["replays"] != old
    dit_graphs.restore(pipe)
    assert runner_of(pipe.transformer) is None


def test_two_pipelines_that_share_their_parts() -> None:
    pipe = tiny.build("sdxl")
    other = diffusers.StableDiffusionXLPipeline(**pipe.components, add_watermarker=False)
    other.set_progress_bar_config(disable=True)
    plain = tiny.build("sdxl")
    dit_graphs.accelerate(pipe, backend="recorded")
    dit_graphs.accelerate(other, backend="recorded")
    for index in range(4):
        target = (pipe, other)[index % 2]
        mine, theirs = (
            tiny.latents(p, tiny.call_kwargs("sdxl", size=32, seed=index)) for p in (target, plain)
        )
        assert torch.equal(mine, theirs)
    dit_graphs.restore(pipe)
    mine, theirs = (tiny.latents(p, tiny.call_kwargs("sdxl", size=32)) for p in (other, plain))
    assert torch.equal(mine, theirs)
    dit_graphs.restore(other)
    assert runner_of(pipe.unet) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_another_dtype_after_graphs_exist(dtype: torch.dtype) -> None:
    pipe, plain = tiny.build("sd3"), tiny.build("sd3")
    dit_graphs.accelerate(pipe, backend="recorded")
    for target in (torch.float32, dtype, torch.float32):
        pipe.to(target)
        plain.to(target)
        for seed in range(2):
            mine, theirs = (
                tiny.latents(p, tiny.call_kwargs("sd3", size=32, steps=4, seed=seed))
                for p in (pipe, plain)
            )
            assert mine.dtype is target and torch.equal(mine, theirs)


def test_the_kill_switch_on_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, plain = tiny.build("z-image"), tiny.build("z-image")
    dit_graphs.accelerate(pipe, backend="recorded")
    monkeypatch.setenv("DIT_GRAPHS", "off")
    mine, theirs = (tiny.latents(p, tiny.call_kwargs("z-image", size=32)) for p in (pipe, plain))
    assert torch.equal(mine, theirs)
    assert dit_graphs.stats(pipe)["components"]["denoiser"]["captures"] == 0


def test_strict_serves_a_pipeline_that_graphs_can_serve() -> None:
    pipe = tiny.build("flux")
    dit_graphs.accelerate(pipe, backend="recorded", strict=True, components=("denoiser",))
    for seed in range(2):
        tiny.latents(pipe, tiny.call_kwargs("flux", size=32, seed=seed))
    pipe.transformer.enable_cache(diffusers.TaylorSeerCacheConfig())
    with pytest.raises(dit_graphs.FallbackError, match="step_cache"):
        tiny.latents(pipe, tiny.call_kwargs("flux", size=32))


def test_first_use_serves_from_the_second_step_on() -> None:
    pipe, plain = tiny.build("wan22"), tiny.build("wan22")
    dit_graphs.accelerate(pipe, backend="recorded", capture="first_use", components=("denoiser",))
    mine, theirs = (tiny.latents(p, tiny.call_kwargs("wan22", size=32)) for p in (pipe, plain))
    assert torch.equal(mine, theirs)
    parts = dit_graphs.stats(pipe)["components"]
    # one call captures; one more is compared, because these timesteps are integers, and only
    # floating-point inputs can be changed at the capture without leaving their range
    assert {label: part["eager_calls"] for label, part in parts.items()} == {
        "denoiser": 2,
        "denoiser:transformer_2": 2,
    }


def test_verify_always_is_equal_and_serves_nothing() -> None:
    pipe, plain = tiny.build("qwen-image"), tiny.build("qwen-image")
    dit_graphs.accelerate(pipe, backend="recorded", verify="always", components=("denoiser",))
    mine, theirs = (tiny.latents(p, tiny.call_kwargs("qwen-image", size=32)) for p in (pipe, plain))
    assert torch.equal(mine, theirs)
    denoiser = dit_graphs.stats(pipe)["components"]["denoiser"]
    assert denoiser["replays"] == 0
    assert denoiser["compares"] >= 2


@pytest.mark.parametrize("name", ["flux", "sdxl", "wan"])
def test_eager_attention_gives_the_same_latents(name: str) -> None:
    pipe, plain = tiny.build(name), tiny.build(name)
    dit_graphs.accelerate(pipe, backend="recorded", attention="eager", components=("denoiser",))
    for seed in range(2):
        mine, theirs = (
            tiny.latents(p, tiny.call_kwargs(name, size=32, seed=seed)) for p in (pipe, plain)
        )
        assert torch.equal(mine, theirs)
    denoiser = dit_graphs.stats(pipe)["components"]["denoiser"]
    assert denoiser["graphs"][0]["breaks"] >= 2
    assert denoiser["replays"] >= 3


def test_weights_go_with_the_pipeline_once_it_is_restored() -> None:
    pipe = tiny.build("sdxl")
    dit_graphs.accelerate(pipe, backend="recorded")
    for _ in range(2):
        pipe(**tiny.call_kwargs("sdxl"))
    parts = pipe.unet, pipe.vae, pipe.text_encoder
    weights = [weakref.ref(next(part.parameters())) for part in parts]
    gc.collect()
    gc.disable()
    try:
        dit_graphs.restore(pipe)
        del pipe, parts
        assert [weight() for weight in weights] == [None] * 3
    finally:
        gc.enable()
