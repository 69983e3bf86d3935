"""Adapters: a strength is host data that no argument shows, and each call must honour it.

Tiny real pipelines with peft adapters made on the spot; no file is read.
"""

from __future__ import annotations

import pytest
import tiny
import torch
from peft import LoraConfig
from torch import Tensor

import dit_graphs

NAME = "flux"


class Pair:
    """An accelerated tiny pipeline and a plain one that gets the same adapters."""

    def __init__(self, *adapters: str, accelerate_first: bool = True) -> None:
        self.fast, self.plain = tiny.build(NAME), tiny.build(NAME)
        if accelerate_first:
            dit_graphs.accelerate(self.fast, backend="recorded")
        for seed, adapter in enumerate(adapters, start=1):
            for pipe in (self.fast, self.plain):
                _add(pipe, adapter, seed)
        if not accelerate_first:
            dit_graphs.accelerate(self.fast, backend="recorded")

    def both(self, method: str, *args: object, **kwargs: object) -> None:
        for pipe in (self.fast, self.plain):
            getattr(pipe, method)(*args, **kwargs)

    def latents(self, **extra: object) -> Tensor:
        """The accelerated pipeline's latents, which are the plain one's."""
        mine, theirs = (
            tiny.latents(pipe, {**tiny.call_kwargs(NAME, steps=6, size=32), **extra})
            for pipe in (self.fast, self.plain)
        )
        assert torch.equal(mine, theirs)
        return mine

    @property
    def denoiser(self) -> dict[str, object]:
        return dit_graphs.stats(self.fast)["components"]["denoiser"]


def _add(pipe: object, adapter: str, seed: int, rank: int = 2, **options: object) -> None:
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=["to_q", "to_k", "to_v"], **options)
    pipe.transformer.add_adapter(config, adapter_name=adapter)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in pipe.transformer.named_parameters():
            if f".{adapter}." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
@pytest.mark.parametrize("accelerate_first", [True, False])
def test_b20_each_strength_is_its_own_and_a_returning_one_is_known(accelerate_first: bool) -> None:
    """The scale is a Python float in the layer: baked into a graph, it would stay for ever."""
    pair = Pair("a", "b", accelerate_first=accelerate_first)
    pair.both("set_adapters", ["a"], [1.0])
    found = {}
    for weight in (0.0, 0.3, 1.0, 0.3, 0.0):
        pair.both("set_adapters", ["a"], [weight])
        latents = pair.latents()
        assert torch.equal(latents, found.setdefault(weight, latents))
    assert len({latents.sum().item() for latents in found.values()}) == 3
    captures = pair.denoiser["captures"]
    assert captures <= 4, "one graph per strength, none for a strength that came back"
    for names, weights in ((["a", "b"], [0.5, 0.2]), (["b"], [1.0]), (["a", "b"], [0.2, 0.5])):
        pair.both("set_adapters", names, weights)
        pair.latents()
    assert pair.denoiser["captures"] == captures + 3


def test_b20_a_strength_given_with_the_call() -> None:
    """`joint_attention_kwargs={"scale": w}` is an argument, and peft undoes it after the call."""
    pair = Pair("a")
    pair.both("set_adapters", ["a"], [1.0])
    found = [pair.latents(joint_attention_kwargs={"scale": w}) for w in (1.0, 0.5, 0.0, 0.5)]
    assert torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


@pytest.mark.parametrize("rslora", [False, True])
def test_b22_strength_zero_is_no_adapter_and_half_is_neither(rslora: bool) -> None:
    """A strength that has no effect is a request answered with another picture."""
    pair = Pair()
    base = pair.latents()
    for pipe in (pair.fast, pair.plain):
        _add(pipe, "a", 1, rank=4, use_rslora=rslora)
    pair.both("set_adapters", ["a"], [0.0])
    assert torch.allclose(pair.latents(), base, atol=1e-5)
    pair.both("set_adapters", ["a"], [0.5])
    half = pair.latents()
    pair.both("set_adapters", ["a"], [1.0])
    whole = pair.latents()
    assert not torch.equal(half, whole)
    assert not torch.allclose(half, base, atol=1e-3)


def test_adapters_switched_off_and_on_and_taken_away() -> None:
    """Every one of these changes the tree or its flags, and none of them an argument."""
    pair = Pair("a")
    pair.both("set_adapters", ["a"], [1.0])
    with_adapter = pair.latents()
    pair.both("disable_lora")
    without = pair.latents()
    assert not torch.equal(with_adapter, without)
    pair.both("enable_lora")
    assert torch.equal(pair.latents(), with_adapter)
    for pipe in (pair.fast, pair.plain):
        pipe.transformer.fuse_lora()
    pair.latents()
    for pipe in (pair.fast, pair.plain):
        pipe.transformer.unfuse_lora()
    pair.latents()
    pair.both("delete_adapters", ["a"])
    pair.latents()


def test_an_adapter_changed_in_the_middle_of_a_request() -> None:
    """A callback may turn the strength between two steps: the next step must use it."""
    pair = Pair("a")
    pair.both("set_adapters", ["a"], [1.0])

    def halve(pipe: object, step: int, timestep: object, tensors: dict) -> dict:
        if step == 3:
            pipe.set_adapters(["a"], [0.25])
        return tensors

    pair.latents()
    changed = pair.latents(callback_on_step_end=halve)
    pair.both("set_adapters", ["a"], [1.0])
    assert not torch.equal(pair.latents(), changed)
    assert torch.equal(pair.latents(callback_on_step_end=halve), changed)


def test_the_strength_changed_on_the_module_itself() -> None:
    """Not through the pipeline: `transformer.set_adapters` is as good a way."""
    pair = Pair("a")
    for weight in (1.0, 0.1, 1.0):
        for pipe in (pair.fast, pair.plain):
            pipe.transformer.set_adapters(["a"], [weight])
        pair.latents()
