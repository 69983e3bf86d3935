"""Adapters: a strength is host data that no argument shows, and each call must honour it.

Tiny real pipelines with weights made on the spot; no file is read.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny
import torch
from pair import Pair
from peft import IA3Config, LoHaConfig, LoraConfig

from benchmarks.adapters import lora

NAME = "flux"
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


def _add(pipe: object, adapter: str, seed: int, rank: int = 2, **options: object) -> None:
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=["to_q", "to_k", "to_v"], **options)
    pipe.transformer.add_adapter(config, adapter_name=adapter)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in pipe.transformer.named_parameters():
            if f".{adapter}." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)


def _add_each(*adapters: str) -> Callable[[object], None]:
    def add(pipe: object) -> None:
        for seed, adapter in enumerate(adapters, start=1):
            _add(pipe, adapter, seed)

    return add


def _load(seed: int, rank: int = 4, adapter: str = "a", **options: object) -> Callable:
    """Loads what a file would hold, by the pipeline's own loader."""

    def load(pipe: object) -> None:
        weights = lora(pipe.transformer, seed, rank)
        pipe.load_lora_weights(weights, adapter_name=adapter, **options)

    return load


def _strengths(*pairs: tuple[str, float]) -> Callable[[object], None]:
    names, weights = zip(*pairs, strict=True)
    return lambda pipe: pipe.set_adapters(list(names), list(weights))


@pytest.mark.parametrize("accelerate_first", [True, False])
def test_b20_each_strength_is_its_own_and_a_returning_one_is_known(accelerate_first: bool) -> None:
    """The scale is a Python float in the layer: baked into a graph, it would stay for ever."""
    pair = Pair(NAME, prepare=None if accelerate_first else _add_each("a", "b"))
    if accelerate_first:
        pair.both(_add_each("a", "b"))
    found = {}
    for weight in (0.0, 0.3, 1.0, 0.3, 0.0):
        pair.both(_strengths(("a", weight)))
        latents = pair.latents()
        assert torch.equal(latents, found.setdefault(weight, latents))
    assert len({latents.sum().item() for latents in found.values()}) == 3
    captures = pair.captures
    assert captures <= 4, "one graph per strength, none for a strength that came back"
    for pairs in ((("a", 0.5), ("b", 0.2)), (("b", 1.0),), (("a", 0.2), ("b", 0.5))):
        pair.both(_strengths(*pairs))
        pair.latents()
    assert pair.captures == captures + 3


def test_b20_a_strength_given_with_the_call() -> None:
    """`joint_attention_kwargs={"scale": w}` is an argument, and peft undoes it after the call."""
    pair = Pair(NAME, prepare=_add_each("a"))
    found = [pair.latents(joint_attention_kwargs={"scale": w}) for w in (1.0, 0.5, 0.0, 0.5)]
    assert torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


@pytest.mark.parametrize(
    ("when", "dtype"),
    [("before accelerate", torch.bfloat16), ("after graphs existed", torch.float32)],
    ids=str,
)
def test_b21_swaps_and_strengths_need_no_new_graph(when: str, dtype: torch.dtype) -> None:
    """`enable_lora_hotswap` pads the ranks and puts strengths into tensors: all is in place."""

    def enable(pipe: object) -> None:
        pipe.enable_lora_hotswap(target_rank=8)
        _load(1, 8)(pipe)

    pair = Pair(NAME, dtype=dtype, prepare=enable if when == "before accelerate" else None)
    pair.latents()
    if when != "before accelerate":
        pair.both(enable)
        pair.latents()
    first = pair.latents()
    captures, seen = pair.captures, [first]
    for seed, rank in ((2, 8), (3, 4), (1, 8)):
        pair.both(_load(seed, rank, hotswap=True))
        seen.append(pair.latents())
    assert torch.equal(seen[-1], first)
    # 0.3 is no bfloat16 number, see below
    for weight in (0.5, 0.0, 2.0 if dtype is torch.bfloat16 else 0.3, 1.0):
        pair.both(_strengths(("a", weight)))
        seen.append(pair.latents())
    assert torch.equal(seen[-1], first)
    assert len({latents.sum().item() for latents in seen}) == 6
    assert pair.captures == captures


def test_b21_a_strength_that_a_tensor_would_round_stays_a_float() -> None:
    """In bfloat16 the tensor's 0.3 is 0.30078, the float's is not: plain has the float's."""
    pair = Pair(NAME, dtype=torch.bfloat16, prepare=lambda pipe: pipe.enable_lora_hotswap())
    pair.both(_load(1))
    for weight in (1.0, 0.3, 0.5, 0.3):
        pair.both(_strengths(("a", weight)))
        pair.latents()
        scale = pair.fast.transformer.transformer_blocks[0].attn.to_q.scaling["a"]
        assert isinstance(scale, float if weight == 0.3 else torch.Tensor)


def test_b21_a_swap_without_preparation() -> None:
    """Equal and smaller ranks are written in place; a larger one moves the weights."""
    pair = Pair(NAME, prepare=_load(1, 4))
    pair.latents()
    captures = pair.captures
    pair.both(_load(2, 4, hotswap=True))
    pair.latents()
    assert pair.captures == captures
    pair.both(_load(3, 6, hotswap=True))
    pair.latents()
    assert pair.captures == captures + 1


@pytest.mark.parametrize("rslora", [False, True])
def test_b22_strength_zero_is_no_adapter_and_half_is_neither(rslora: bool) -> None:
    """A strength that has no effect is a request answered with another picture."""
    pair = Pair(NAME)
    base = pair.latents()
    pair.both(lambda pipe: _add(pipe, "a", 1, rank=4, use_rslora=rslora))
    pair.both(_strengths(("a", 0.0)))
    assert torch.allclose(pair.latents(), base, atol=1e-5)
    pair.both(_strengths(("a", 0.5)))
    half = pair.latents()
    pair.both(_strengths(("a", 1.0)))
    whole = pair.latents()
    assert not torch.equal(half, whole)
    assert not torch.allclose(half, base, atol=1e-3)


_OTHER_KINDS = {
    "DoRA": lambda: LoraConfig(r=4, target_modules=["to_q", "to_v"], use_dora=True),
    "LoHa": lambda: LoHaConfig(r=4, target_modules=["to_q", "to_v"]),
    "IA3": lambda: IA3Config(target_modules=["to_q", "to_v"], feedforward_modules=[]),
}


@pytest.mark.parametrize("kind", _OTHER_KINDS)
def test_other_kinds_of_adapters(kind: str) -> None:
    """Magnitudes, products and factors instead of two projections: all are weights of the tree."""
    pair = Pair(NAME)
    base = pair.latents()

    def add(pipe: object) -> None:
        pipe.transformer.add_adapter(_OTHER_KINDS[kind](), adapter_name="a")
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in pipe.transformer.named_parameters():
                if ".a." in name or name.endswith(".a"):
                    parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.1)

    pair.both(add)
    adapted = pair.latents()
    assert not torch.equal(adapted, base)
    assert torch.equal(pair.latents(), adapted)
    pair.both(lambda pipe: pipe.transformer.disable_adapters())
    pair.latents()
    assert pair.replays >= 4


def test_b23_each_expert_of_wan_2_2_has_adapters_of_its_own() -> None:
    """A LoRA into the first, into the second, into both, other weights in each, and out again."""
    pair = Pair("wan22")
    base = pair.latents(steps=4)

    def into(*experts: str, seed: int) -> Callable[[object], None]:
        def load(pipe: object) -> None:
            for number, name in enumerate(experts):
                weights = lora(getattr(pipe, name), seed + number)
                second = {"load_into_transformer_2": True} if name == "transformer_2" else {}
                pipe.load_lora_weights(weights, adapter_name=f"{name}{seed}", **second)

        return load

    seen = [base]
    for change in (
        into("transformer", seed=1),
        lambda pipe: pipe.unload_lora_weights(),
        into("transformer_2", seed=2),
        lambda pipe: pipe.unload_lora_weights(),
        into("transformer", "transformer_2", seed=3),
    ):
        pair.both(change)
        pair.latents(steps=4)
        seen.append(pair.latents(steps=4))
    assert torch.equal(seen[2], base) and torch.equal(seen[4], base)
    assert len({latents.sum().item() for latents in seen}) == 4
    for label in ("denoiser", "denoiser:transformer_2"):
        assert pair.component(label)["replays"] >= 12


def test_b25_a_lora_fused_under_group_offload() -> None:
    """Weights that are away must not be merged into; the calls stay eager and plain's."""
    pair = Pair(NAME, prepare=_load(1))
    for module in (pair.plain.transformer, pair.fast.transformer):
        module.enable_group_offload(
            onload_device=torch.device("cpu"),
            offload_device=torch.device("cpu"),
            offload_type="leaf_level",
        )
    pair.latents()
    pair.both(lambda pipe: pipe.fuse_lora())
    fused = pair.latents()
    pair.both(lambda pipe: pipe.unfuse_lora())
    assert not torch.equal(pair.latents(), fused)
    assert set(pair.component()["fallbacks"]) == {"offload"}


def test_loaded_unloaded_and_loaded_again() -> None:
    pair = Pair(NAME)
    base = pair.latents()
    pair.both(_load(1))
    loaded = pair.latents()
    pair.both(lambda pipe: pipe.unload_lora_weights())
    assert torch.equal(pair.latents(), base)
    pair.both(_load(1))
    assert torch.equal(pair.latents(), loaded)
    pair.both(_load(2, adapter="b"))
    pair.both(_strengths(("a", 0.4), ("b", 0.8)))
    both = pair.latents()
    assert not torch.equal(both, loaded)
    pair.both(lambda pipe: pipe.delete_adapters(["b"]))
    pair.both(_strengths(("a", 1.0)))
    assert torch.equal(pair.latents(), loaded)


def test_fused_with_a_strength_and_unfused() -> None:
    """`fuse_lora` adds to the weights in place: addresses stay and the branch changes."""
    pair = Pair(NAME, prepare=_load(1))
    loaded = pair.latents()
    for strength in (1.0, 0.5):
        pair.both(lambda pipe, s=strength: pipe.fuse_lora(lora_scale=s))
        pair.latents()
        fused = pair.latents()
        assert torch.equal(fused, loaded) is False
        pair.both(lambda pipe: pipe.unfuse_lora())
        pair.latents()
    pair.both(lambda pipe: pipe.fuse_lora())
    pair.both(lambda pipe: pipe.unload_lora_weights())
    pair.latents()


def test_adapters_switched_off_and_on_and_taken_away() -> None:
    """Every one of these changes the tree or its flags, and none of them an argument."""
    pair = Pair(NAME, prepare=_add_each("a"))
    with_adapter = pair.latents()
    pair.both(lambda pipe: pipe.disable_lora())
    without = pair.latents()
    assert not torch.equal(with_adapter, without)
    pair.both(lambda pipe: pipe.enable_lora())
    assert torch.equal(pair.latents(), with_adapter)
    pair.both(lambda pipe: pipe.transformer.fuse_lora())
    pair.latents()
    pair.both(lambda pipe: pipe.transformer.unfuse_lora())
    pair.latents()
    pair.both(lambda pipe: pipe.delete_adapters(["a"]))
    pair.latents()


def test_an_adapter_changed_in_the_middle_of_a_request() -> None:
    """A callback may turn the strength between two steps: the next step must use it."""
    pair = Pair(NAME, prepare=_add_each("a"))

    def halve(pipe: object, step: int, timestep: object, tensors: dict) -> dict:
        if step == 3:
            pipe.set_adapters(["a"], [0.25])
        return tensors

    pair.latents(steps=6)
    changed = pair.latents(steps=6, callback_on_step_end=halve)
    pair.both(_strengths(("a", 1.0)))
    assert not torch.equal(pair.latents(steps=6), changed)
    assert torch.equal(pair.latents(steps=6, callback_on_step_end=halve), changed)


def test_the_strength_changed_on_the_module_itself() -> None:
    """Not through the pipeline: `transformer.set_adapters` is as good a way, and so is peft's."""
    pair = Pair(NAME, prepare=_add_each("a"))
    for weight in (1.0, 0.1, 1.0):
        pair.both(lambda pipe, w=weight: pipe.transformer.set_adapters(["a"], [w]))
        pair.latents()
    for weight in (0.2, 0.9):
        for pipe in (pair.fast, pair.plain):
            for layer in pipe.transformer.modules():
                if hasattr(layer, "set_scale"):
                    layer.set_scale("a", weight)
        pair.latents()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_adapter_trained_between_two_pictures(checkpointing: bool) -> None:
    """Losses and gradients are plain's, and the next picture is drawn with what was learnt."""
    pair = Pair(NAME, prepare=_add_each("a"))
    before = pair.latents()
    given = tiny.denoiser_calls(tiny.build(NAME), tiny.call_kwargs(NAME, size=32, steps=1))[0]
    losses: dict[int, list[float]] = {}
    for pipe in (pair.plain, pair.fast):
        model = pipe.transformer.train()
        if checkpointing:
            model.enable_gradient_checkpointing()
        learnt = [weight for name, weight in model.named_parameters() if ".a." in name]
        optimizer = torch.optim.AdamW(learnt, lr=0.05)
        for _ in range(2):
            loss = model(**given.arguments)[0].square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.setdefault(id(pipe), []).append(loss.item())
        model.disable_gradient_checkpointing()
        model.eval()
    assert losses[id(pair.plain)] == losses[id(pair.fast)]
    assert pair.component()["fallbacks"]["grad_enabled"] == 2
    assert not torch.equal(pair.latents(), before)
    pair.latents(seed=1)
