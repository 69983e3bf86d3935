"""Python's and numpy's random numbers: drawn once per call, and never baked into a graph.

`Twin` compares both streams with those of a module that was only ever called.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where

from dit_graphs import eager_on_graph

CAPTURES = ["second_use", "first_use"]
DRAWS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "numpy": lambda: float(np.random.rand()),
}


class Draws(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x * self.draw()


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("kind", DRAWS)
def test_a_number_drawn_by_the_forward_is_no_constant(
    where: Where, kind: str, capture: str
) -> None:
    twin = Twin(Draws(DRAWS[kind]), where, capture=capture)
    for index in range(7):
        twin(where.randn(8, seed=index))
    assert twin.replays == 0
    assert f"{kind.replace('numpy', 'numpy.random')}'s stream" in twin.details["python_state"]


def test_a_draw_that_changes_nothing_is_one_draw_per_call(where: Where) -> None:
    twin = Twin(Draws(lambda: 1.0 if random.random() < 2 else 0.0), where)
    for index in range(7):
        twin(where.randn(8, seed=index))


@pytest.mark.parametrize("kind", DRAWS)
def test_a_number_drawn_in_a_break_is_drawn_again_by_each_replay(
    segmenting: Where, kind: str
) -> None:
    twin = Twin(Draws(DRAWS[kind]), segmenting)
    for module in (twin.module, twin.plain):
        module.forward = eager_on_graph(module.forward)  # type: ignore[method-assign]
    for index in range(7):
        twin(segmenting.randn(8, seed=index))
    assert twin.replays == 4, twin.details


def test_a_replay_that_is_given_up_has_drawn_nothing(segmenting: Where) -> None:
    class Turns(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return _drawn(x * 2) + 1

    twin = Twin(Turns(), segmenting)
    for index in range(5):
        twin(segmenting.randn(8, seed=index).abs())
    assert twin.replays == 2
    with pytest.raises(ValueError, match="below zero"):
        twin(-segmenting.randn(8).abs())


@eager_on_graph
def _drawn(x: Tensor) -> Tensor:
    number = random.random()
    if x.sum() < 0:
        raise ValueError("below zero")
    return x * torch.tensor(number, device=x.device)
