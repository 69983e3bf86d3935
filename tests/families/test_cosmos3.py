"""Cosmos 3 takes its first and last steps in another precision, which no argument shows."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from twin import difference

import dit_graphs
from benchmarks import sweep
from dit_graphs.wrapping import runner_of

STEPS = 10
mixed_precision = pytest.importorskip(
    "diffusers.pipelines.cosmos.mixed_precision", reason="this diffusers has it not"
)
POLICY = mixed_precision.Cosmos3MixedPrecisionConfig(format="fp8", first_steps=2, last_steps=2)


def _coarser(layer: nn.Linear, inputs: Tensor, name: str) -> Tensor:
    """In place of the kernel for weights of eight bits, which needs a GPU."""
    return nn.functional.linear(inputs, (layer.weight * 4).round() / 4, layer.bias)


def _picture(module: nn.Module, seed: int) -> list[object]:
    """The calls of one request, with the precision turned before each as the pipeline does."""
    found = []
    with dit_graphs.request(STEPS), torch.no_grad():
        for step in range(STEPS):
            mixed_precision.apply_cosmos3_mixed_precision_step(module, POLICY, step, STEPS)
            drawn = sweep.CASES["Cosmos3OmniTransformer"].draw(100 * seed + step, 1, 1)
            found.append(sweep.comparable(module(**drawn)))
        mixed_precision.reset_cosmos3_mixed_precision(module, POLICY)
    return found


def test_each_step_has_the_precision_its_pipeline_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        mixed_precision, "_is_modelopt_fp8_linear", lambda layer: isinstance(layer, nn.Linear)
    )
    monkeypatch.setattr(mixed_precision, "_validate_modelopt_fp8_linear", lambda name, layer: None)
    monkeypatch.setattr(mixed_precision, "_w8a16_linear", _coarser)
    module = sweep.CASES["Cosmos3OmniTransformer"].build()
    plain = copy.deepcopy(module)
    dit_graphs.wrap(module, backend="recorded")
    for seed in range(3):
        mine, theirs = _picture(module, seed), _picture(plain, seed)
        assert difference(mine, theirs) is None, difference(mine, theirs)
    runner = runner_of(module)
    assert runner is not None and runner.stats.replays >= 15
    assert {reason.value for reason in runner.stats.fallbacks} == {"warming_up"}
    assert len(runner.cache.held()) == 2
