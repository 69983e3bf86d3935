"""The bugs other decoders had, put in on purpose: the token tests must see every one of them.

The comparison of a graph with eager cannot: both run the mutated step.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny_llms
import torch

from dit_graphs.llm import kv, prefill, state


def stale_tail(monkeypatch):
    """A token attends to whatever an earlier text left behind it."""
    original = state.DecodeState.allowed

    def allowed(self, rows, context, window):
        return torch.ones_like(original(self, rows, context, window))

    monkeypatch.setattr(state.DecodeState, "allowed", allowed)


def short_sight(monkeypatch):
    """Off by one: a token does not attend to itself."""
    original = state.DecodeState.allowed

    def allowed(self, rows, context, window):
        self.position.sub_(1)
        mask = original(self, rows, context, window)
        self.position.add_(1)
        return mask

    monkeypatch.setattr(state.DecodeState, "allowed", allowed)


def no_window(monkeypatch):
    """Sliding layers see everything."""
    original = state.DecodeState.allowed
    monkeypatch.setattr(
        state.DecodeState,
        "allowed",
        lambda self, rows, context, window: original(self, rows, context, None),
    )


def wrong_slot(monkeypatch):
    """A step writes its keys into the next row's slot."""
    original = kv.SlotCache.write

    def write(self, layer, keys, values, positions):
        if positions.shape[1] == 1:
            keys, values = keys.roll(1, dims=0), values.roll(1, dims=0)
        original(self, layer, keys, values, positions)

    monkeypatch.setattr(kv.SlotCache, "write", write)


def frozen_length(monkeypatch):
    """Every step writes to the position of the first."""
    original = state.DecodeState.advance

    def advance(self, rows, sampling):
        original(self, rows, sampling)
        self.position[:rows].copy_(torch.minimum(self.position[:rows], self.first[:rows]))

    begin = state.DecodeState.begin

    def remember(self, lengths, table, **kwargs):
        begin(self, lengths, table, **kwargs)
        self.first = self.position + 1

    monkeypatch.setattr(state.DecodeState, "advance", advance)
    monkeypatch.setattr(state.DecodeState, "begin", remember)


def frozen_numbers(monkeypatch):
    """Rotary positions stand still while slots fill."""
    original = state.DecodeState.positions_now

    def positions_now(self, rows):
        return self.table[:, :rows, :1].clone()

    assert original is not positions_now
    monkeypatch.setattr(state.DecodeState, "positions_now", positions_now)


def padding_kept(monkeypatch):
    """Left padding is stored in the slots as if it were text."""

    def positions(lengths, width, trash, device):
        return torch.arange(width).expand(len(lengths), width).to(device)

    from dit_graphs.llm import writing

    assert prefill.prompt_positions is writing.prompt_positions
    monkeypatch.setattr(writing, "prompt_positions", positions)


def end_unseen(monkeypatch):
    """Rows that have ended write on."""
    original = state.DecodeState.advance

    def advance(self, rows, sampling):
        self.finished.zero_()
        original(self, rows, sampling)

    monkeypatch.setattr(state.DecodeState, "advance", advance)


MUTANTS: list[Callable[..., None]] = [
    stale_tail, short_sight, no_window, wrong_slot, frozen_length, frozen_numbers, padding_kept,
    end_unseen,
]  # fmt: skip


def is_equal(generator, model):
    """A, B, A with rows of several lengths that end at different tokens."""
    equal = True
    for seed, lengths in ((1, [20, 7, 12]), (2, [5]), (1, [20, 7, 12])):
        batch = tiny_llms.prompts(lengths, seed=seed)
        options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": list(range(20, 30))}
        expected = model.generate(**batch, **options)
        equal &= torch.equal(generator(**batch, **options), expected)
    return equal


def test_without_a_mutant_tokens_are_equal(recorded):
    model = tiny_llms.build("qwen3-sliding")
    assert is_equal(recorded(model), model)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_tokens_show_the_mutant(recorded, monkeypatch, mutant):
    model = tiny_llms.build("qwen3-sliding")
    mutant(monkeypatch)
    assert not is_equal(recorded(model), model)
