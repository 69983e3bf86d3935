"""Weights that move: graphs that read the old ones go at once, not at the module's next call."""

from __future__ import annotations

import gc
import weakref

import pytest
import tiny
import torch
from torch import Tensor, nn

import dit_graphs
from dit_graphs.memory import HostState, device_state
from dit_graphs.wrapping import runner_of

CPU = torch.device("cpu")


def _storages(module: nn.Module) -> list[weakref.ref[object]]:
    return [weakref.ref(parameter.untyped_storage()) for parameter in module.parameters()]


def _accelerated(name: str = "flux", **config: object) -> object:
    device_state(CPU).retire()  # other tests' graphs are nobody's business here
    pipe = tiny.build(name)
    dit_graphs.accelerate(pipe, backend="recorded", components=("denoiser",), **config)
    tiny.latents(pipe, tiny.call_kwargs(name, size=32, steps=5))
    return pipe


def test_weights_of_another_dtype_are_the_only_ones_kept() -> None:
    pipe, plain = _accelerated(), tiny.build("flux")
    runner = runner_of(pipe.transformer)
    assert runner.holds_graphs()
    generation = device_state(CPU).generation
    old = _storages(pipe.transformer)
    pipe.to(torch.bfloat16)
    gc.collect()
    assert not runner.holds_graphs()
    assert all(ref() is None for ref in old), "graphs keep the old weights alive"
    assert device_state(CPU).generation == generation + 1, "and their memory"
    assert runner.stats.invalidations == 1
    plain.to(torch.bfloat16)
    mine, theirs = (
        tiny.latents(each, tiny.call_kwargs("flux", size=32, steps=5)) for each in (pipe, plain)
    )
    assert torch.equal(mine, theirs)
    assert runner.stats.invalidations == 1, "counted once"
    assert runner.holds_graphs()


@pytest.mark.parametrize("how", ["module.to", "load_state_dict", "another device"])
def test_each_way_to_move_weights(how: str) -> None:
    pipe = _accelerated()
    runner = runner_of(pipe.transformer)
    if how == "module.to":
        pipe.transformer.to(torch.float64)
    elif how == "load_state_dict":
        fresh = {name: value.clone() for name, value in pipe.transformer.state_dict().items()}
        pipe.transformer.load_state_dict(fresh, assign=True)
    else:
        pipe.to("meta")
    assert not runner.holds_graphs()


def test_weights_that_stay_where_they_are_keep_their_graphs() -> None:
    pipe = _accelerated()
    runner = runner_of(pipe.transformer)
    pipe.to(torch.float32)
    pipe.transformer.load_state_dict(pipe.transformer.state_dict())
    assert runner.holds_graphs()
    assert runner.stats.invalidations == 0


def test_a_move_inside_a_call_waits_for_the_next_one() -> None:
    """Nothing a call is using may go under it; and the call after it must not use the graph."""

    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 3:
                held.append(runner_of(self).holds_graphs())
                value = self.linear.weight.detach() * 2
                self.load_state_dict({"linear.weight": value}, assign=True, strict=False)
                held.append(runner_of(self).holds_graphs())
            return self.linear(x)

    held: list[bool] = []
    module = dit_graphs.accelerate(Moves().eval(), backend="recorded")
    with torch.no_grad():
        x = torch.randn(2, 4)
        for _ in range(5):
            module(x + torch.randn(()))
        assert runner_of(module).holds_graphs()
        module(torch.randn(3, 4))
        assert held == [True, True]
        expected = nn.functional.linear(x, module.linear.weight, module.linear.bias)
        assert torch.equal(module(x), expected)
    dit_graphs.restore(module)


def test_the_memory_of_the_old_place_goes_with_the_last_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two pipelines on one device: the first that moves away leaves the other's graphs alone."""
    first, second = _accelerated(), _accelerated("z-image")
    tiny.latents(first, tiny.call_kwargs("flux", size=32, steps=5))
    new_pools = []
    monkeypatch.setattr(HostState, "_new_pool", lambda self: new_pools.append(1))
    first.to(torch.bfloat16)
    assert not new_pools and runner_of(second.transformer).holds_graphs()
    second.to(torch.bfloat16)
    assert new_pools == [1]
