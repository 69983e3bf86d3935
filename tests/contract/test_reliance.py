"""What tells a memory of the forward's own from what one kind of call leaves for another."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where

import dit_graphs
from dit_graphs.module_state import Exchange
from dit_graphs.reliance import Habits, Reliance
from dit_graphs.request_scope import begin_request, end_request
from dit_graphs.restless import Contents, Restless, restless_storages, restless_values


def test_a_graph_that_was_right_under_ever_other_values_reads_none_of_them() -> None:
    def held(value: int, *places: int) -> Restless:
        return (("a", value, places),)

    def is_known(value: int) -> bool:
        return reliance.is_known_with(held(value), habits, "one")

    reliance, habits = Reliance(captured_with=held(0)), Habits()
    habits.note("one", frozenset())
    assert is_known(0) and not is_known(1)
    for value in range(1, 9):
        assert not is_known(value)
        assert reliance.blamed(held(value)) == {"a"}
        reliance.prove(held(value))
        reliance.prove(held(value))
        assert not reliance.blamed(held(value))
    assert is_known(9)
    reliance.forget_graph()
    assert not is_known(0)


def test_where_a_memory_lies_does_not_matter() -> None:
    reliance, habits = Reliance(captured_with=(("a", 0, (1,)),)), Habits()
    habits.note("one", frozenset({"a"}))
    assert reliance.is_known_with((("a", 0, (2,)),), habits, "one")
    assert not reliance.is_known_with((("a", 3, (1,)),), habits, "one")
    habits.note("two", frozenset())
    assert not reliance.is_known_with((("a", 0, (2,)),), habits, "one")


def test_where_a_tensor_lies_that_only_others_exchange_does_not_matter_once_shown() -> None:
    def held(place: int, layout: str = "layout") -> Restless:
        return (("a", layout, (place,)),)

    habits = Habits()
    habits.note("reads", frozenset())
    habits.note("puts", frozenset({"a"}))
    for untouched in (frozenset({"a"}), frozenset[str]()):
        reliance = Reliance(captured_with=held(1), untouched=untouched)
        assert not reliance.is_known_with(held(2), habits, "reads")
        reliance.prove(held(1))
        assert not reliance.is_known_with(held(2), habits, "reads")
        reliance.prove(held(2))
        assert reliance.is_known_with(held(3), habits, "reads") == bool(untouched)
        assert not reliance.is_known_with(held(3, "other"), habits, "reads")
        assert not reliance.is_known_with(held(3), habits, "puts")
        assert not reliance.is_known_with(held(3), habits, "never seen")


def test_what_a_kind_of_call_turns_that_gave_no_graph_is_no_memory() -> None:
    habits = Habits()
    for call in ("one", "two"):
        habits.note(call, frozenset({"a"}))
    habits.judge("two", is_proven=False)
    habits.judge("never seen", is_proven=False)
    assert not habits.are_memories(["a"]) and habits.are_memories([])
    habits.judge("two", is_proven=True)
    assert habits.are_memories(["a"])


def test_only_what_every_kind_of_call_turns_is_a_memory() -> None:
    habits = Habits()
    habits.note("one", frozenset({"a", "b"}))
    assert habits.are_memories(["a", "b"])
    habits.note("two", frozenset({"a"}))
    assert habits.are_memories(["a"]) and not habits.are_memories(["a", "b"])
    habits.note("two", frozenset({"b"}))
    assert habits.are_memories(["a", "b"])


def test_a_call_remakes_what_it_puts_there_again_after_another_took_it() -> None:
    habits, none = Habits(), frozenset[str]()
    habits.note("one", none, Exchange({}, {1: "a", 7: "b"}))
    habits.note("one", none, Exchange({1: "a"}, {2: "a"}))
    assert not habits.remade("one"), "its own was there, and it made another"
    habits.note("two", none, Exchange({2: "a"}, {3: "a"}))
    assert not habits.remade("two"), "it had made nothing before"
    habits.note("one", none, Exchange({3: "a"}, {4: "a"}))
    assert habits.remade("one") == {"a"}, "and no other place"
    habits.forget_made()
    assert not habits.remade("one")
    for doubted in (none, frozenset({"a"})):
        habits.note("one", none, Exchange({}, {9: "a"}), doubted)
    assert not habits.remade("one"), "nothing stood there: it may use what another leaves"
    habits.note("one", none, Exchange({3: "a"}, {}), frozenset({"a"}))
    assert not habits.remade("one")
    habits.note("one", none, Exchange({3: "a", 5: "b"}, {6: "a", 8: "b"}), frozenset({"a"}))
    assert habits.remade("one") == {"a"}


def test_what_stands_at_a_place_that_a_sweep_names() -> None:
    class Held:
        __slots__ = ("number",)

        def __init__(self) -> None:
            self.number = 3

    module = nn.Sequential(nn.Linear(2, 2))
    module.scale, module[0].options = 1.0, {"a": [1, 2.0], 3: "word"}
    module[0].held = Held()
    module.memory = (4, torch.ones(2))
    names = {
        ".scale": (float, (1.0).hex()),
        ".memory": (
            (tuple, ((int, 4), Tensor)),
            ((torch.float32, torch.Size([2]), (1,)),),
        ),
        "0.options['a'][1]": (float, (2.0).hex()),
        "0.options[3]": (str, "word"),
        "0.held.number": (int, 3),
        "0.held": Contents((__name__, Held.__qualname__), None, ((".number", (int, 3)),)),
        "0.gone.number": ("nothing is found there",),
    }
    found = restless_values(module, names)
    assert {name: value for name, value, _ in found} == names
    places = {name: where for name, _, where in found if where}
    assert places == {".memory": (module.memory[1].data_ptr(),)}


def test_whose_memory_can_be_told_by_its_place() -> None:
    module = nn.Linear(2, 2)
    module.kept, module.row = [torch.ones(2), torch.ones(3)], torch.ones(4, 4)[1]
    module.number, module.sparse, module.empty = 3, torch.eye(2).to_sparse(), torch.ones(0)
    module.elsewhere = torch.ones(2, device="meta")
    names = [".kept", ".row", ".number", ".sparse", ".empty", ".elsewhere", ".gone"]
    assert restless_storages(module, names, torch.device("cpu")) == {
        ".kept": {each.untyped_storage().data_ptr() for each in module.kept},
        ".row": {module.row.untyped_storage().data_ptr()},
    }


class Notices(nn.Module):
    """A memory of the last size, as it looks, and a result that depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.size = 0

    def forward(self, x: Tensor) -> Tensor:
        is_new, self.size = self.size != len(x), len(x)
        return self.linear(x) * (2.0 if is_new else 1.0)


@pytest.mark.parametrize("boundary", ["none", "by hand", "unwatched"])
def test_what_every_call_turns_may_be_read_by_it_all_the_same(
    graphing: Where, boundary: str
) -> None:
    """Then it belongs to the key, for good: calls that find what they left have graphs."""
    twin, served = Twin(Notices(), graphing), 0
    for number in range(8):
        sizes = [3] * 6 + [4] * 6 + [3, 4] * 3 if number % 2 else [4, 4, 4, 3, 3, 3] * 3
        served = twin.replays
        with ExitStack() as stack:
            if boundary == "by hand":
                stack.enter_context(dit_graphs.request(len(sizes)))
            elif boundary == "unwatched":
                stack.callback(end_request, begin_request(len(sizes)))
            for step, size in enumerate(sizes):
                twin(graphing.randn(size, 8, seed=20 * number + step))
    assert twin.replays - served >= 6, "in the last round, of ten calls that find what they left"
