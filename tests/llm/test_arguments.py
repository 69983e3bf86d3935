"""What decode graphs do not have goes to transformers, with the reason named, never ignored."""

from __future__ import annotations

import pytest
import tiny_llms
import torch
import transformers as tf
from transformers.generation import stopping_criteria

from dit_graphs import Reason
from dit_graphs.pipelines.text_encoder.arguments import Refused, left_lengths
from dit_graphs.pipelines.text_encoder.causal_lm import why_not
from dit_graphs.pipelines.text_encoder.masks import cache_argument


class _EveryToken(tf.LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.roll(1, dims=-1)


class _Never(stopping_criteria.StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


UNSUPPORTED = {
    "num_beams=2": {"num_beams": 2},
    "prompt_lookup_num_tokens=2": {"prompt_lookup_num_tokens": 2},
    "return_dict_in_generate=True": {"return_dict_in_generate": True},
    "use_cache=False": {"use_cache": False},
    "use_cache=None": {"use_cache": None},
    "cache_implementation='static'": {"cache_implementation": "static"},
    "_EveryToken in this place": {"logits_processor": [_EveryToken()]},
    "MinPLogitsWarper in this place": {"do_sample": True, "min_p": 0.1},
    "NoRepeatNGramLogitsProcessor in this place": {"no_repeat_ngram_size": 2},
    "MinLengthLogitsProcessor in this place": {"min_new_tokens": 4},
    "_Never": {"stopping_criteria": [_Never()]},
    "MaxTimeCriteria": {"max_time": 60.0},
}


def generate_both(generator, model, batch, **options):
    options = {"max_new_tokens": 10, "do_sample": False, **options}
    results = []
    for generate in (model.generate, generator):
        torch.manual_seed(0)
        found = generate(**batch, **options)
        results.append(found if isinstance(found, torch.Tensor) else found.sequences)
    return results


@pytest.mark.parametrize("detail", UNSUPPORTED)
def test_an_argument_without_a_graph_is_transformers_own_and_named(recorded, qwen3, detail):
    generator = recorded(qwen3)
    batch = tiny_llms.prompts([6] if "lookup" in detail else [6, 3])
    expected, written = generate_both(generator, qwen3, batch, **UNSUPPORTED[detail])
    assert torch.equal(written, expected)
    stats = generator.runner.stats
    assert stats.fallbacks == {Reason.GENERATE_ARGUMENT: 1}
    assert stats.details[Reason.GENERATE_ARGUMENT] == detail
    assert stats.replays == 0


@pytest.mark.parametrize("lengths", [[6], [6, 3, 5]])
@pytest.mark.parametrize("can_end", [False, True])
def test_a_streamer_hears_what_is_written_from_graphs(recorded, qwen3, lengths, can_end):
    class Streamer:
        def __init__(self) -> None:
            self.heard, self.ends = [], 0

        def put(self, value):
            assert value.device.type == "cpu"
            self.heard.append(value)

        def end(self):
            self.ends += 1

    prompts, generator = tiny_llms.prompts(lengths), recorded(qwen3)
    given = {"max_new_tokens": 11, "do_sample": False, "pad_token_id": 0}
    text = qwen3.generate(**prompts, **given)
    if can_end:
        given["eos_token_id"] = int(text[0, lengths[0] + 4])
        text = qwen3.generate(**prompts, **given)
    ours, theirs = Streamer(), Streamer()
    assert torch.equal(generator(**prompts, **given, streamer=ours), text)
    qwen3.generate(**prompts, **given, streamer=theirs)
    assert generator.runner.stats.replays and not generator.runner.stats.fallbacks.get(
        Reason.GENERATE_ARGUMENT
    )
    assert len(ours.heard) == len(theirs.heard) and (ours.ends, theirs.ends) == (1, 1)
    assert all(map(torch.equal, ours.heard, theirs.heard))


def test_arguments_by_position_are_transformers_own(recorded, qwen3):
    generator, config = recorded(qwen3), tf.GenerationConfig(num_beams=2, max_new_tokens=5)
    ids = tiny_llms.prompts([6])["input_ids"]
    assert torch.equal(generator(ids, config), qwen3.generate(ids, config))
    assert generator.runner.stats.details[Reason.GENERATE_ARGUMENT] == "arguments by position"


@pytest.mark.parametrize("with_mask", [False, True])
def test_embeddings_instead_of_tokens_are_transformers_own(recorded, qwen3, with_mask):
    """A tensor among the arguments is never asked whether it equals None."""
    generator, prompt = recorded(qwen3), tiny_llms.prompts([6])
    given = {"inputs_embeds": qwen3.get_input_embeddings()(prompt["input_ids"])}
    if with_mask:
        given["attention_mask"] = prompt["attention_mask"]
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(generator(**given, **options), qwen3.generate(**given, **options))
    assert generator.runner.stats.details[Reason.GENERATE_ARGUMENT] == "inputs_embeds"


def test_a_way_of_decoding_left_open_is_no_other_way(recorded, qwen3):
    """`custom_generate=None` is the default spelled out; ours goes into the same argument."""
    generator, prompt = recorded(qwen3), tiny_llms.prompts([6])
    expected, written = generate_both(generator, qwen3, prompt, custom_generate=None)
    assert torch.equal(written, expected) and generator.runner.stats.replays


@pytest.mark.parametrize(
    ("reason", "given"),
    [
        (Reason.PADDING, {"inputs": torch.zeros((1, 0), dtype=torch.int64)}),
        (Reason.PADDING, {"inputs": torch.zeros((0, 9), dtype=torch.int64)}),
        (
            Reason.GENERATE_ARGUMENT,
            {"inputs": torch.ones((1, 9), dtype=torch.int64), "attention_mask": torch.ones(2, 9)},
        ),
    ],
    ids=["no tokens", "no rows", "a mask of more rows"],
)
def test_a_prompt_that_cannot_be_read_raises_what_transformers_raises(
    recorded, qwen3, reason, given
):
    generator = recorded(qwen3)
    messages = []
    for generate in (qwen3.generate, generator):
        with pytest.raises(Exception) as caught:
            generate(**given, max_new_tokens=3)
        messages.append(repr(caught.value))
    assert messages[0] == messages[1]
    assert set(generator.runner.stats.fallbacks) == {reason}


def test_a_streamer_that_raises_stops_the_text_and_the_next_one_is_whole(recorded, qwen3):
    class Enough(Exception):
        pass

    class Streamer:
        count = 0

        def put(self, value):
            self.count += 1
            if self.count == 4:
                raise Enough

        def end(self):
            raise AssertionError("it never ended")

    prompts, generator = tiny_llms.prompts([6]), recorded(qwen3)
    given = {"max_new_tokens": 11, "do_sample": False}
    with pytest.raises(Enough):
        generator(**prompts, **given, streamer=Streamer())
    assert torch.equal(generator(**prompts, **given), qwen3.generate(**prompts, **given))


@pytest.mark.parametrize("filled", [0, 5])
def test_a_cache_that_is_given_is_filled_by_transformers(recorded, qwen3, filled):
    """Whoever gives one goes on from it; slots would leave it as it was."""
    batch = tiny_llms.prompts([6])
    texts, caches = [], []
    generator = recorded(qwen3)
    name = cache_argument(type(qwen3).forward)
    for generate in (qwen3.generate, generator):
        cache = tf.DynamicCache(config=qwen3.config)
        if filled:
            ids = batch["input_ids"][:, :filled]
            qwen3(input_ids=ids, use_cache=True, **{name: cache})
        texts.append(generate(**batch, max_new_tokens=6, do_sample=False, **{name: cache}))
        caches.append(cache)
    assert torch.equal(*texts)
    assert caches[1].get_seq_length() == caches[0].get_seq_length() == 11
    assert generator.runner.stats.details[Reason.GENERATE_ARGUMENT] == name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_return_sequences": 2, "do_sample": True},
        {"temperature": 0.6, "do_sample": True},
        {"repetition_penalty": 1.4},
        {"max_length": 14, "max_new_tokens": None},
        {"max_new_tokens": 6.5},
        {"eos_token_id": [4, 7], "pad_token_id": 0},
        {"generation_config": tf.GenerationConfig(max_new_tokens=7, eos_token_id=[1, 2])},
    ],
    ids=str,
)
def test_what_is_supported_is_written_from_graphs(recorded, qwen3, options):
    generator = recorded(qwen3)
    expected, written = generate_both(generator, qwen3, tiny_llms.prompts([6, 3]), **options)
    assert torch.equal(written, expected)
    assert set(generator.runner.stats.fallbacks) == {Reason.WARMING_UP}
    assert generator.runner.stats.replays > 0


def test_a_positional_prompt_without_a_mask(recorded, qwen3):
    generator = recorded(qwen3)
    ids = tiny_llms.prompts([6])["input_ids"]
    expected = qwen3.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(generator(ids, max_new_tokens=6, do_sample=False), expected)
    assert generator.runner.stats.replays == 4


def test_b81_right_padding_is_refused_with_what_to_do(recorded, qwen3):
    generator = recorded(qwen3)
    batch = tiny_llms.prompts([6, 3], side="right")
    expected, written = generate_both(generator, qwen3, batch)
    assert torch.equal(written, expected)  # transformers' own answer, with its own warning
    assert "padding_side='left'" in generator.runner.stats.details[Reason.PADDING]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1, 0]], "right padding"),
        ([[1, 0, 1]], "holes"),
        ([[0, 0, 0]], "without any token"),
        ([[1, 1]], "another shape"),
    ],
)
def test_masks_that_are_no_left_padding(mask, message):
    with pytest.raises(Refused, match=message):
        left_lengths(torch.ones(1, 3, dtype=torch.long), torch.tensor(mask))


def test_left_padding_is_read():
    mask = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1]])
    assert left_lengths(torch.ones(3, 3, dtype=torch.long), mask) == (2, 3, 1)
    assert left_lengths(torch.ones(3, 3, dtype=torch.long), None) == (3, 3, 3)


def test_models_that_cannot_be_decoded_over_slots_say_why(recorded):
    model = tiny_llms.build("qwen3")
    model.set_attn_implementation("flex_attention")
    assert why_not(model) == "attention 'flex_attention'; sdpa and eager can be decoded over slots"
    bidirectional = tiny_llms.build("gemma3")
    bidirectional.config.use_bidirectional_attention = True
    assert why_not(bidirectional) == "text attention is bidirectional"
    encoder_decoder = tf.T5ForConditionalGeneration(
        tf.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
                    decoder_start_token_id=0)
    ).eval()  # fmt: skip
    generator = recorded(encoder_decoder)
    for seed in (1, 2, 1):  # A, B, A
        batch = tiny_llms.prompts([6, 4], seed=seed, side="right")
        batch["input_ids"] = batch["input_ids"] % 64
        expected, written = generate_both(generator, encoder_decoder, batch)
        assert torch.equal(written, expected)
    assert generator.runner.stats.fallbacks == {Reason.UNSUPPORTED_MODEL: 3}
