"""What a tensor is besides its layout: a conjugate or negative view, one that asks for gradients.

The surprising fact: `z` and `z.conj()` are the same bytes at the same address.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from twin import Where

import dit_graphs
from dit_graphs import Reason
from dit_graphs.wrapping import runner_of


class Runs(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args) * 1


def _complex(where: Where, seed: int) -> Tensor:
    return torch.view_as_complex(where.randn(3, 4, 2, seed=seed))


def _served(where: Where, function: Callable[..., Tensor], **config: object) -> nn.Module:
    module = Runs(function).to(where.device).eval()
    return dit_graphs.wrap(module, backend=where.backend, **config)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg()


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "values": lambda x: x * 2,
    "asked": lambda x: x * 2 if x.is_conj() or x.is_neg() else x * 3,
    "written": lambda x: x.mul_(2),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "conjugate": lambda z: z.conj(),
    "negative": lambda z: z.conj().imag,
}


@pytest.mark.parametrize("config", [{}, {"capture": "first_use"}, {"verify": False}], ids=str)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_view_whose_memory_holds_other_values_is_eagers(
    where: Where, function: str, view: str, config: dict[str, object]
) -> None:
    run, look = FUNCTIONS[function], VIEWS[view]
    module = _served(where, run, **config)
    for seed in range(8):
        mine, theirs = (_complex(where, seed) for _ in range(2))
        if seed >= 4:  # the same layout has a graph by now
            mine, theirs = look(mine), look(theirs)
        elif view == "negative":
            mine, theirs = mine.imag, theirs.imag
        result, expected = module(mine), run(theirs) * 1
        assert torch.equal(_plain(result), _plain(expected))
        assert torch.equal(_plain(mine), _plain(theirs))
    assert runner_of(module).stats.fallbacks[Reason.UNSUPPORTED_ARGUMENT] == 4


def test_a_tensor_and_its_conjugate_are_not_one_tensor(where: Where) -> None:
    module = _served(where, lambda x, y: x * 2 + y)
    for seed in range(6):
        z = _complex(where, seed)
        assert torch.equal(module(z, z.conj()), z * 2 + z.conj())


@pytest.mark.parametrize("look", [lambda z: z.conj(), lambda z: z.conj().imag])
def test_a_result_that_is_a_view_of_other_values_stays_one(
    where: Where, look: Callable[[Tensor], Tensor]
) -> None:
    module = Runs(lambda x: x).to(where.device).eval()
    module.forward = lambda x: look(x * 2)  # type: ignore[method-assign]
    dit_graphs.wrap(module, backend=where.backend)
    for seed in range(6):
        z = _complex(where, seed)
        result, expected = module(z), look(z * 2)
        assert (result.is_conj(), result.is_neg()) == (expected.is_conj(), expected.is_neg())
        assert torch.equal(_plain(result), _plain(expected))
    assert runner_of(module).stats.replays


@pytest.mark.parametrize("config", [{}, {"capture": "first_use"}, {"verify": False}], ids=str)
@pytest.mark.parametrize("first", [False, True])
def test_a_forward_may_ask_whether_an_input_wants_gradients(
    where: Where, first: bool, config: dict[str, object]
) -> None:
    """Gradients are off for the call, but the flag is the caller's and picks a path here."""

    def run(x: Tensor) -> Tensor:
        return x * 2 if x.requires_grad else x * 3

    module = _served(where, run, **config)
    for seed in range(12):
        x = where.randn(3, 4, seed=seed).requires_grad_(first is (seed % 12 < 6))
        assert torch.equal(module(x), run(x))
    stats = runner_of(module).stats
    assert stats.replays and set(stats.fallbacks) <= {Reason.WARMING_UP}
