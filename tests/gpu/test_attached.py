"""What users attach to a pipeline, on a device: step caches, adapters, quantised weights."""

from __future__ import annotations

import time

import diffusers
import pytest
import tiny
import torch
from pair import Pair

from benchmarks.adapters import lora


def _enable(make):
    def enable(pipe: object) -> None:
        for module in tiny.denoisers(pipe):
            module.enable_cache(make())

    return enable


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "threshold"), [("flux", 0.7), ("wan", 0.42), ("qwen-image", 1.1)])
def test_b55_first_block_cache_runs_from_one_graph_per_branch(name, threshold, dtype):
    config = lambda: diffusers.FirstBlockCacheConfig(threshold=threshold)  # noqa: E731
    pair = Pair(name, device="cuda", dtype=dtype, prepare=_enable(config))
    for seed in range(4):
        assert set(pair.reasons_of(1, steps=12, seed=seed)) <= {"warming_up"}
    assert pair.replays >= 24
    breaks = sorted(graph["breaks"] for graph in pair.component()["graphs"])
    assert breaks[0] == 0 and breaks[-1] == 1, "the first step decides nothing, the others once"


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_b55_mag_cache_runs_from_one_graph_per_branch(name):
    ratios = [1.0, *(0.98 - 0.01 * i for i in range(11))]
    config = lambda: diffusers.MagCacheConfig(  # noqa: E731
        threshold=0.06, num_inference_steps=12, mag_ratios=ratios
    )
    pair = Pair(name, device="cuda", backend="full", prepare=_enable(config))
    for seed in range(4):
        assert set(pair.reasons_of(1, steps=12, seed=seed)) <= {"warming_up"}
    assert pair.replays >= 24


def test_b55_a_cache_is_switched_on_and_off_under_graphs():
    pair = Pair("flux", device="cuda")
    plain = pair.latents(steps=8)
    for make in (
        lambda: diffusers.FirstBlockCacheConfig(threshold=0.7),
        lambda: diffusers.TaylorSeerCacheConfig(cache_interval=2),
    ):
        pair.both(_enable(make))
        for seed in range(3):
            pair.latents(steps=8, seed=seed)
        pair.both(lambda pipe: pipe.transformer.disable_cache())
        assert torch.equal(pair.latents(steps=8), plain)


def _load(seed: int, rank: int, **options: object):
    def load(pipe: object) -> None:
        weights = lora(pipe.transformer, seed, rank)
        pipe.load_lora_weights(weights, adapter_name="a", **options)

    return load


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_b21_swaps_and_strengths_need_no_new_graph(dtype):
    pair = Pair("flux", device="cuda", dtype=dtype, backend="full")
    pair.both(lambda pipe: pipe.enable_lora_hotswap(target_rank=8))
    pair.both(_load(1, 8))
    pair.latents()
    first = pair.latents()
    captures = pair.captures
    for seed, rank in ((2, 8), (3, 4), (1, 8)):
        pair.both(_load(seed, rank, hotswap=True))
        swapped = pair.latents()
    assert torch.equal(swapped, first)
    for weight in (0.5, 0.0, 2.0, 1.0):
        pair.both(lambda pipe, w=weight: pipe.set_adapters(["a"], [w]))
        turned = pair.latents()
    assert torch.equal(turned, first)
    assert pair.captures == captures


def test_b21_an_image_after_a_swap_takes_the_time_of_a_warm_one():
    """The swap itself is peft's work; the image after it must cost no capture and no compare."""
    pair = Pair("flux", device="cuda", backend="full")
    pair.both(lambda pipe: pipe.enable_lora_hotswap(target_rank=8))
    pair.both(_load(1, 8))
    for seed in range(3):
        pair.latents(seed=seed, size=64, steps=8)

    def seconds() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        pair.call(pair.fast, size=64, steps=8)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    warm, swapped = [], []
    for number in range(9):
        warm.append(seconds())
        _load(2 + number, 8, hotswap=True)(pair.fast)
        swapped.append(seconds())
    ratio = min(swapped) / min(warm)  # other work on the machine only ever adds
    print(f"image after a swap / warm image: {ratio:.3f}")
    assert ratio <= 1.1


def test_b20_a_strength_without_preparation_is_a_graph_of_its_own():
    pair = Pair("flux", device="cuda", backend="full", prepare=_load(1, 4))
    found = {}
    for weight in (1.0, 0.3, 0.0, 0.3, 1.0):
        pair.both(lambda pipe, w=weight: pipe.set_adapters(["a"], [w]))
        latents = pair.latents()
        assert torch.equal(latents, found.setdefault(weight, latents))
    assert pair.captures <= 4


def test_b23_both_experts_of_wan_2_2_with_adapters_and_the_second_one_offloaded():
    pair = Pair("wan22", device="cuda", backend="full")

    def load(pipe: object) -> None:
        pipe.load_lora_weights(lora(pipe.transformer, 1), adapter_name="first")
        pipe.load_lora_weights(
            lora(pipe.transformer_2, 2), adapter_name="second", load_into_transformer_2=True
        )

    plain = pair.latents(steps=4)
    pair.both(load)
    for seed in range(3):
        pair.latents(steps=4, seed=seed)
    assert not torch.equal(pair.latents(steps=4), plain)
    for label in ("denoiser", "denoiser:transformer_2"):
        assert pair.component(label)["replays"] > 0
    pair.both(lambda pipe: pipe.enable_model_cpu_offload())
    for seed in range(3):
        pair.latents(steps=4, seed=seed)


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_b59_torchao_weights_before_graphs_or_under_them(name):
    library = pytest.importorskip("torchao.quantization")

    def quantise(pipe: object) -> None:
        library.quantize_(pipe.transformer, getattr(library, name)())

    pair = Pair("flux", device="cuda", dtype=torch.bfloat16, backend="full")
    plain = pair.latents()
    pair.both(quantise)
    for seed in range(3):
        quantised = pair.latents(seed=seed)
    assert not torch.equal(pair.latents(), plain) and torch.isfinite(quantised).all()


def test_b59_layerwise_casting_stays_eager():
    pair = Pair("flux", device="cuda", dtype=torch.bfloat16, backend="full")
    pair.latents()
    pair.both(
        lambda pipe: pipe.transformer.enable_layerwise_casting(
            storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16
        )
    )
    assert pair.reasons_of(2) == {"layerwise_casting": 8}
