"""Arguments that are not tensors: exact values, objects, styles, and what the key leaves out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where

import dit_graphs


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Options:
    factor: float
    tag: str = "a"


_VALUES = [
    (1, 1.0),
    (1, True),
    (0, False),
    (0.0, -0.0),
    (0.1, 0.1 + 1e-17 + 2e-17),
    ("a", "b"),
    (None, 0),
    ((1, 2), [1, 2]),
    ({"a": 1}, {"a": 2}),
    ({"a": 1}, {"b": 1}),
    (slice(0, 2), slice(0, 3)),
    (torch.float32, torch.float64),
    (Colour.RED, Colour.BLUE),
    (Options(1.0), Options(2.0)),
    (1 + 2j, 1 - 2j),
    (b"a", b"b"),
    (range(3), range(4)),
    (float("inf"), float("-inf")),
]


@pytest.mark.parametrize("values", _VALUES, ids=repr)
def test_python_values_that_differ_get_graphs_of_their_own(
    where: Where, values: tuple[object, object]
) -> None:
    class Names(nn.Module):
        """The result depends on the exact value: its repr's length and bytes."""

        def forward(self, x: Tensor, value: object) -> Tensor:
            text = f"{type(value).__name__}{value!r}".encode()
            return x * float(sum((i + 1) * b for i, b in enumerate(text)))

    twin = Twin(Names(), where)
    for index in range(5):
        for value in values:
            twin(where.randn(4, seed=index), value)
    assert twin.graphs == (1 if repr(values[0]) == repr(values[1]) else 2)
    assert twin.replays >= 4


def test_a_number_that_differs_on_every_call_is_never_captured_per_value(where: Where) -> None:
    class Steps(nn.Module):
        def forward(self, x: Tensor, t: float) -> Tensor:
            return x * t

    twin = Twin(Steps(), where)
    for request_number in range(3):
        with dit_graphs.request(total_steps=12):
            for step in range(12):
                twin(where.randn(4, seed=step), 0.9 - 0.05 * step)
        assert twin.captures <= 2, f"request {request_number}"
    assert twin.fallbacks["varying_scalar"] >= 20


def test_the_number_that_differs_is_named_and_none_else(where: Where) -> None:
    class Steps(nn.Module):
        def forward(self, x: Tensor, options: dict[str, object], t: float, scale: float) -> Tensor:
            return x * t * scale + options["shift"]

    twin = Twin(Steps(), where)
    with dit_graphs.request(total_steps=12):
        for step in range(12):
            given = {"shift": step, "name": "a"}
            twin(where.randn(4, seed=step), given, 0.9 - 0.05 * step, 0.5)
    assert twin.details["varying_scalar"] == "options.shift, t"


def test_a_strength_that_differs_between_requests_is_captured(where: Where) -> None:
    class Steps(nn.Module):
        def forward(self, x: Tensor, strength: float) -> Tensor:
            return x * strength

    twin = Twin(Steps(), where)
    for strength in (0.1, 0.2, 0.3, 0.4, 0.5, 0.2):
        with dit_graphs.request(total_steps=5):
            for step in range(5):
                twin(where.randn(4, seed=step), strength)
    assert "varying_scalar" not in twin.fallbacks
    assert twin.graphs == 5


class Cache:
    """An argument object the package knows nothing of."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Uses(nn.Module):
    def forward(self, x: Tensor, cache: object) -> Tensor:
        return x * cache.factor  # type: ignore[attr-defined]


def test_an_unknown_object_stays_eager(where: Where) -> None:
    twin = Twin(Uses(), where)
    for index in range(5):
        twin(where.randn(4, seed=index), _Unregistered(2.0))
    assert twin.fallbacks == {"unsupported_argument": 5}
    assert "_Unregistered" in twin.details["unsupported_argument"]


class _Unregistered(Cache):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cache) and other.factor == self.factor

    __hash__ = None  # type: ignore[assignment]


def test_a_registered_object_enters_by_its_key(where: Where) -> None:
    dit_graphs.register_leaf(_Registered, key=lambda cache: cache.factor)
    twin = Twin(Uses(), where)
    for index in range(6):
        twin(where.randn(4, seed=index), _Registered(2.0))
        twin(where.randn(4, seed=index), _Registered(3.0))
    assert twin.graphs == 2
    assert twin.replays == 6


class _Registered(Cache):
    __eq__ = _Unregistered.__eq__
    __hash__ = None  # type: ignore[assignment]


def test_b40_huge_nested_arguments_stay_eager_cheaply(where: Where) -> None:
    class Ignores(nn.Module):
        def forward(self, x: Tensor, junk: object) -> Tensor:
            return x * 2

    twin = Twin(Ignores(), where)
    junk = [[None] * 600 for _ in range(120)]
    for index in range(4):
        twin(where.randn(4, seed=index), junk)
    assert twin.fallbacks == {"signature_too_large": 4}


def test_ignored_arguments_make_no_second_graph(where: Where) -> None:
    class Logs(nn.Module):
        def forward(self, x: Tensor, step: int = 0, note: object = None) -> Tensor:
            return x * 2

    twin = Twin(Logs(), where, ignore=("step", "note"))
    for index in range(7):
        twin(where.randn(4, seed=index), step=index, note=[index])
    assert (twin.graphs, twin.replays) == (1, 4)


def test_a_key_joins_the_signature(where: Where) -> None:
    mode = ["double"]

    class Global(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (2.0 if mode[0] == "double" else 3.0)

    twin = Twin(Global(), where, key=lambda: mode[0])
    for name in ("double", "triple", "double"):
        mode[0] = name
        for index in range(5):
            twin(where.randn(4, seed=index))
    assert twin.graphs == 2


def test_variadic_forwards(where: Where) -> None:
    class Star(nn.Module):
        def forward(self, *tensors: Tensor, scale: float = 2.0, **more: Tensor) -> Tensor:
            return sum(tensors) * scale + sum(more.values())  # type: ignore[return-value]

    twin = Twin(Star(), where)
    for index in range(6):
        a, b = where.randn(4, seed=index), where.randn(4, seed=50 + index)
        twin(a, b, scale=3.0, extra=a)
        twin(a, extra=b)
    assert twin.graphs == 2
    assert twin.replays == 6
