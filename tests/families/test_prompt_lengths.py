"""Prompt lengths without an own multiple: exact per length, or padded to buckets on request."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import Tensor
from twin import Twin, Where

import dit_graphs
from benchmarks.sweep import CASES
from dit_graphs.wrapping import runner_of

CPU = Where("recorded", torch.device("cpu"))
QWEN = "QwenImageTransformer2DModel"


def _call(key: str, seed: int, length: int, *, mask: bool = False) -> dict[str, object]:
    """One call with a prompt of that length; pipelines pass no mask for a single one."""
    inputs = CASES[key].draw(seed, 1, 1)
    old = inputs["encoder_hidden_states"]
    assert isinstance(old, Tensor)
    generator = torch.Generator().manual_seed(seed)
    inputs["encoder_hidden_states"] = torch.randn(
        old.shape[0], length, old.shape[2], generator=generator
    )
    inputs.pop("encoder_hidden_states_mask", None)
    if mask:
        inputs["encoder_hidden_states_mask"] = torch.ones(1, length, dtype=torch.bool)
    if "text_rope_pos" in inputs:
        inputs["text_rope_pos"] = torch.arange(length)
    return inputs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "key", [QWEN, "CogView4Transformer2DModel", "Kandinsky5Transformer3DModel"]
)
def test_each_length_has_a_graph_of_its_own_and_few_are_kept(key: str) -> None:
    with torch.no_grad():
        twin = Twin(CASES[key].build(), CPU, max_graphs=2)
        for seed, length in enumerate((4, 7, 4, 7, 9, 4)):
            with dit_graphs.request():
                for step in range(4):
                    twin(**_call(key, 10 * seed + step, length))
    assert twin.graphs == 2
    assert twin.replays >= 4
    assert set(twin.fallbacks) <= {"warming_up", "max_graphs"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", [QWEN, "NucleusMoEImageTransformer2DModel"])
def test_buckets_share_a_graph_and_say_what_they_changed(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = CASES[key].build()
    plain = copy.deepcopy(module)
    dit_graphs.wrap(module, backend="recorded", prompt_buckets=(8, 16))
    deviations = []
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="dit_graphs"):
        for seed, length in enumerate((5, 6, 8, 5)):
            with dit_graphs.request():
                for step in range(4):
                    inputs = _call(key, 10 * seed + step, length)
                    got = module(**inputs)[0]
                    text = inputs["encoder_hidden_states"]
                    assert isinstance(text, Tensor)
                    padded = torch.nn.functional.pad(text, (0, 0, 0, 8 - length))
                    mask = (torch.arange(8) < length)[None]
                    exact = plain(**inputs)[0]
                    reference = plain(
                        **{
                            **inputs,
                            "encoder_hidden_states": padded,
                            "encoder_hidden_states_mask": mask,
                        }
                    )[0]
                    assert torch.equal(got, reference), "exactly the padded call"
                    assert torch.allclose(got, exact, atol=1e-4), "and nearly the exact one"
                    deviations.append(float((got - exact).norm() / exact.norm()))
    runner = runner_of(module)
    assert runner is not None
    report = runner.report()
    assert len(report["graphs"]) == 1 and runner.stats.replays >= 8
    (found,) = report["padding"]
    assert (found["length"], found["bucket"]) == (5, 8)
    assert found["relative"] == pytest.approx(deviations[0]), "of the first padded call"
    assert found["relative"] < 1e-4  # on some processors none at all
    assert "5 tokens padded to 8" in caplog.text


@pytest.mark.filterwarnings("ignore")
def test_prompts_above_the_ladder_and_masks_of_the_caller() -> None:
    module = CASES[QWEN].build()
    plain = copy.deepcopy(module)
    dit_graphs.wrap(module, backend="recorded", prompt_buckets=(8,))
    with torch.no_grad(), dit_graphs.request():
        for step in range(4):
            long = _call(QWEN, step, 9)
            assert torch.equal(module(**long)[0], plain(**long)[0]), "not padded"
            fits = _call(QWEN, step, 8, mask=True)
            assert torch.equal(module(**fits)[0], plain(**fits)[0]), "nothing to pad"


@pytest.mark.filterwarnings("ignore")
def test_disabled_calls_are_exact() -> None:
    module = CASES[QWEN].build()
    plain = copy.deepcopy(module)
    dit_graphs.wrap(module, backend="recorded", prompt_buckets=(8,))
    inputs = _call(QWEN, 0, 5)
    with torch.no_grad(), dit_graphs.disabled(module):
        assert torch.equal(module(**inputs)[0], plain(**inputs)[0])


@pytest.mark.filterwarnings("ignore")
def test_a_class_without_a_mask_stays_exact(caplog: pytest.LogCaptureFixture) -> None:
    key = "Kandinsky5Transformer3DModel"
    module = CASES[key].build()
    plain = copy.deepcopy(module)
    with caplog.at_level(logging.INFO, logger="dit_graphs"):
        dit_graphs.wrap(module, backend="recorded", prompt_buckets=(8,))
    assert "takes no mask" in caplog.text
    inputs = _call(key, 0, 5)
    with torch.no_grad():
        assert torch.equal(module(**inputs)[0], plain(**inputs)[0])


@pytest.mark.filterwarnings("ignore")
def test_a_prompt_edited_in_place_is_padded_again() -> None:
    module = CASES[QWEN].build()
    dit_graphs.wrap(module, backend="recorded", prompt_buckets=(8,))
    inputs = _call(QWEN, 0, 5)
    text = inputs["encoder_hidden_states"]
    assert isinstance(text, Tensor)
    with torch.no_grad(), dit_graphs.request():
        before = [module(**inputs)[0] for _ in range(5)][-1]
        text.mul_(-1)
        assert not torch.equal(module(**inputs)[0], before)
