"""Drawn tokens: transformers' own from the same seed, and a generator left where it would be."""

from __future__ import annotations

import pytest
import tiny_llms
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as theirs

from dit_graphs import Reason
from dit_graphs.llm import writing
from dit_graphs.llm.sampling import Sampling, choose, keep_top_k, keep_top_p, penalise
from dit_graphs.llm.stop_flag import StopFlag

SETTINGS = [
    {},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.8, "top_k": 0},
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_a_seed_draws_what_transformers_draws(recorded, qwen3, options):
    """Also in a bucket with padded rows, and the random numbers behind it go on alike."""
    generator = recorded(qwen3)
    for lengths in ([9], [7, 12, 3]):
        batch = tiny_llms.prompts(lengths)
        results = []
        for generate in (qwen3.generate, generator):
            torch.manual_seed(3)
            torch.rand(5)  # other random work
            text = generate(**batch, max_new_tokens=20, do_sample=True, **options)
            results.append((text, torch.rand(4)))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
    assert generator.runner.stats.replays >= 2 * 18


class LateFlag(StopFlag):
    """As on a GPU: the host learns of the end one look late."""

    def __init__(self, device):
        super().__init__(device)
        self._lag = 1


@pytest.mark.parametrize("flag", [StopFlag, LateFlag])
def test_steps_behind_the_last_end_draw_nothing(recorded, qwen3, monkeypatch, flag):
    """The host looks every few steps; what was drawn meanwhile is given back."""
    monkeypatch.setattr(writing, "StopFlag", flag)
    generator = recorded(qwen3)
    batch = tiny_llms.prompts([9, 4])
    ends = list(range(20, 36))
    written = []
    for seed in range(6):
        states = []
        for generate in (qwen3.generate, generator):
            torch.manual_seed(seed)
            text = generate(**batch, max_new_tokens=20, do_sample=True, eos_token_id=ends)
            states.append((text, torch.get_rng_state()))
        assert torch.equal(states[0][0], states[1][0])
        assert torch.equal(states[0][1], states[1][1])
        written.append(states[0][0].shape[1] - 9)
    assert min(written) < 20 and len(set(written)) > 2  # texts end here and there
    assert set(generator.runner.stats.fallbacks) == {Reason.WARMING_UP}


def test_captures_draw_nothing(recorded, qwen3):
    """The first call captures and compares; the second only replays. Same seed, same text."""
    generator = recorded(qwen3)
    batch = tiny_llms.prompts([9])
    texts = []
    for _ in range(2):
        torch.manual_seed(11)
        texts.append(generator(**batch, max_new_tokens=16, do_sample=True))
    assert torch.equal(texts[0], texts[1])


@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.1, 3.0),
    top_k=st.integers(1, 100),
    top_p=st.floats(0.01, 0.99),
)
@settings(max_examples=40, deadline=None)
def test_processors_are_bit_equal_to_transformers(seed, temperature, top_k, top_p):
    scores = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)) * 4
    assert torch.equal(keep_top_k(scores, top_k), theirs.TopKLogitsWarper(top_k)(None, scores))
    assert torch.equal(keep_top_p(scores, top_p), theirs.TopPLogitsWarper(top_p)(None, scores))
    heated = theirs.TemperatureLogitsWarper(temperature)(None, scores)
    torch.manual_seed(seed)
    drawn = choose(scores, Sampling(do_sample=True, temperature=temperature), None)
    torch.manual_seed(seed)
    assert torch.equal(drawn, torch.multinomial(heated.softmax(-1), 1)[:, 0])


def test_a_penalty_weighs_tokens_as_transformers_does():
    scores = torch.randn(2, 16)
    ids = torch.tensor([[3, 5, 5], [0, 1, 15]])
    seen = torch.zeros(2, 16, dtype=torch.bool).scatter_(1, ids, True)
    expected = theirs.RepetitionPenaltyLogitsProcessor(1.4)(ids, scores.clone())
    assert torch.equal(penalise(scores, seen, 1.4), expected)


def test_drawn_tokens_follow_their_probabilities():
    """20,000 draws of 4 tokens: within 5 standard deviations of each probability."""
    torch.manual_seed(0)
    probabilities = torch.tensor([0.1, 0.2, 0.3, 0.4])
    drawn = choose(probabilities.log().expand(20_000, 4), Sampling(do_sample=True), None)
    share = torch.bincount(drawn, minlength=4) / 20_000
    deviation = (probabilities * (1 - probabilities) / 20_000).sqrt()
    assert ((share - probabilities).abs() < 5 * deviation).all()
