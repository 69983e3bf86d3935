"""Texts written from graphs: token for token those of transformers' own generate (fp32, greedy).

The reference runs over a growing cache, ours over slots of fixed length, so equal tokens mean that
every position, mask and slot was right.
"""

from __future__ import annotations

import logging

import pytest
import tiny_llms
import torch

from dit_graphs import Reason
from dit_graphs.llm import writing
from dit_graphs.llm.buckets import PROMPT_LADDER


def check(generator, model, lengths, new, *, seed=0, **kwargs):
    """Both ways on one batch; returns the new tokens."""
    batch = tiny_llms.prompts(lengths, seed=seed)
    expected = model.generate(**batch, max_new_tokens=new, do_sample=False, **kwargs)
    written = generator(**batch, max_new_tokens=new, do_sample=False, **kwargs)
    assert torch.equal(written, expected)
    return written[:, max(lengths) :]


@pytest.mark.parametrize("name", tiny_llms.DECODERS)
def test_every_class_writes_what_transformers_writes(recorded, name):
    model = tiny_llms.build(name)
    generator = recorded(model)
    check(generator, model, [7, 12, 3], 24)
    assert generator.runner.stats.replays >= 24 - 2
    assert set(generator.runner.stats.fallbacks) == {Reason.WARMING_UP}


@pytest.mark.parametrize("name", ["qwen3-sliding", "gemma2", "gemma3", "mistral"])
@pytest.mark.parametrize("length", [14, 15, 16, 17, 18])
def test_b82_texts_pass_their_sliding_window(recorded, name, length):
    """The window is 16: prompts end before, at and behind it, and texts run far past it."""
    model = tiny_llms.build(name)
    check(recorded(model), model, [length, 5], 28)


def test_b82_every_total_length_around_a_context_bucket(recorded, qwen3):
    """A decode reads 32, 64, 128… positions: one token less, exactly as many, and one more."""
    generator = recorded(qwen3)
    for total in (31, 32, 33, 63, 64, 65):
        check(generator, qwen3, [total - 12, 3], 12)


def test_b80_a_text_that_no_slot_holds_makes_the_slots_grow_first(recorded, qwen3):
    """Slots of 48 tokens (47 and the trash position): 0, 1 and many tokens too much."""
    generator = recorded(qwen3)
    check(generator, qwen3, [35], 12)
    assert generator.runner.cache.length == 48
    check(generator, qwen3, [36], 12)
    assert generator.runner.cache.length == 96
    check(generator, qwen3, [200], 12)
    assert generator.runner.cache.length >= 213
    check(generator, qwen3, [35], 12)


def test_slots_grow_while_a_text_is_written(recorded, qwen3, monkeypatch):
    monkeypatch.setattr(writing, "RESERVED_AT_ONCE", 10)
    generator = recorded(qwen3)
    check(generator, qwen3, [20, 9], 90, repetition_penalty=1.2)
    assert generator.runner.cache.length >= 110
    assert generator.runner.stats.replays >= 80


def test_b77_a_longer_text_begins_with_the_shorter_one(recorded, qwen3):
    generator = recorded(qwen3)
    texts = [check(generator, qwen3, [9], new) for new in (20, 30, 40)]
    assert torch.equal(texts[0], texts[1][:, :20])
    assert torch.equal(texts[1], texts[2][:, :30])


def test_b78_32_tokens_are_one_capture(recorded, qwen3):
    generator = recorded(qwen3)
    check(generator, qwen3, [9], 32)
    captured = [held.used.name for held in generator.runner.passes.held.values()]
    assert len([name for name in captured if name.startswith("DECODE")]) == 1
    assert generator.runner.stats.captures == 2  # the model and the choice of tokens


def test_b79_an_earlier_prompt_leaves_nothing_behind(recorded, qwen3):
    """A, a shorter B, A again on one runner."""
    generator = recorded(qwen3)
    first = check(generator, qwen3, [30, 11], 20, seed=1)
    check(generator, qwen3, [4], 8, seed=2)
    assert torch.equal(check(generator, qwen3, [30, 11], 20, seed=1), first)


def test_b82_batches_of_4_then_2_then_4(recorded, qwen3):
    generator = recorded(qwen3)
    for lengths in ([9, 3, 14, 6], [21, 2], [9, 3, 14, 6], [5]):
        check(generator, qwen3, lengths, 16)


def test_b81_a_row_does_not_feel_its_neighbours(recorded, qwen3):
    generator = recorded(qwen3)
    batch = tiny_llms.prompts([13, 4, 8])
    together = generator(**batch, max_new_tokens=16, do_sample=False)[:, 13:]
    for row, length in enumerate((13, 4, 8)):
        alone = generator(
            input_ids=batch["input_ids"][row : row + 1, 13 - length :],
            max_new_tokens=16,
            do_sample=False,
        )
        assert torch.equal(alone[0, length:], together[row])


def test_b81_other_padding_of_the_same_shape(recorded, qwen3):
    generator = recorded(qwen3)
    for lengths in ([12, 3], [12, 11], [5, 12], [12, 12]):
        check(generator, qwen3, lengths, 10)


def test_64_prompts_of_mixed_length_in_one_call(recorded, qwen3):
    lengths = [3 + (7 * row) % 29 for row in range(64)]
    generator = recorded(qwen3)
    check(generator, qwen3, lengths, 6)
    assert generator.runner.cache.slots == 64


@pytest.mark.parametrize("poll_every", [1, 4])
def test_b83_rows_that_end_early_are_padded_and_end_the_call(
    recorded, qwen3, monkeypatch, poll_every
):
    """End tokens come from what the rows write: they end at once, after some tokens, never."""
    monkeypatch.setattr(writing, "_POLL_EVERY", poll_every)
    generator = recorded(qwen3)
    free = check(generator, qwen3, [9, 5, 7], 24, eos_token_id=None)
    at_once, later = int(free[0, 0]), int(free[1, 8])
    check(generator, qwen3, [9, 5, 7], 24, eos_token_id=[at_once])
    written = check(generator, qwen3, [9, 5, 7], 24, eos_token_id=[at_once, later], pad_token_id=0)
    assert (written[0, 1:] == 0).all()
    every = [int(row[3]) for row in free]
    stopped = check(generator, qwen3, [9, 5, 7], 24, eos_token_id=every, pad_token_id=0)
    assert stopped.shape[1] <= 4
    check(generator, qwen3, [6], 24)  # the next call does not see the ended rows


def test_one_token(recorded, qwen3):
    check(recorded(qwen3), qwen3, [9, 4], 1)


def test_a_batch_above_the_largest_bucket_is_transformers_own_and_warned_of_once(
    recorded, qwen3, caplog
):
    generator = recorded(qwen3, max_size={"decode": 2})
    with caplog.at_level(logging.WARNING, logger="dit_graphs"):
        check(generator, qwen3, [4, 4, 4], 6)
        check(generator, qwen3, [5, 5, 5], 6)
    warned = [record for record in caplog.records if "above_max_size" in record.getMessage()]
    assert len(warned) == 1 and "3 rows, max_size['decode'] is 2" in warned[0].getMessage()
    assert generator.runner.stats.fallbacks == {Reason.ABOVE_MAX_SIZE: 2}
    check(generator, qwen3, [4, 4], 6)
    assert generator.runner.stats.replays == 4


def test_the_log_names_mode_and_graph_of_every_pass(recorded, qwen3, caplog):
    generator = recorded(qwen3)
    with caplog.at_level(logging.DEBUG, logger="dit_graphs"):
        check(generator, qwen3, [9], 6)
    lines = [r.getMessage() for r in caplog.records if r.module == "forward_mode"]
    assert len([line for line in lines if " EXTEND: " in line]) == 1
    assert len([line for line in lines if " DECODE: rows " in line]) == 5
    assert [line.rsplit(": ", 1)[1] for line in lines] == ["eager"] * 2 + ["cpu recorder"] * 5


def test_prompts_padded_to_a_ladder_write_the_same(recorded, qwen3):
    generator = recorded(qwen3, prompt_buckets=PROMPT_LADDER)
    check(generator, qwen3, [40], 8)  # slots that hold everything below
    for length in (21, 22, 23, 21, 22):
        check(generator, qwen3, [length], 8)
    assert generator.prefill.stats.replays >= 2
    assert len(generator.prefill.cache.held()) == 1  # one graph for every length up to 23


@pytest.mark.parametrize("name", tiny_llms.DECODERS)
def test_ragged_prompts_are_packed_into_one_row(recorded, name, caplog):
    """21 + 5 + 9 tokens are 35 in a bucket of 48, where dense rows would be 3 × 24."""
    model = tiny_llms.build(name)
    generator = recorded(model, prompt_buckets=PROMPT_LADDER)
    check(generator, model, [40, 3, 3, 3], 8)  # slots that hold everything below
    with caplog.at_level(logging.INFO, logger="dit_graphs"):
        for lengths in ([21, 5, 9], [17, 14, 3], [22, 20, 1], [4, 24, 8], [19, 3, 20]):
            check(generator, model, lengths, 8, seed=sum(lengths))
    assert generator.prefill.stats.replays >= 2
    assert generator.prefill.stats.fallbacks.keys() == {Reason.WARMING_UP}
    lines = [record.getMessage() for record in caplog.records]
    assert any("(one row of 48, 4 request slots)" in line for line in lines)


def test_rows_of_one_length_are_not_packed(recorded, qwen3, caplog):
    generator = recorded(qwen3, prompt_buckets=PROMPT_LADDER)
    with caplog.at_level(logging.INFO, logger="dit_graphs"):
        check(generator, qwen3, [24, 24], 8)
    assert any("2 × 24 tokens (bucket 24)" in r.getMessage() for r in caplog.records)


def test_counters_and_slots_are_reported(recorded, qwen3):
    generator = recorded(qwen3)
    check(generator, qwen3, [9, 9, 9], 8)
    report = generator.runner.report()
    assert report["new_tokens"] == 24 and report["calls"] == 1
    assert report["slots"] == 4 and report["row_padding"] == pytest.approx(4 / 3)
    # 3 layers × 2 heads × (8 + 8) × 4 bytes = 384 bytes per token, 32 tokens per slot
    assert report["slot_tokens"] == 32 and report["slot_bytes"] == 32 * 384
    assert report["kv_bytes"] == 4 * 32 * 384
    assert report["first_token_ms"] > 0
    check(generator, qwen3, [9, 5], 8)  # 41 tokens so far in 45 columns
    assert generator.runner.report()["prompt_padding"] == pytest.approx(45 / 41)


def test_one_prompt_costs_one_slot(recorded, qwen3):
    generator = recorded(qwen3)
    check(generator, qwen3, [100], 50)
    needed = 150 * 384
    assert generator.runner.report()["kv_bytes"] <= 1.2 * needed
