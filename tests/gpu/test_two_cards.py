"""Two cards in one process: graphs live on their module's card, whichever card is current."""

from __future__ import annotations

import pytest
import torch
from blocks import Denoiser, build, inputs

import dit_graphs
from dit_graphs import GraphConfig, wrap
from dit_graphs.memory import device_state
from dit_graphs.wrapping import runner_of

pytestmark = pytest.mark.multigpu


def on_card(card: int, seed: int = 0) -> Denoiser:
    with torch.cuda.device(card):
        return build(seed=seed)


def call(module: Denoiser, card: int, seed: int) -> torch.Tensor:
    """Calls with inputs that lie on `card`; the current card stays what it was."""
    kwargs = {name: value.to(f"cuda:{card}") for name, value in inputs(seed).items()}
    before = torch.cuda.current_device()
    with torch.no_grad():
        result = module(**kwargs)[0]
    assert torch.cuda.current_device() == before
    assert result.device == torch.device("cuda", card)
    return result


@pytest.mark.parametrize("backend", ["full", "breakable", "debug"])
def test_b66_a_module_on_another_card_than_the_current_one(backend):
    module, reference = on_card(1), on_card(1)
    attention = "eager" if backend == "breakable" else "auto"
    wrap(module, GraphConfig(backend=backend, attention=attention))
    allocated = torch.cuda.memory_allocated(0)
    with dit_graphs.request(total_steps=8):
        for seed in range(8):
            assert torch.equal(call(module, 1, seed), call(reference, 1, seed))
    report = runner_of(module).report()
    assert report["replays"] == 5 and report["graphs"][0]["verified"] == "3/3 leaves"
    assert torch.cuda.memory_allocated(0) - allocated < 2**20, "the graph lives on its own card"


def test_b66_two_modules_on_two_cards_in_turn():
    modules = [on_card(card, seed=card) for card in (0, 1)]
    references = [on_card(card, seed=card) for card in (0, 1)]
    for module in modules:
        wrap(module, GraphConfig(backend="full"))
    with dit_graphs.request(total_steps=16):
        for seed in range(8):
            for card in (0, 1):
                got, want = call(modules[card], card, seed), call(references[card], card, seed)
                assert torch.equal(got, want), (seed, card)
    assert [runner_of(module).report()["replays"] for module in modules] == [5, 5]
    states = [device_state(torch.device("cuda", card)) for card in (0, 1)]
    assert states[0] is not states[1]


def test_b66_a_module_that_moves_to_the_other_card_is_captured_there():
    module, reference = on_card(0), on_card(0)
    wrap(module, GraphConfig(backend="full"))
    for card in (0, 1, 0):
        module.to(f"cuda:{card}")
        reference.to(f"cuda:{card}")
        with dit_graphs.request(total_steps=6):
            for seed in range(6):
                assert torch.equal(call(module, card, seed), call(reference, card, seed))
    report = runner_of(module).report()
    assert report["captures"] == 3 and report["replays"] >= 9


def test_weights_moved_by_hand_to_another_card_are_followed():
    module, reference = on_card(0), on_card(0)
    wrap(module, GraphConfig(backend="full"))
    for card in (0, 1, 0):
        for each in (module, reference):
            for tensor in (*each.parameters(), *each.buffers()):
                tensor.data = tensor.data.to(f"cuda:{card}")
        before = runner_of(module).report()["replays"]
        for seed in range(8):
            assert torch.equal(call(module, card, seed), call(reference, card, seed)), (card, seed)
        assert runner_of(module).report()["replays"] > before, card
