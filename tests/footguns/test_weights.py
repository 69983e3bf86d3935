"""Weights that move, change or are exchanged on a pipeline, between pictures and between steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pair import Pair
from torch import nn

Change = Callable[[object], object]


def _halved(pipe: object) -> dict[str, torch.Tensor]:
    return {name: value * 0.5 for name, value in pipe.transformer.state_dict().items()}


def _new_layer(pipe: object) -> None:
    torch.manual_seed(3)
    old = pipe.transformer.proj_out
    pipe.transformer.proj_out = nn.Linear(old.in_features, old.out_features)


def _new_data(pipe: object) -> None:
    weight = pipe.transformer.proj_out.weight
    weight.data = weight.data * 1.5


def _in_place(pipe: object) -> None:
    with torch.no_grad():
        pipe.transformer.proj_out.weight.mul_(-1.0)


def _tied(pipe: object) -> None:
    attention = pipe.transformer.transformer_blocks[0].attn
    attention.to_k = attention.to_q


# whether the weights lie elsewhere afterwards, so that the graphs must go
_CHANGES: dict[str, tuple[Change, bool]] = {
    "loaded in place": (lambda pipe: pipe.transformer.load_state_dict(_halved(pipe)), False),
    "loaded by assignment": (
        lambda pipe: pipe.transformer.load_state_dict(_halved(pipe), assign=True),
        True,
    ),
    "another dtype and back": (lambda pipe: pipe.to(torch.float64).to(torch.float32), True),
    "a layer exchanged": (_new_layer, True),
    "a parameter's data exchanged": (_new_data, True),
    "written in place": (_in_place, False),
    "one layer in two places": (_tied, True),
}


@pytest.mark.parametrize("kind", _CHANGES)
def test_b14_the_next_picture_is_drawn_with_the_weights_of_now(kind: str) -> None:
    """Twice, with graphs in between; in place they stay, elsewhere they are captured anew."""
    change, moves = _CHANGES[kind]
    pair = Pair("flux")
    before = pair.latents()
    for _ in range(2 if kind != "one layer in two places" else 1):
        pair.both(change)
        pair.latents()
    after = pair.latents()
    assert torch.equal(before, after) is (kind in ("another dtype and back", "written in place"))
    assert (pair.component()["invalidations"] > 0) is moves
    assert (pair.captures > 1) is moves
    assert pair.replays >= 4


@pytest.mark.parametrize(
    "kind",
    [
        "loaded in place",
        "loaded by assignment",
        "a layer exchanged",
        "a parameter's data exchanged",
    ],
)
def test_b14_weights_changed_by_a_callback_count_from_the_next_step_on(kind: str) -> None:
    """Between two steps of one request, by a method that says so or without a word."""
    change, _ = _CHANGES[kind]
    pair = Pair("flux")
    plain = pair.latents(steps=6)

    def callback(pipe: object, step: int, timestep: object, kept: dict) -> dict:
        if step == 2:
            change(pipe)
        return kept

    assert not torch.equal(pair.latents(steps=6, callback_on_step_end=callback), plain)
    pair.latents(steps=6)


def test_b14_the_denoiser_itself_is_exchanged() -> None:
    """`pipe.transformer = other`: the old one's graphs must not answer, nor keep its weights."""
    pair, other = Pair("flux"), Pair("flux")
    other.both(_in_place)
    first = pair.latents()
    for pipe, donor in ((pair.fast, other.fast), (pair.plain, other.plain)):
        pipe.transformer = donor.transformer
    second = pair.latents()
    assert not torch.equal(first, second)
    assert torch.equal(pair.latents(), second)
