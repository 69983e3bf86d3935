"""Key-value caches among the arguments: filled eagerly, read by graphs, and never mixed up.

The first call of a request fills a cache object, the later ones read it. A new request has new
tensors in it, of the same shapes: the same graph must read those.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from diffusers.models.transformers.transformer_flux2 import Flux2KVCache
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from torch import Tensor, nn

import dit_graphs
from benchmarks.sweep import CASES
from benchmarks.sweep_cases import class_of
from dit_graphs.wrapping import runner_of

Tree = dict[str, object]


class _Pair:
    """A plain and a wrapped model; each request fills and reads a cache of its own in both."""

    def __init__(self, key: str) -> None:
        self.plain, self.wrapped = CASES[key].build(), CASES[key].build()
        dit_graphs.wrap(self.wrapped, backend="recorded")

    def request(self, serve: Callable[[nn.Module], list[Tensor]]) -> None:
        with torch.no_grad(), dit_graphs.request():
            got = serve(self.wrapped)
        with torch.no_grad():
            expected = serve(self.plain)
        assert len(got) == len(expected) > 1
        for mine, theirs in zip(got, expected, strict=True):
            assert torch.equal(mine, theirs)

    @property
    def replays(self) -> int:
        runner = runner_of(self.wrapped)
        assert runner is not None
        return runner.stats.replays

    @property
    def graphs(self) -> int:
        runner = runner_of(self.wrapped)
        assert runner is not None
        return len(runner.cache.held())


def _result(module: nn.Module, inputs: Tree, **more: object) -> Tensor:
    result = module(**{**inputs, **more, "return_dict": False})[0]
    assert isinstance(result, Tensor)
    return result


def _all_different(cache: object) -> list[Tensor]:
    layers: list[object] = cache.layer_caches if hasattr(cache, "layer_caches") else cache.caches
    return [tensor for layer in layers for tensor in vars(layer).values() if tensor is not None]


@pytest.mark.filterwarnings("ignore")
def test_qwen_image_reads_the_cache_its_first_step_filled() -> None:
    key = "QwenImage21Transformer2DModel"
    home = "diffusers.models.transformers.transformer_qwenimage21"
    pair = _Pair(key)

    def request(number: int) -> Callable[[nn.Module], list[Tensor]]:
        def serve(module: nn.Module) -> list[Tensor]:
            cache = class_of("QwenImage21KVCache", home)(2)
            found = []
            for step in range(6):
                inputs = CASES[key].draw(100 * number + step, 1, 1)
                prompt = CASES[key].draw(100 * number, 1, 1)["encoder_hidden_states"]
                mode = "cached" if step else "extract"
                inputs["encoder_hidden_states"] = prompt
                found.append(_result(module, inputs, kv_cache=cache, kv_cache_mode=mode))
            assert all(torch.isfinite(tensor).all() for tensor in _all_different(cache))
            assert len(_all_different(cache)) == 4, "the caller's own cache was filled"
            return found

        return serve

    for number in range(3):
        pair.request(request(number))
    assert pair.graphs == 1, "one graph reads whatever cache it is given"
    assert pair.replays >= 8
    runner = runner_of(pair.wrapped)
    assert runner is not None
    assert {reason.value for reason in runner.stats.fallbacks} == {"warming_up", "python_state"}


@pytest.mark.filterwarnings("ignore")
def test_flux2_returns_a_cache_and_reads_it_later() -> None:
    key = "Flux2Transformer2DModel#Flux2TransformerKVCache"
    pair = _Pair(key)

    def request(number: int) -> Callable[[nn.Module], list[Tensor]]:
        def serve(module: nn.Module) -> list[Tensor]:
            inputs = CASES[key].draw(100 * number, 1, 1)
            first = module(
                **{**inputs, "return_dict": False},
                kv_cache_mode="extract",
                num_ref_tokens=4,
                ref_fixed_timestep=0.0,
            )
            cache = first[1]
            assert isinstance(cache, Flux2KVCache)
            found = [first[0]]
            for step in range(1, 6):
                inputs = CASES[key].draw(100 * number + step, 1, 1)
                latents, ids = inputs["hidden_states"], inputs["img_ids"]
                assert isinstance(latents, Tensor) and isinstance(ids, Tensor)
                inputs |= {"hidden_states": latents[:, 4:], "img_ids": ids[:, 4:]}
                found.append(_result(module, inputs, kv_cache=cache, kv_cache_mode="cached"))
            return found

        return serve

    for number in range(4):
        pair.request(request(number))
    assert pair.replays >= 10


@pytest.mark.filterwarnings("ignore")
def test_glm_image_follows_the_mode_inside_its_cache() -> None:
    key = "GlmImageTransformer2DModel"
    pair = _Pair(key)

    def request(number: int) -> Callable[[nn.Module], list[Tensor]]:
        def serve(module: nn.Module) -> list[Tensor]:
            cache = GlmImageKVCache(len(module.get_submodule("transformer_blocks")))
            cache.set_mode("write")
            found = [_result(module, CASES[key].draw(100 * number, 1, 1), kv_caches=cache)]
            for step in range(1, 9):
                # conditional calls read the picture's keys, unconditional ones do not
                cache.set_mode("read" if step % 2 else "skip")
                inputs = CASES[key].draw(100 * number + step, 1, 1)
                found.append(_result(module, inputs, kv_caches=cache))
            assert len(cache.caches[0].k_caches) == 1, "written once, by the caller's first call"
            return found

        return serve

    for number in range(3):
        pair.request(request(number))
    assert pair.graphs == 2, "reading and not reading"
    assert pair.replays >= 12
