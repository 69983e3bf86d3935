"""Attributes that forwards change too often for the key: each is still what calls find there."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import MappingProxyType

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where

import dit_graphs
from dit_graphs.reliance import Habits, Reliance
from dit_graphs.restless import Restless, can_find, objects_among, restless_values
from dit_graphs.wrapping import runner_of


class Counts(nn.Module):
    """One kind of call counts, one chooses a gain, the others are scaled by it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.count, self.gain = 0, 1.0

    def forward(self, x: Tensor, gain: float | None = None, *, counts: bool = False) -> Tensor:
        self.count += counts
        if gain is not None:
            self.gain = gain
        return self.linear(x) * self.gain


def test_many_values_of_one_attribute_say_nothing_of_another(graphing: Where) -> None:
    twin = Twin(Counts(), graphing)
    for number in range(6):
        twin(graphing.randn(3, 8, seed=number), counts=True)
        twin(graphing.randn(3, 8, seed=number), float(number % 2 + 1))
    for gain in (1.0, 2.0, 3.0):
        twin(graphing.randn(3, 8), gain)
        before = twin.replays
        for number in range(24):
            twin(graphing.randn(3, 8, seed=number), counts=True)
            twin(graphing.randn(4, 8, seed=number))
        assert twin.replays > before, "the count is found to be read by none of them"


def test_values_count_that_were_compared_while_all_else_was_the_same() -> None:
    def held(count: int, gain: int) -> Restless:
        return (("count", count, ()), ("gain", gain, ()))

    def is_known(count: int, gain: int) -> bool:
        return reliance.is_known_with(held(count, gain), habits, "one")

    reliance, habits = Reliance(captured_with=held(0, 0)), Habits()
    habits.note("one", frozenset())
    for number in range(8):
        assert not is_known(9, 0)
        reliance.prove(held(number, 0))
    assert is_known(9, 0) and not is_known(9, 1) and not is_known(0, 1)
    reliance.prove(held(0, 1))
    assert not is_known(9, 1), "the count was compared with another gain"
    for number in range(1, 7):
        reliance.prove(held(number, number))
    assert not is_known(9, 9), "one value of the gain is missing"
    reliance.prove(held(7, 7))
    assert is_known(9, 9) and is_known(9, 1)


def test_only_what_the_graph_leaves_untouched_stands_by() -> None:
    def held(one: int, two: int, layout: str = "layout") -> Restless:
        return (("one", layout, (one,)), ("two", "layout", (two,)))

    habits = Habits()
    habits.note("reads", frozenset())
    reliance = Reliance(captured_with=held(1, 1), untouched=frozenset({"one"}))
    reliance.prove(held(2, 2))
    assert reliance.is_known_with(held(3, 2), habits, "reads")
    assert reliance.is_known_with(held(3, 1), habits, "reads")
    assert not reliance.is_known_with(held(2, 3), habits, "reads")
    reliance.prove(held(2, 2, "other"))
    assert not reliance.is_known_with(held(3, 2, "other"), habits, "reads"), "compared there alone"
    reliance = Reliance(captured_with=held(1, 1), untouched=frozenset({"one"}))
    reliance.prove(held(2, 1, "other"))
    assert not reliance.is_known_with(held(3, 1), habits, "reads"), "the other layout was compared"


def test_what_changed_under_many_values_is_blamed_last() -> None:
    def held(count: int, gain: int) -> Restless:
        return (("count", count, ()), ("gain", gain, ()))

    reliance = Reliance(captured_with=held(0, 0))
    assert reliance.blamed(held(1, 1)) == {"count", "gain"}
    for number in range(1, 9):
        reliance.prove(held(number, 0))
    assert reliance.blamed(held(8, 0)) == frozenset()
    assert reliance.blamed(held(9, 1)) == {"gain"}
    assert reliance.blamed(held(9, 0)) == {"count"}


def test_a_graph_that_is_gone_leaves_nothing_to_the_next_one() -> None:
    state, names = (("a", 0, (1,)),), frozenset({"a"})
    reliance = Reliance(names, 3, 2, state, names, names, state, [state], 5, 4)
    assert all(getattr(reliance, name) for name in Reliance.__slots__)
    reliance.forget_graph()
    assert reliance == Reliance(left=state), "which is what a pass left, not the graph's own"


def test_eager_repeats_a_pass_only_where_all_is_as_it_was_at_the_capture() -> None:
    state, moved, other = ((("a", value, (place,)),) for value, place in ((0, 1), (0, 2), (3, 1)))
    reliance = Reliance(captured_with=state)
    for writes in (True, False):
        assert reliance.is_as_captured(state, writes=writes)
        assert reliance.is_as_captured(moved, writes=writes) != writes
        assert not reliance.is_as_captured(other, writes=writes)
    reliance.exchanges = 1
    assert not reliance.is_as_captured(state, writes=False)


def test_kinds_of_calls_that_are_forgotten_still_say_what_is_no_memory() -> None:
    habits = Habits()
    habits.note("reads", frozenset({"a"}))
    for number in range(3000):
        habits.note(number, frozenset({"a", "b"}))
    assert habits.are_memories(["a"]) and not habits.are_memories(["b"])
    assert not habits.changed("reads"), "there was no room for it"


def test_other_attributes_are_another_state() -> None:
    reliance, habits = Reliance(captured_with=(("a", 0, ()),)), Habits()
    habits.note("one", frozenset())
    assert not reliance.is_known_with((("b", 0, ()),), habits, "one")
    assert not reliance.is_known_with((("a", 0, ()), ("b", 0, ())), habits, "one")


def test_a_graph_that_is_compared_without_end_says_what_asks_for_it() -> None:
    reliance = Reliance()
    told = [reliance.prove(((".a", n, (n,)), (".b", 0, ()))) for n in range(100)]
    first = next(index for index, names in enumerate(told) if names is not None)
    assert first > 8 and told[first] == "a"
    reliance.forget_graph()
    told = [reliance.prove(((".a", 0, (n,)), (".b", 0, ()))) for n in range(4)]
    assert told == [None, None, None, "a"]
    reliance.forget_graph()
    assert {reliance.prove(((".a", 0, (1,)),)) for _ in range(100)} == {None}


class History(nn.Module):
    """One kind of call adds to a tensor that the other never looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.history = torch.ones(1, 8)

    def forward(self, x: Tensor, *, adds: bool = False) -> Tensor:
        if adds:
            self.history = torch.cat([self.history.to(x.device), x[:1]])
        return self.linear(x)


def test_a_tensor_of_ever_other_size_that_only_stands_by_costs_few_compares(
    graphing: Where,
) -> None:
    twin, alive = Twin(History(), graphing), []  # no address comes back
    for number in range(60):
        alive.append(twin.module.history)
        if number == 30:
            compares, replays = twin.runner.stats.compares, twin.replays
        twin(graphing.randn(3, 8, seed=number), adds=True)
        twin(graphing.randn(4, 8, seed=number))
    assert (twin.runner.stats.compares, twin.replays) == (compares, replays + 30)


class Box:
    def __init__(self, value: float) -> None:
        self.value = value


def _under_a_key(key: object) -> Callable[[], object]:
    return lambda: {key: Box(1.0)}


_HOLDERS: dict[str, Callable[[], object]] = {
    "a name": _under_a_key("name"),
    "a name with a bracket": _under_a_key("a]b"),
    "a dtype": _under_a_key(torch.float32),
    "a tuple of what has no literal": _under_a_key((8, float("inf"))),
    "a set": lambda: {Box(1.0)},
    "a deep list": lambda: [[Box(1.0)]],
}


class Holds(nn.Module):
    """One kind of call sets a number in an object that the other kind reads."""

    def __init__(self, make: Callable[[], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.held = make()

    def forward(self, x: Tensor, value: float | None = None) -> Tensor:
        held: object = self.held
        while not isinstance(held, Box):
            held = next(iter(held.values() if isinstance(held, dict) else held))  # type: ignore
        if value is not None:
            held.value = value
        return self.linear(x) * held.value


def _mixed(twin: Twin, where: Where, seed: int) -> None:
    chance = Random(seed)
    for number in range(80):
        value = chance.choice([None, None, None, 2.0, 3.0])
        twin(where.randn(3, 8, seed=number), *(() if value is None else (value,)))


@pytest.mark.parametrize("holder", _HOLDERS)
def test_what_changes_often_is_what_stands_there_wherever_that_is(
    graphing: Where, holder: str
) -> None:
    """A name that leads nowhere without a sweep would look as if nothing ever changed there."""
    twin = Twin(Holds(_HOLDERS[holder]), graphing)
    _mixed(twin, graphing, 0)
    assert twin.replays > 0


@pytest.mark.parametrize("seed", range(4))
def test_what_changes_often_on_a_class_is_what_stands_there(graphing: Where, seed: int) -> None:
    class Shares(nn.Module):
        gain = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, gain: float | None = None) -> Tensor:
            if gain is not None:
                type(self).gain = gain  # to the same in both of the twins
            return self.linear(x) * type(self).gain

    twin = Twin(Shares(), graphing)
    _mixed(twin, graphing, seed)
    assert twin.replays > 0


def test_what_every_call_counts_on_its_class_takes_no_graph(graphing: Where) -> None:
    class Numbered(nn.Module):
        number = 0

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            type(self).number += 1
            return self.linear(x)

    module = Numbered().to(graphing.device)
    dit_graphs.wrap(module, backend=graphing.backend)  # no twin: it would count on the same class
    with torch.no_grad():
        for number in range(60):
            x = graphing.randn(3 + number % 2, 8, seed=number)
            assert torch.equal(module(x), module.linear(x))
    stats = runner_of(module).stats
    assert stats.replays > 30 and stats.captures == 2


def test_which_names_lead_to_what_stands_there() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module.tables = {"a.b": [1.0], (1, 2): Box(1.0), torch.float32: 2.0, "a]b": 3.0}
    module.view, module.some = MappingProxyType({"a": None}), {Box(1.0)}
    module.__dict__["a b"], module.__dict__["c.d"] = 1, 2
    found = {
        ".tables": True,
        ".tables['a.b'][0]": True,
        ".tables[(1, 2)].value": True,
        ".view['a']": True,
        ".a b": True,
        "0.training": True,
        ".tables[torch.float32]": False,
        ".tables['a]b']": False,
        ".some[0].value": False,
        ".c.d": False,
        ".gone": False,
        "class torch.nn.modules.linear.Linear": True,
        f"class {__name__}.Box": False,
    }
    assert {name: can_find(module, name) for name in found} == found


@pytest.mark.parametrize("value", [True, 3, "word", None, torch.ones(2, 3)])
def test_the_commonest_values_have_the_key_that_they_have_in_a_container(value: object) -> None:
    module = nn.Module()
    module.alone, module.among = value, [value]
    (_, alone, where), (_, among, there) = restless_values(module, [".alone", ".among"])
    if isinstance(value, Tensor):
        assert (alone, among) == ((Tensor, alone[1]), ((list, (Tensor,)), alone[1]))
        assert where == there == (value.data_ptr(),)
    else:
        assert (among, where, there) == ((list, (alone,)), (), ())


def test_an_object_without_a_key_is_what_is_in_it() -> None:
    module = nn.Module()
    module.number, module.tensor, module.plain = Box(1.0), Box(torch.ones(2)), [torch.ones(2), 3]
    module.bytes, names = bytearray(b"one"), [".bytes", ".number", ".plain", ".tensor"]
    before = restless_values(module, names)
    assert objects_among(before) == {".bytes", ".number", ".tensor"}
    module.bytes, module.number = bytearray(b"one"), Box(1.0)
    assert restless_values(module, names) == before
    module.bytes[0], module.number.value = 0, 2.0
    changed = set(restless_values(module, names)) - set(before)
    assert {name for name, _, _ in changed} == {".bytes", ".number"}
