"""Values that no graph can hold: the call runs eagerly with a reason, and nobody sees an error.

The surprising fact: an object that can be taken apart need not be one that can be put together.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where

import dit_graphs
from dit_graphs import Reason
from dit_graphs.wrapping import runner_of


class Two(tuple):
    """A tuple whose constructor takes its items one by one."""

    def __new__(cls, first: Tensor, second: Tensor) -> Two:
        return tuple.__new__(cls, (first, second))


class Named(dict):
    """A dict whose constructor takes its values."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__(first=first, second=second)


@dataclass
class Record:
    """A dataclass with a constructor of its own."""

    first: Tensor
    second: Tensor

    def __init__(self, one: Tensor, other: Tensor) -> None:
        self.first, self.second = one, other


class Returns(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.make = kind

    def forward(self, x: Tensor) -> object:
        return self.make(self.linear(x), x.sin())


@pytest.mark.parametrize("kind", [Two, Named, Record])
def test_a_result_that_cannot_be_rebuilt_is_eagers(where: Where, kind: type) -> None:
    twin = Twin(Returns(kind), where)
    for index in range(4):
        result = twin(where.randn(3, 8, seed=index))
        assert type(result) is kind
    assert twin.fallbacks == {"warming_up": 2, "unsupported_output": 2}


class Free(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, options: object = None) -> Tensor:
        return self.linear(x)


def _ring() -> object:
    ring: dict[str, object] = {"items": []}
    ring["items"].append(ring)  # type: ignore[attr-defined]
    return ring


def test_an_argument_that_holds_itself_has_no_key(where: Where) -> None:
    module = dit_graphs.wrap(Free().to(where.device), backend=where.backend)
    x = where.randn(3, 8)
    assert torch.equal(module(x, _ring()), module(x))
    assert runner_of(module).stats.fallbacks[Reason.SIGNATURE_TOO_LARGE] == 1


def test_an_attribute_that_holds_itself_is_swept_as_far_as_it_goes(where: Where) -> None:
    module = Free()
    module.ring = _ring()
    module.row = [1.0]
    module.row.append(module.row)
    twin = Twin(module, where)
    twin.until_replayed(lambda index: (where.randn(3, 8, seed=index),))


class Scaled(nn.Module):
    """Computes with a number that neither arguments nor attributes show."""

    scale: float = 1

    def forward(self, x: Tensor) -> Tensor:
        return x * Scaled.scale + 1


@pytest.mark.parametrize("values", [(1, 1.0), (True, 1), (0.0, -0.0)])
def test_a_key_of_ones_own_tells_numbers_apart_as_arguments_do(
    where: Where, values: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = Twin(Scaled(), where, key=lambda: ("scale", Scaled.scale))
    x = torch.arange(1, 7, device=where.device)
    monkeypatch.setattr(Scaled, "scale", values[0])
    twin.until_replayed(lambda index: (x + index,))
    monkeypatch.setattr(Scaled, "scale", values[1])
    before = twin.replays
    twin(x + 3)
    assert twin.replays == before, "another number, another signature"


class Choice:
    """An option that a forward gets."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Choice) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


class Chosen(nn.Module):
    def forward(self, x: Tensor, choice: Choice) -> Tensor:
        return x * choice.value


def test_the_key_of_a_registered_type_tells_numbers_apart(where: Where) -> None:
    dit_graphs.register_leaf(Choice, key=lambda choice: choice.value)
    twin = Twin(Chosen(), where)
    x = torch.arange(1, 7, device=where.device)
    twin.until_replayed(lambda index: (x + index, Choice(2)))
    assert twin(x, Choice(2.0)).is_floating_point()


def test_a_copy_that_is_interrupted_binds_nothing(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = Twin(Free(), where)
    real = torch._foreach_copy_

    def interrupted(*args: object) -> None:
        monkeypatch.setattr(torch, "_foreach_copy_", real)
        raise KeyboardInterrupt

    with dit_graphs.request():
        twin.until_replayed(lambda index: (where.randn(3, 8, seed=index),))
        x, replays = where.randn(3, 8, seed=20), twin.replays
        monkeypatch.setattr(torch, "_foreach_copy_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            twin.module(x)
        twin(x)
        assert twin.replays == replays + 1


class Stopped(nn.Module):
    """Is interrupted in its `at`-th run, after it has written its buffer."""

    runs = 0

    def __init__(self, at: int) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(8))
        self.at = at

    def forward(self, x: Tensor) -> Tensor:
        Stopped.runs += 1
        self.total.add_(x[0])
        if Stopped.runs == self.at:
            raise KeyboardInterrupt
        return x + self.total


def test_an_interrupted_capture_writes_nothing(where: Where) -> None:
    Stopped.runs = 0
    module = dit_graphs.wrap(Stopped(3).to(where.device), backend=where.backend)
    x = torch.ones(3, 8, device=where.device)
    module(x)
    with pytest.raises(KeyboardInterrupt):
        module(x)  # observed, then interrupted in the capture
    assert torch.equal(module.total, torch.full((8,), 2.0, device=where.device))
    plain = Stopped(0).to(where.device)
    plain.total.fill_(2.0)
    for _ in range(4):
        assert torch.equal(module(x), plain(x))
