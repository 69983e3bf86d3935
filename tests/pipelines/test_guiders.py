"""Guiders of modular pipelines: some put hooks on blocks for one branch of each step."""

from __future__ import annotations

from collections.abc import Callable

import diffusers
import pytest
import tiny
import torch
from both import Both
from diffusers.hooks import LayerSkipConfig
from diffusers.modular_pipelines.qwenimage import QwenImageAutoBlocks
from diffusers.modular_pipelines.wan import WanBlocks
from torch import Tensor

import dit_graphs
from dit_graphs.pipelines.mutators import GUIDER_MUTATORS, guider_mutators

SECOND = {"indices": [1], "fqn": "auto"}
TIMES = {"start": 0.2, "stop": 0.9}


def _skipping() -> object:
    return diffusers.SkipLayerGuidance(
        guidance_scale=3.0,
        skip_layer_guidance_scale=2.0,
        skip_layer_config=LayerSkipConfig(**SECOND),
        **{f"skip_layer_guidance_{name}": value for name, value in TIMES.items()},
    )


def _automatic() -> object:
    config = LayerSkipConfig(**SECOND)
    return diffusers.AutoGuidance(guidance_scale=3.0, auto_guidance_config=config, dropout=None)


def _perturbed() -> object:
    scores = {"skip_attention": False, "skip_attention_scores": True, "skip_ff": False}
    return diffusers.PerturbedAttentionGuidance(
        guidance_scale=3.0,
        perturbed_guidance_scale=2.0,
        perturbed_guidance_config=LayerSkipConfig(**SECOND, **scores),
        **{f"perturbed_guidance_{name}": value for name, value in TIMES.items()},
    )


def _build(blocks: type, name: str, guider: object) -> object:
    pipe = blocks().init_pipeline()
    parts = tiny.build(name).components
    pipe.update_components(**{n: part for n, part in parts.items() if n in pipe.components})
    pipe.update_components(guider=guider)
    pipe.set_progress_bar_config(disable=True)
    return pipe


class Modular(Both):
    """Two modular pipelines; a call gives the pixels."""

    def __init__(self, blocks: type, name: str, guider: Callable[[], object]) -> None:
        super().__init__(lambda: _build(blocks, name, guider()), components=("denoiser",))
        self.name = name

    def _call(self, pipe: object, seed: int, options: dict[str, object]) -> Tensor:
        given = {**tiny.call_kwargs(self.name, seed=seed, **options), "output_type": "pt"}
        known = set(pipe.blocks.input_names)
        given = {name: value for name, value in given.items() if name in known}
        made = pipe(**given, output="videos" if self.name == "wan" else "images")
        return made if isinstance(made, Tensor) else made[0]


@pytest.mark.parametrize(
    ("blocks", "name", "guider"),
    [
        (WanBlocks, "wan", _skipping),
        (WanBlocks, "wan", _automatic),
        (QwenImageAutoBlocks, "qwen-image", _perturbed),
    ],
    ids=["skipped layers", "a worse model", "perturbed attention"],
)
def test_hooks_of_one_branch_are_run(blocks: type, name: str, guider: object) -> None:
    """The branch with hooks is eager, the others of the same step replay."""
    both = Modular(blocks, name, guider)
    for seed, size in ((0, 32), (1, 32), (0, 48), (0, 32)):
        both(seed, size=size, steps=8)
    part = both.part()
    assert part["replays"] >= 20
    assert set(part["fallbacks"]) == {"warming_up", "hooks"}
    assert part["fallbacks"]["hooks"] >= 20


def test_a_guider_exchanged_between_pictures() -> None:
    both = Modular(WanBlocks, "wan", lambda: diffusers.ClassifierFreeGuidance(guidance_scale=3.0))
    plain = both(size=32, steps=6)
    for make in (_skipping, _automatic, _skipping):
        both.change(lambda pipe, make=make: pipe.update_components(guider=make()))
        assert not torch.equal(both(size=32, steps=6), plain)
    guider = both.fast.guider
    assert set(GUIDER_MUTATORS) <= set(vars(guider))
    dit_graphs.restore(both.fast)
    assert not set(GUIDER_MUTATORS) & set(vars(guider))


def test_guiders_that_touch_no_module_are_left_alone() -> None:
    """Else every branch of every step would be looked at anew."""
    touching = {_skipping, _automatic, _perturbed}
    assert all(guider_mutators(make()) == GUIDER_MUTATORS for make in touching)
    for kind in (diffusers.ClassifierFreeGuidance, diffusers.AdaptiveProjectedGuidance):
        assert guider_mutators(kind(guidance_scale=3.0)) == ()
