"""Who put what where: parts that change hands, modules that several wrap, wrappers over ours.

What `restore` gives back is what was there for its own caller; others keep what is theirs.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable

import diffusers
import pytest
import tiny
import torch
from torch import Tensor, nn

import dit_graphs
from dit_graphs import ConfigError
from dit_graphs.pipelines.acceleration import acceleration_of
from dit_graphs.request_scope import current_request
from dit_graphs.runner import GraphRunner
from dit_graphs.wrapping import runner_of


def _latents(pipe: object, name: str = "sdxl", seed: int = 0) -> Tensor:
    return tiny.latents(pipe, tiny.call_kwargs(name, size=32, steps=5, seed=seed))


def _replays(pipe: object, label: str = "denoiser") -> int:
    return dit_graphs.stats(pipe)["components"][label]["replays"]


def _ours(pipe: object) -> list[str]:
    """Every instance attribute of the pipeline and its modules that is an object of ours."""
    parts = [("pipe", pipe), *pipe.components.items()]
    found = []
    for name, part in parts:
        modules = part.named_modules() if isinstance(part, nn.Module) else [("", part)]
        for path, child in modules:
            for key, value in getattr(child, "__dict__", {}).items():
                if type(value).__module__.startswith("dit_graphs"):
                    found.append(f"{name}.{path}.{key}")
    return found


# Parts that were replaced or taken away.


def test_a_part_taken_from_the_pipeline_is_let_go(caplog: pytest.LogCaptureFixture) -> None:
    pipe = tiny.build("sdxl")
    dit_graphs.accelerate(pipe, backend="recorded")
    _latents(pipe)
    assert "vae" in dit_graphs.stats(pipe)["components"]
    vae = weakref.ref(pipe.vae)
    factor = pipe.vae_scale_factor
    pipe.vae = None
    assert factor == pipe.vae_scale_factor
    with caplog.at_level(logging.INFO, logger="dit_graphs"):
        _latents(pipe)
        _latents(pipe)
    told = [r.getMessage() for r in caplog.records if "parts changed" in r.getMessage()]
    assert told == ["the pipeline's parts changed: released vae, vae:vae.encode; new: nothing"]
    assert not [label for label in dit_graphs.stats(pipe)["components"] if label.startswith("vae")]
    gc.collect()
    assert vae() is None, "a part the user took away is kept alive"


def test_a_replaced_part_is_served_and_the_old_one_let_go(caplog: pytest.LogCaptureFixture) -> None:
    pipe, plain = tiny.build("flux"), tiny.build("flux")
    dit_graphs.accelerate(pipe, backend="recorded")
    _latents(pipe, "flux")
    old, runner = pipe.transformer, runner_of(pipe.transformer)
    for target in (pipe, plain):
        target.transformer = tiny.build("flux", seed=1).transformer
    with caplog.at_level(logging.INFO, logger="dit_graphs"):
        assert torch.equal(_latents(pipe, "flux"), _latents(plain, "flux"))
    told = [r.getMessage() for r in caplog.records if "parts changed" in r.getMessage()]
    assert told == ["the pipeline's parts changed: released denoiser; new: denoiser"]
    assert runner_of(old) is None and not runner.holds_graphs()
    assert not any(type(v).__module__.startswith("dit_graphs") for v in vars(old).values())
    assert runner_of(pipe.transformer) is not None
    assert _replays(pipe) > 0
    kept = weakref.ref(old)
    del old, runner
    gc.collect()
    assert kept() is None
    dit_graphs.restore(pipe)
    assert not _ours(pipe)


def test_a_part_that_goes_does_not_cost_another_its_graphs() -> None:
    """Labels are given in order; the second denoiser must not lose its graphs to the first's."""
    pipe = tiny.build("wan22")
    dit_graphs.accelerate(pipe, backend="recorded")
    _latents(pipe, "wan22")
    second = runner_of(pipe.transformer_2)
    assert second.holds_graphs()
    first, pipe.transformer = pipe.transformer, None
    acceleration_of(pipe).begin(None)
    assert runner_of(pipe.transformer_2) is second and second.holds_graphs()
    assert runner_of(first) is None
    pipe.transformer = first
    acceleration_of(pipe).begin(None)
    assert runner_of(first) is not None and runner_of(pipe.transformer_2) is second
    dit_graphs.restore(pipe)
    assert not _ours(pipe)


def test_a_part_that_cannot_be_wrapped_is_replaced_by_one_that_can() -> None:
    pipe, plain = tiny.build("flux"), tiny.build("flux")
    dit_graphs.accelerate(pipe, backend="recorded")
    good = pipe.transformer
    pipe.transformer = tiny.build("flux").transformer.to("meta")
    acceleration_of(pipe).begin(None)
    assert "denoiser" in dit_graphs.stats(pipe)["refused"]
    pipe.transformer = good
    assert torch.equal(_latents(pipe, "flux"), _latents(plain, "flux"))
    assert dit_graphs.stats(pipe)["refused"] == {}
    assert _replays(pipe) > 0


# Wrappers of others over ours.


def _wrapped(original: Callable[..., object]) -> Callable[..., object]:
    def theirs(*args: object, **kwargs: object) -> object:
        return original(*args, **kwargs)

    theirs.keeps_eager = True
    return theirs


def test_what_somebody_built_on_is_a_mere_passage_after_restore() -> None:
    pipe, plain = tiny.build("sdxl"), tiny.build("sdxl")
    dit_graphs.accelerate(pipe, backend="recorded")
    _latents(pipe)
    runners = [runner_of(pipe.unet), runner_of(pipe.vae, "decode")]
    owners = [
        (pipe, "progress_bar"),
        (pipe, "maybe_free_model_hooks"),
        (pipe, "to"),
        (pipe.vae, "decode"),
        (pipe.unet, "_compiled_call_impl"),
        (pipe.unet, "set_attn_processor"),
    ]
    theirs = [_wrapped(vars(owner)[name]) for owner, name in owners]
    for (owner, name), wrapper in zip(owners, theirs, strict=True):
        vars(owner)[name] = wrapper
    dit_graphs.restore(pipe)
    for (owner, name), wrapper in zip(owners, theirs, strict=True):
        assert vars(owner)[name] is wrapper, f"{name} was somebody else's"
    before = [(runner.stats.replays, runner.stats.eager_calls) for runner in runners]
    seen = []

    def look(pipe: object, step: int, time: object, values: dict) -> dict:
        seen.append(current_request())
        return values

    arguments = {**tiny.call_kwargs("sdxl", size=32, steps=5), "output_type": "pt"}
    mine = pipe(**arguments, callback_on_step_end=look).images
    arguments = {**tiny.call_kwargs("sdxl", size=32, steps=5), "output_type": "pt"}
    assert torch.equal(mine, plain(**arguments).images)
    assert seen == [None] * 5, "no request begins any more"
    assert before == [(runner.stats.replays, runner.stats.eager_calls) for runner in runners]
    assert not any(runner.holds_graphs() for runner in runners)

    dit_graphs.accelerate(pipe, backend="recorded")
    assert torch.equal(_latents(pipe), _latents(plain))
    assert _replays(pipe) > 0
    dit_graphs.restore(pipe)
    for (owner, name), wrapper in zip(owners, theirs, strict=True):
        assert vars(owner)[name] is wrapper


def test_a_wrapper_over_ours_does_not_end_the_service() -> None:
    pipe, plain = tiny.build("flux"), tiny.build("flux")
    dit_graphs.accelerate(pipe, backend="recorded")
    pipe.transformer._compiled_call_impl = _wrapped(pipe.transformer._compiled_call_impl)
    for seed in range(2):
        assert torch.equal(_latents(pipe, "flux", seed), _latents(plain, "flux", seed))
    assert _replays(pipe) > 0


def test_unwrap_below_somebody_elses_wrapper() -> None:
    module = nn.Linear(4, 4)
    with torch.no_grad():
        dit_graphs.wrap(module, backend="recorded")
        for _ in range(4):
            module(torch.randn(2, 4))
        runner = runner_of(module)
        theirs = module._compiled_call_impl = _wrapped(module._compiled_call_impl)
        dit_graphs.unwrap(module)
        assert module._compiled_call_impl is theirs
        assert not runner.holds_graphs()
        calls = runner.stats.replays + runner.stats.eager_calls
        module(torch.randn(2, 4))
        assert runner.stats.replays + runner.stats.eager_calls == calls


# Modules that several wrap.


def test_another_config_that_is_wrong_leaves_the_first_in_force() -> None:
    pipe = tiny.build("flux")
    dit_graphs.accelerate(pipe, backend="recorded")
    runner = runner_of(pipe.transformer)
    pipe.vae.to("meta")
    with pytest.raises(ConfigError, match="meta"):
        dit_graphs.accelerate(pipe, backend="recorded", max_graphs=3)
    assert runner_of(pipe.transformer) is runner
    assert acceleration_of(pipe).config.max_graphs == 16


def test_restore_leaves_what_wrap_put_there() -> None:
    pipe, plain = tiny.build("flux"), tiny.build("flux")
    _latents(pipe, "flux")  # diffusers' own lazy attributes exist
    before = dict(vars(pipe.transformer))
    turned = [1]
    dit_graphs.wrap(pipe.transformer, backend="recorded", max_graphs=2, key=lambda: turned[0])
    mine = runner_of(pipe.transformer)
    wrapped = dict(vars(pipe.transformer))
    dit_graphs.accelerate(pipe, backend="recorded")
    assert runner_of(pipe.transformer) is mine, "one module, one runner"
    assert torch.equal(_latents(pipe, "flux"), _latents(plain, "flux"))
    assert _replays(pipe) > 0
    entries = len(mine.cache.entries)
    turned[0] = 2
    _latents(pipe, "flux")
    assert len(mine.cache.entries) > entries, "wrap's key still counts"
    dit_graphs.restore(pipe)
    assert vars(pipe.transformer) == wrapped
    assert runner_of(pipe.transformer) is mine and mine.holds_graphs()
    dit_graphs.unwrap(pipe.transformer)
    assert vars(pipe.transformer) == before
    assert not mine.holds_graphs() and not _ours(pipe)


def test_unwrap_leaves_what_accelerate_needs() -> None:
    pipe = tiny.build("flux")
    dit_graphs.wrap(pipe.transformer, backend="recorded")
    dit_graphs.accelerate(pipe, backend="recorded")
    dit_graphs.unwrap(pipe.transformer)
    _latents(pipe, "flux")
    assert _replays(pipe) > 0
    dit_graphs.unwrap(pipe.transformer)
    assert runner_of(pipe.transformer) is not None
    dit_graphs.restore(pipe)
    assert not _ours(pipe)


def test_what_diffusers_attaches_counts_for_a_module_that_was_wrapped_before() -> None:
    pipe, plain = tiny.build("flux"), tiny.build("flux")
    dit_graphs.wrap(pipe.transformer, backend="recorded")
    dit_graphs.accelerate(pipe, backend="recorded")
    for target in (pipe, plain):
        target.transformer.enable_layerwise_casting(torch.bfloat16, torch.float32)
    for seed in range(2):
        assert torch.equal(_latents(pipe, "flux", seed), _latents(plain, "flux", seed))
    fallbacks = dit_graphs.stats(pipe)["components"]["denoiser"]["fallbacks"]
    assert set(fallbacks) == {"layerwise_casting"}


def _sharing(config: dict[str, object]) -> tuple[object, object]:
    pipe = tiny.build("sdxl")
    dit_graphs.accelerate(pipe, backend="recorded")
    other = diffusers.StableDiffusionXLImg2ImgPipeline.from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    dit_graphs.accelerate(other, backend="recorded", **config)
    return pipe, other


@pytest.mark.parametrize("config", [{}, {"max_graphs": 3}], ids=["same config", "another"])
@pytest.mark.parametrize("first", [0, 1], ids=["the first", "the second"])
def test_restore_of_one_pipeline_leaves_the_other_served(
    first: int, config: dict[str, object]
) -> None:
    pipe, plain = tiny.build("sdxl"), tiny.build("sdxl")
    before = _ours(pipe)
    pair = _sharing(config)
    pipe = pair[0]
    runner: GraphRunner = runner_of(pipe.unet)
    _latents(pipe)
    assert runner.holds_graphs()
    gone, kept = pair[first], pair[1 - first]
    dit_graphs.restore(gone)
    assert acceleration_of(gone) is None
    assert runner_of(pipe.unet) is runner and runner.holds_graphs()
    with pytest.raises(ConfigError):
        dit_graphs.stats(gone)
    assert _replays(kept) > 0
    kept.unet.set_attn_processor(diffusers.models.attention_processor.AttnProcessor())
    assert not runner._watch._checked, "the one that stays still hears of changes"
    plain.unet.set_attn_processor(diffusers.models.attention_processor.AttnProcessor())
    if kept is pipe:
        assert torch.equal(_latents(pipe), _latents(plain))
    dit_graphs.restore(kept)
    assert _ours(pipe) == before == []
    assert not runner.holds_graphs()
    assert torch.equal(_latents(pipe), _latents(plain))


def test_a_shared_part_says_whose_config_it_has(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="dit_graphs"):
        _sharing({})
        assert not [r for r in caplog.records if "another config" in r.getMessage()]
        pipe, other = _sharing({"max_graphs": 3})
    told = [r.getMessage() for r in caplog.records if "another config" in r.getMessage()]
    parts = {text.partition(": wrapped before")[0] for text in told}
    assert {"denoiser", "vae", "vae:vae.encode", "text_encoder"} <= parts
    assert runner_of(pipe.unet).config.max_graphs == 16
    dit_graphs.restore(pipe)
    dit_graphs.restore(other)
    dit_graphs.accelerate(other, backend="recorded", max_graphs=3)
    assert runner_of(pipe.unet).config.max_graphs == 3


def test_a_module_accelerated_alone_and_in_its_pipeline() -> None:
    pipe, plain = tiny.build("flux"), tiny.build("flux")
    dit_graphs.accelerate(pipe.transformer, backend="recorded")
    dit_graphs.accelerate(pipe, backend="recorded")
    assert torch.equal(_latents(pipe, "flux"), _latents(plain, "flux"))
    dit_graphs.restore(pipe.transformer)
    assert torch.equal(_latents(pipe, "flux"), _latents(plain, "flux"))
    assert _replays(pipe) > 0
    dit_graphs.restore(pipe)
    assert not _ours(pipe)
