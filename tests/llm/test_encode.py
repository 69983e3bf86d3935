"""Encoding from graphs: equal to the unmodified encoder, bit for bit, for every class.

Runs on the CPU recorder; tests/llm/test_gpu_llm.py repeats it with CUDA graphs at real sizes.
"""

from __future__ import annotations

import pytest
import tiny_llms
import torch

from dit_graphs import GraphConfig
from dit_graphs.intercept import install, remove
from dit_graphs.pipelines.text_encoder.encode import EncodeRunner
from dit_graphs.runner import RunnerOptions

RECORDED = GraphConfig(backend="recorded", components=("text_encoder",))


def wrapped(model, config=RECORDED):
    made = []

    def make(eager):
        made.append(EncodeRunner(model, eager, config, RunnerOptions(component="text_encoder")))
        return made[0]

    install(model, "forward", make)
    return made[0]


def outputs(model, batch, **kwargs):
    with torch.no_grad():
        return model(**batch, **kwargs)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", [*tiny_llms.DECODERS, *tiny_llms.ENCODERS])
def test_encode_replays_equal_the_unmodified_encoder(name, padding):
    model = tiny_llms.build(name)
    lengths = [21, 21] if padding == "none" else [21, 9]
    batches = [
        tiny_llms.prompts(lengths, seed=seed, side="right" if padding == "right" else "left")
        for seed in range(6)
    ]
    expected = [outputs(model, batch, output_hidden_states=True) for batch in batches]
    runner = wrapped(model)
    for batch, reference in zip(batches, expected, strict=True):
        result = outputs(model, batch, output_hidden_states=True)
        assert len(result.hidden_states) == len(reference.hidden_states)
        for mine, theirs in zip(result.hidden_states, reference.hidden_states, strict=True):
            assert torch.equal(mine, theirs)
        if "last_hidden_state" in reference:
            assert torch.equal(result.last_hidden_state, reference.last_hidden_state)
    assert runner.stats.replays >= 3, runner.stats.as_dict()
    remove(model, "forward")
