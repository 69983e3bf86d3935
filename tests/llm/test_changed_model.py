"""A language model that becomes another one between two texts: each is that of the model of now."""

from __future__ import annotations

import pytest
import tiny_llms
import torch
from torch import nn

from dit_graphs import Reason

GIVEN = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


def check(generator, model, lengths=(6, 3), replays=True, **options):
    """The text is transformers' own, from graphs unless said otherwise."""
    batch, before = tiny_llms.prompts(list(lengths)), generator.runner.stats.replays
    given = {**GIVEN, **options}
    torch.manual_seed(0)
    expected = model.generate(**batch, **given)
    torch.manual_seed(0)
    assert torch.equal(generator(**batch, **given), expected)
    assert (generator.runner.stats.replays > before) is replays


def _fewer_layers(model: nn.Module) -> None:
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2


def _more_words(model: nn.Module) -> None:
    model.resize_token_embeddings(tiny_llms.VOCABULARY + 24)


def _fewer_words(model: nn.Module) -> None:
    model.resize_token_embeddings(tiny_llms.VOCABULARY - 1)


def _half(model: nn.Module) -> None:
    model.to(torch.bfloat16)


@pytest.mark.parametrize("change", [_half, _more_words, _fewer_words, _fewer_layers])
def test_slots_are_laid_out_for_the_model_of_now(recorded, change):
    """Type, number of layers and vocabulary were learnt once: other slots, not a torn write."""
    model = tiny_llms.build("qwen3")
    generator = recorded(model)
    check(generator, model)
    change(model)
    check(generator, model)
    check(generator, model, [6])


def test_a_sliding_window_set_on_the_config_counts_from_the_next_text_on(recorded):
    model = tiny_llms.build("mistral")
    generator = recorded(model)
    check(generator, model, [6], max_new_tokens=24)
    before = generator(**tiny_llms.prompts([6]), **{**GIVEN, "max_new_tokens": 24})
    model.config.sliding_window = 4
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 4
    check(generator, model, [6], max_new_tokens=24)
    after = generator(**tiny_llms.prompts([6]), **{**GIVEN, "max_new_tokens": 24})
    assert not torch.equal(before, after)


def test_prompts_go_into_the_slots_of_now_when_weights_come_back(recorded):
    """Moved away and back to the same addresses: the weights are those of the prompt's graph, but
    its slots were given back meanwhile. Counted per cache, theirs had the number of the new ones.
    """
    model = tiny_llms.build("qwen3")
    generator = recorded(model)
    for _ in range(4):
        check(generator, model, [6])
    assert generator.prefill.stats.replays
    weight = model.model.norm.weight
    kept = weight.data
    weight.data = kept.clone()
    generator.runner.mark_changed()
    weight.data = kept
    for _ in range(3):
        check(generator, model, [6])


def test_dropout_is_drawn_by_transformers(recorded):
    """What dropout draws depends on the width of a pass, and ours is another."""
    model = tiny_llms.build("qwen3")
    generator = recorded(model)
    check(generator, model)
    model.train()
    check(generator, model)  # nothing is dropped yet
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    check(generator, model, replays=False)
    assert "dropout" in generator.runner.stats.details[Reason.UNSUPPORTED_MODEL]
    model.eval()
    check(generator, model)


def test_a_text_under_autocast_is_transformers_own(recorded, qwen3):
    generator = recorded(qwen3)
    check(generator, qwen3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(generator, qwen3, [3], replays=False, max_new_tokens=2)
    assert "autocast" in generator.runner.stats.details[Reason.UNSUPPORTED_MODEL]
    check(generator, qwen3)


@pytest.mark.parametrize("config", [{}, {"prompt_buckets": (4, 8, 16)}])
def test_a_default_device_that_is_another_one(recorded, qwen3, config):
    """`torch.set_default_device` moves every tensor whose device nobody names."""
    generator, batch = recorded(qwen3, **config), tiny_llms.prompts([9, 2, 2, 2])
    with torch.device("meta"):
        expected = qwen3.generate(**batch, **GIVEN)
        assert torch.equal(generator(**batch, **GIVEN), expected)
    assert generator.runner.stats.replays


def test_one_graph_at_a_time_is_two_for_a_text(recorded, qwen3):
    """A step needs a graph of each kind; with room for one, each token would be captured anew."""
    generator = recorded(qwen3, max_graphs=1)
    for _ in range(3):
        check(generator, qwen3, [6])
    assert generator.runner.stats.captures == 2
