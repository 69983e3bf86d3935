"""Modular pipelines: the bar belongs to a block, the arguments to all of them."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch
from diffusers.modular_pipelines.flux import FluxAutoBlocks
from torch import Tensor, nn

import dit_graphs
from dit_graphs import ConfigError
from dit_graphs.request_scope import current_request
from dit_graphs.wrapping import runner_of


def _build() -> object:
    pipe = FluxAutoBlocks().init_pipeline()
    parts = tiny.build("flux").components
    wanted = {name: part for name, part in parts.items() if name in pipe.components}
    pipe.update_components(**wanted)
    return pipe


def _latents(pipe: object, seed: int = 0, steps: int = 5) -> Tensor:
    arguments = tiny.call_kwargs("flux", size=32, steps=steps, seed=seed)
    return pipe(**arguments, output="images")


def _blocks(pipe: object) -> list[object]:
    found = [pipe._blocks]
    for block in found:
        found.extend(block.sub_blocks.values())
    return found


def _installed(pipe: object) -> list[str]:
    owners = [pipe, *_blocks(pipe), *(p for p in pipe.components.values() if p is not None)]
    return [
        f"{type(owner).__name__}.{name}"
        for owner in owners
        for name, value in vars(owner).items()
        if type(value).__module__.startswith("dit_graphs")
    ]


def test_a_modular_pipeline_replays_within_one_request_per_call() -> None:
    pipe, plain = _build(), _build()
    assert dit_graphs.accelerate(pipe, backend="recorded") is pipe
    requests = []

    def noting(module: nn.Module, args: object, kwargs: object) -> None:
        requests.append(current_request())

    for seed in range(2):
        assert torch.equal(_latents(pipe, seed), _latents(plain, seed))
    denoiser = dit_graphs.stats(pipe)["components"]["denoiser"]
    # plain, observed, compared; the rest of ten steps from the graph
    assert (denoiser["replays"], denoiser["fallbacks"]) == (7, {"warming_up": 3})
    assert current_request() is None

    with dit_graphs.disabled(pipe):
        handle = pipe.transformer.register_forward_pre_hook(noting, with_kwargs=True)
        _latents(pipe, steps=3)
        handle.remove()
    assert len(requests) == 3 and len(set(requests)) == 1
    assert requests[0].total_steps == 3 and requests[0].is_over


def test_restore_leaves_its_blocks_alone() -> None:
    pipe, plain = _build(), _build()
    dit_graphs.accelerate(pipe, backend="recorded")
    _latents(pipe)
    assert any("progress_bar" in name for name in _installed(pipe))
    copied = copy.deepcopy(pipe._blocks)
    assert not any(
        type(value).__module__.startswith("dit_graphs")
        for block in copied.sub_blocks.values()
        for value in vars(block).values()
    )
    dit_graphs.restore(pipe)
    assert _installed(pipe) == []
    assert torch.equal(_latents(pipe), _latents(plain))


def test_warm_up_of_a_modular_pipeline() -> None:
    pipe = _build()
    dit_graphs.accelerate(pipe, backend="recorded", components=("denoiser",))
    sizes = [{"height": 32, "width": 32}, {"height": 64, "width": 32}]
    made = dit_graphs.warmup(pipe, sizes, max_sequence_length=32, guidance_scale=3.5)
    held = runner_of(pipe.transformer).cache.held()
    assert [entry.signature.tensors[0].shape[1] for entry in held] == [8, 4]
    assert len(made) == 2
    with pytest.raises(ConfigError, match="heigth"):
        dit_graphs.warmup(pipe, [{"heigth": 32}])
