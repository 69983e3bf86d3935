"""Values that no graph can hold: the call runs eagerly with a reason, and nobody sees an error.

The surprising fact: an object that can be taken apart need not be one that can be put together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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


@dataclass
class Doubled:
    """A dataclass that does not keep what it is made of."""

    scale: int

    def __post_init__(self) -> None:
        self.scale *= 2


@dataclass
class Later:
    """A dataclass with a field that its constructor does not know."""

    first: Tensor
    second: Tensor | None = field(init=False, default=None)


class Weighted(list):
    """A list that is more than its items."""

    def __init__(self, items: list[Tensor], scale: float = 1.0) -> None:
        super().__init__(items)
        self.scale = scale


class UsesOdd(nn.Module):
    def forward(self, odd: object, x: Tensor) -> Tensor:
        if isinstance(odd, (Two, Weighted)):
            return odd[0] * getattr(odd, "scale", 2.0) - x
        if isinstance(odd, Doubled):
            return x * odd.scale
        if isinstance(odd, dict):
            name, value = next(iter(odd.items()))
            return (value if isinstance(name, str) else name + value) - x
        if isinstance(odd, slice):
            return x[odd].sum() - x
        return odd.first + (x.sin() if odd.second is None else odd.second) - x


def _later(first: Tensor, second: Tensor) -> Later:
    later = Later(first)
    later.second = second
    return later


ODD = {
    "a tuple made of its items one by one": Two,
    "a dict made of its values": Named,
    "a dataclass with a constructor of its own": Record,
    "a dataclass that keeps something else": lambda a, b: Doubled(3),
    "a dataclass with a field filled later": _later,
    "a list with an attribute": lambda a, b: Weighted([a], 5.0),
    "a tensor as a key": lambda a, b: {a: b},
    "tensors in a slice": lambda a, b: slice(torch.tensor(1), torch.tensor(3)),
}


@pytest.mark.parametrize("capture", ["second_use", "first_use"])
@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_an_argument_that_cannot_be_rebuilt_reaches_eager(
    where: Where, make: Callable[[Tensor, Tensor], object], capture: str
) -> None:
    module = dit_graphs.wrap(UsesOdd(), backend=where.backend, capture=capture)
    plain = UsesOdd()
    for seed in range(5):
        first, second, x = (where.randn(4, seed=10 * seed + index) for index in range(3))
        result = module(make(first, second), x)
        assert torch.equal(result, plain(make(first, second), x))
    fallbacks = runner_of(module).stats.fallbacks
    assert set(fallbacks) <= {Reason.WARMING_UP, Reason.UNSUPPORTED_ARGUMENT}
    assert fallbacks[Reason.UNSUPPORTED_ARGUMENT] >= 4


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


_PLACELESS: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.eye(8).to_sparse(),
    "compressed": lambda: torch.eye(8).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
}


@pytest.mark.filterwarnings("ignore:.*(prototype stage|beta state)")
@pytest.mark.parametrize("how", ["from the start", "later", "by the forward", "as a buffer"])
@pytest.mark.parametrize("kind", _PLACELESS)
def test_a_module_may_hold_a_tensor_that_lies_at_no_one_place(
    where: Where, kind: str, how: str
) -> None:
    """Whoever asks such a tensor where it lies gets an error."""

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.held: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if how == "by the forward":
                self.held = _PLACELESS[kind]().to(x.device)
            return self.linear(x)

    module = Holds().to(where.device)
    held = _PLACELESS[kind]().to(where.device)
    if how == "as a buffer":
        module.register_buffer("table", held)
    if how == "from the start":
        module.held = held
    dit_graphs.wrap(module, backend=where.backend)
    for number in range(3):
        with dit_graphs.request(total_steps=5):
            for seed in range(5):
                x = where.randn(3, 8, seed=seed)
                expected = torch.nn.functional.linear(x, module.linear.weight, module.linear.bias)
                assert torch.equal(module(x), expected)
                if how == "later" and number == 1:
                    module.held = held
    reasons = runner_of(module).stats.fallbacks
    assert reasons[Reason.UNSUPPORTED_MODEL] >= 5


@pytest.mark.parametrize("is_later", [False, True])
def test_a_forward_that_tells_nobody_its_parameters(where: Where, is_later: bool) -> None:
    """Built-in functions have no signature that Python could read."""
    module = nn.Sequential(nn.Linear(8, 8))
    if not is_later:
        module.forward = torch.relu
    twin = Twin(module, where)
    for seed in range(4):
        twin(where.randn(3, 8, seed=seed))
    for each in (twin.module, twin.plain):
        each.forward = torch.relu
    for seed in range(4):
        twin(where.randn(3, 8, seed=seed))
    assert twin.replays > 0
