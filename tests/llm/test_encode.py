"""Encoding from graphs: equal to the unmodified encoder, bit for bit, for every class.

Runs on the CPU recorder; tests/llm/test_gpu_llm.py repeats it with CUDA graphs at real sizes.
"""

from __future__ import annotations

import logging

import pytest
import tiny_llms
import torch
import transformers as tf
from transformers import masking_utils
from transformers.utils import import_utils

from dit_graphs import GraphConfig, Reason
from dit_graphs.intercept import find_intercept, install
from dit_graphs.llm.buckets import PROMPT_LADDER
from dit_graphs.pipelines.text_encoder.encode import EncodeRunner
from dit_graphs.pipelines.text_encoder.masks import cache_argument, mask_decisions_as_eager
from dit_graphs.runner import RunnerOptions
from dit_graphs.tree import tensor_leaves

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
    if padding != "none":
        tiny_llms.needs_ready_masks(name)
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
    find_intercept(model, "forward").drop(None)


def test_padding_to_a_ladder_deviates_by_rounding_and_says_so(caplog):
    """21 tokens in a bucket of 24; the same graph serves 21 to 24."""
    model = tiny_llms.build("qwen3")
    config = GraphConfig(backend="recorded", prompt_buckets=PROMPT_LADDER)
    batches = [tiny_llms.prompts([n, 9], seed=n) for n in (21, 22, 23, 24, 23, 22)]
    expected = [outputs(model, batch, output_hidden_states=True) for batch in batches]
    runner = wrapped(model, config)
    with caplog.at_level(logging.INFO, logger="dit_graphs"):
        for batch, reference in zip(batches, expected, strict=True):
            states = outputs(model, batch, output_hidden_states=True).hidden_states
            real = batch["attention_mask"].bool()
            for mine, theirs in zip(states, reference.hidden_states, strict=True):
                assert mine.shape == theirs.shape and mine.is_contiguous()
                difference = (mine - theirs)[real].abs().max()
                assert difference <= 1e-5 * theirs.abs().max()
    assert runner.stats.captures == 1 and runner.stats.replays >= 3
    assert 0 <= runner.report()["deviation"]["24"] < 1e-5
    assert len([r for r in caplog.records if "padded to 24" in r.getMessage()]) == 1


@pytest.mark.parametrize("name", ["qwen3", "t5"])
@pytest.mark.parametrize(
    "asked",
    [
        {"return_dict": False, "output_hidden_states": True},
        {"output_attentions": True, "output_hidden_states": True},
        {"output_hidden_states": 1},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_padding_would_spoil_is_not_padded(name, asked):
    """A tuple whose parts have no names, attentions, hidden states chosen by number."""
    model = tiny_llms.build(name)
    model.set_attn_implementation("eager")
    batch = tiny_llms.prompts([21, 9])

    def tensors():
        output = outputs(model, batch, **asked)
        named = dict(output) if not isinstance(output, tuple) else dict(enumerate(output))
        if "output_attentions" in asked:
            named.pop("logits", None)  # the last token's
        return tensor_leaves([v for v in named.values() if not isinstance(v, tf.Cache)])

    expected = tensors()
    wrapped(model, GraphConfig(backend="recorded", prompt_buckets=PROMPT_LADDER))
    for _ in range(4):
        found = tensors()
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def test_a_prompt_above_the_largest_bucket_is_eager_and_named():
    model = tiny_llms.build("qwen3")
    config = GraphConfig(backend="recorded", max_size={"prefill": 16})
    runner = wrapped(model, config)
    for _ in range(4):
        outputs(model, tiny_llms.prompts([17]))
        outputs(model, tiny_llms.prompts([16]))
    assert runner.stats.fallbacks[Reason.ABOVE_MAX_SIZE] == 4
    assert runner.stats.replays == 1


def test_only_the_last_logits_are_computed_and_no_cache_is_kept():
    model = tiny_llms.build("qwen3")
    batch = tiny_llms.prompts([9])
    last = outputs(model, batch, logits_to_keep=1).logits
    wrapped(model)
    for _ in range(5):
        output = outputs(model, batch, output_hidden_states=True)
        assert torch.equal(output.logits, last)
        assert output.get("past_key_values") is None and output.get("cache") is None


def test_calls_that_are_no_plain_encode_are_the_models_own():
    model = tiny_llms.build("qwen3")
    batch = tiny_llms.prompts([9])
    embeds = model.get_input_embeddings()(batch["input_ids"]).detach()
    expected = outputs(model, {"inputs_embeds": embeds}).logits
    cached = outputs(model, batch, use_cache=True)
    runner = wrapped(model)
    for _ in range(4):
        assert torch.equal(outputs(model, {"inputs_embeds": embeds}).logits, expected)
        assert torch.equal(outputs(model, batch, use_cache=True).logits, cached.logits)
    assert runner.stats.fallbacks[Reason.UNSUPPORTED_OUTPUT] >= 1


def test_a_graph_of_padded_prompts_does_not_serve_unpadded_ones():
    """The mask of ones is no mask: another kernel, another graph."""
    model = tiny_llms.build("qwen3")
    padded, whole = tiny_llms.prompts([9, 4]), tiny_llms.prompts([9, 9])
    expected = [outputs(model, batch, output_hidden_states=True) for batch in (padded, whole)]
    runner = wrapped(model)
    for _ in range(5):
        for batch, reference in zip((padded, whole), expected, strict=True):
            mine = outputs(model, batch, output_hidden_states=True).hidden_states[-1]
            assert torch.equal(mine, reference.hidden_states[-1])
    assert len(runner.cache.held()) == 2


def test_the_users_own_hooks_are_not_taken_for_transformers():
    model = tiny_llms.build("qwen3")
    runner = wrapped(model)
    batch = tiny_llms.prompts([9])
    seen = []
    model.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    for _ in range(4):
        outputs(model, batch, output_hidden_states=True)
    assert len(seen) == 4 and set(runner.stats.fallbacks) == {Reason.HOOKS}


def test_while_a_stream_is_captured_masks_are_decided_as_if_not(monkeypatch):
    """What transformers asks in a capture, without a GPU: its own answer is True there."""
    mask = torch.ones(1, 6, dtype=torch.long)
    config = tiny_llms.build("qwen3").config
    hidden = torch.empty(1, 6, 0)
    arguments = {"config": config, "inputs_embeds": hidden, "attention_mask": mask}
    arguments[cache_argument(masking_utils.create_causal_mask)] = None
    with mask_decisions_as_eager():
        assert masking_utils.create_causal_mask(**arguments) is None
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
    assert masking_utils.create_causal_mask(**arguments) is not None
    with mask_decisions_as_eager():
        assert masking_utils.create_causal_mask(**arguments) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mistral3", "t5"])
def test_half_precision_encodes_equally(name, dtype):
    model = tiny_llms.build(name, dtype)
    batch = tiny_llms.prompts([12, 5])
    expected = outputs(model, batch, output_hidden_states=True).hidden_states
    runner = wrapped(model)
    for _ in range(5):
        states = outputs(model, batch, output_hidden_states=True).hidden_states
        assert all(map(torch.equal, states, expected))
    assert runner.stats.replays >= 2


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.mark.parametrize("name", [*tiny_llms.DECODERS, *tiny_llms.ENCODERS])
def test_transformers_warns_of_nothing_that_its_user_did_not_do(name):
    """Its outputs take `"past_key_values" in output` for a question of the user's."""
    tiny_llms.needs_ready_masks(name)
    logger = tf.utils.logging.get_logger()
    heard = Heard()
    model = tiny_llms.build(name)
    batches = [tiny_llms.prompts([21, 9], seed=seed) for seed in range(4)]
    runner = wrapped(model)
    tf.utils.logging.warning_once.cache_clear()
    logger.addHandler(heard)
    try:
        for batch in batches:
            outputs(model, batch, output_hidden_states=True)
    finally:
        logger.removeHandler(heard)
    assert runner.stats.replays == 1
    assert heard.texts == []
