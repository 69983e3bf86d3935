"""Owns how a token is chosen from logits, by device operations only.

Must never know models. The surprising fact: the draw is written out as the division by
exponential noise that `torch.multinomial` performs, in the same shape, because that function reads
its input on the host and cannot be captured. From one seed the tokens are those of `multinomial`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError

__all__ = ["GREEDY", "Sampling", "choose", "draw_noise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen: greedy, or drawn after temperature, top-k and top-p, in this order.

    Semantics of transformers' processors of these names. Raises `ConfigError` on a wrong value.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ConfigError(f"temperature: expected a number > 0, got {self.temperature!r}")
        if self.top_k < 0:
            raise ConfigError(f"top_k: expected a number ≥ 0 (0: off), got {self.top_k!r}")
        if not 0 <= self.top_p <= 1:
            raise ConfigError(f"top_p: expected a number from 0 to 1, got {self.top_p!r}")
        if not self.repetition_penalty > 0:
            raise ConfigError(
                f"repetition_penalty: expected a number > 0, got {self.repetition_penalty!r}"
            )

    @property
    def penalises(self) -> bool:
        """Whether tokens seen before weigh less."""
        return self.repetition_penalty != 1.0


GREEDY = Sampling()


def choose(logits: Tensor, sampling: Sampling, seen: Tensor | None) -> Tensor:
    """One token per row: [B] of `logits` [B, vocabulary] (float32).

    `seen`: bool [B, vocabulary], the tokens of the text so far; needed with a penalty.
    """
    scores = logits
    if sampling.penalises:
        assert seen is not None
        scores = penalise(scores, seen, sampling.repetition_penalty)
    if not sampling.do_sample:
        return scores.argmax(dim=-1)
    if sampling.temperature != 1.0:
        scores = scores / sampling.temperature
    if sampling.top_k:
        scores = keep_top_k(scores, sampling.top_k)
    if sampling.top_p < 1.0:
        scores = keep_top_p(scores, sampling.top_p)
    probabilities = scores.softmax(dim=-1)
    return probabilities.div(draw_noise(probabilities)).argmax(dim=-1)


def draw_noise(like: Tensor) -> Tensor:
    """Exponential noise of the default generator, shaped like `like`."""
    return torch.empty_like(like).exponential_(1)


def penalise(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Scores of seen tokens, divided by the penalty (multiplied where negative)."""
    lowered = torch.where(scores < 0, scores * penalty, scores / penalty)
    return torch.where(seen, lowered, scores)


def keep_top_k(scores: Tensor, k: int) -> Tensor:
    """All but the k best (and their equals) are -inf."""
    k = min(k, scores.shape[-1])
    threshold = scores.topk(k)[0][..., -1, None]
    return scores.masked_fill(scores < threshold, -float("inf"))


def keep_top_p(scores: Tensor, p: float) -> Tensor:
    """Only the smallest set of best tokens whose probabilities reach p is not -inf."""
    ordered, order = scores.sort(descending=False)
    removed = ordered.softmax(dim=-1).cumsum(dim=-1) <= (1 - p)
    removed[..., -1:] = False
    return scores.masked_fill(removed.scatter(1, order, removed), -float("inf"))
