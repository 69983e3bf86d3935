"""The ladders: which bucket a size gets, and how many rows a device holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dit_graphs.llm.buckets import (
    BATCH_LADDER,
    MAX_PADDING,
    PROMPT_LADDER,
    batch_bucket,
    context_bucket,
    default_max_rows,
    prompt_bucket,
    slot_length,
)

GIB = 1 << 30


def test_the_ladders_have_their_documented_rungs():
    assert PROMPT_LADDER[:9] == (4, 8, 12, 16, 20, 24, 28, 32, 48)
    assert {256, 288, 512, 576, 1024, 1280, 4096} <= set(PROMPT_LADDER)
    assert BATCH_LADDER[:8] == (1, 2, 4, 8, 12, 16, 24, 32)
    assert {256, 272, 496, 512, 544} <= set(BATCH_LADDER)
    for ladder in (PROMPT_LADDER, BATCH_LADDER):
        assert list(ladder) == sorted(set(ladder))


@given(st.integers(1, 5000))
def test_a_prompt_gets_the_smallest_rung_that_holds_it_or_none(tokens):
    bucket = prompt_bucket(tokens, PROMPT_LADDER)
    holding = [rung for rung in PROMPT_LADDER if rung >= tokens]
    if not holding or holding[0] > MAX_PADDING * tokens:
        assert bucket is None
    else:
        assert bucket == holding[0]


@given(st.integers(1, 600), st.integers(1, 600))
def test_rows_get_a_bucket_up_to_the_largest(rows, max_rows):
    bucket = batch_bucket(rows, max_rows)
    if rows > max_rows:
        assert bucket is None
    else:
        assert bucket is not None and rows <= bucket <= max_rows


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_slots_hold_the_text_and_the_trash_position(tokens, current):
    length = slot_length(tokens, current)
    assert (length >= tokens + 1 and length % 8 == 0) or length == 2 * current
    if current and length > current:
        assert length >= 2 * current


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_a_decode_reads_at_most_twice_what_the_text_needs(tokens, more):
    length = slot_length(tokens + more, 0)
    context = context_bucket(tokens, length)
    assert tokens <= context <= max(2 * tokens, 32)


@pytest.mark.parametrize(
    ("total", "rows"), [(16 * GIB, 8), (48 * GIB, 32), (80 * GIB, 256), (141 * GIB, 512)]
)
def test_the_largest_bucket_follows_the_device(total, rows):
    assert default_max_rows(total_bytes=total, free_bytes=1 << 60, slot_bytes=1 << 20) == rows


def test_slots_take_a_tenth_of_what_is_free():
    # 4,096 tokens of a 4B model: 36 layers × 8 heads × 128 × 2 × 2 bytes = 147,456 per token
    slot = 4096 * 147_456
    assert default_max_rows(total_bytes=141 * GIB, free_bytes=130 * GIB, slot_bytes=slot) == 23
    assert default_max_rows(total_bytes=141 * GIB, free_bytes=GIB, slot_bytes=slot) == 1
