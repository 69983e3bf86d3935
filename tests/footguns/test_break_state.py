"""A module that became an eager break tells the code behind it something in Python.

Its body runs on every replay, but whoever reads what it set is recorded: the value of the recording
would hold for ever. So each replay checks that the body left what it left when it was observed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where

import dit_graphs
from dit_graphs import eager_on_graph


class Shifts(nn.Module):
    """The body of a break exchanges the tensor that it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.now, self.later = torch.ones(8), torch.full((8,), 2.0)

    def forward(self, x: Tensor, gain: float | None = None) -> Tensor:
        if gain is not None:
            self.now = torch.full((8,), gain, device=x.device)
            return self.linear(x)
        return _some(_shifted(self, self.linear(x)) + 1) + 1


@eager_on_graph
def _shifted(module: Shifts, h: Tensor) -> Tensor:
    result = h * module.now
    module.now = module.later
    return result


_ROWS = [3]


@eager_on_graph
def _some(h: Tensor) -> Tensor:
    return h[: _ROWS[0]]


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_body_exchanges_is_exchanged_once(breaking: Where, fails: bool) -> None:
    """A compare runs it twice, and so does a call whose replay has failed behind it."""
    twin = Twin(Shifts(), breaking)
    for module in (twin.module, twin.plain):
        module.now, module.later = (t.to(breaking.device) for t in (module.now, module.later))
    try:
        for number in range(40):
            if number % 5 == 4:
                twin(breaking.randn(3, 8, seed=number), 5.0)
            _ROWS[0] = 2 if fails and number in (14, 24) else 3
            twin(breaking.randn(3, 8, seed=number))
    finally:
        _ROWS[0] = 3


class Notes:
    """Plain Python state, some levels down."""

    def __init__(self, depth: int = 0) -> None:
        self.skip = False
        self.inner = Notes(depth - 1) if depth else None

    @property
    def last(self) -> Notes:
        return self if self.inner is None else self.inner.last


class Gate(nn.Module):
    """Reads the device, so that it becomes a break, and notes its verdict with `tell`."""

    def __init__(self, tell: Callable[[nn.Module, bool, Tensor, dict], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.notes = Notes(2)
        self.skip = False
        self.last: Tensor | None = None
        self.calls = 0
        self.tell = tell

    def forward(self, x: Tensor, options: dict) -> Tensor:
        self.tell(self, bool(x.sum() > 100), x, options)
        return self.linear(x)


class Model(nn.Module):
    def __init__(self, tell: Callable, ask: Callable) -> None:
        super().__init__()
        self.gate = Gate(tell)
        self.linear = nn.Linear(4, 4)
        self.skip = False
        self.ask = ask
        vars(self.gate)["owner"] = self  # no submodule of it

    def forward(self, x: Tensor) -> Tensor:
        options: dict = {}
        hidden = self.gate(x, options)
        return hidden if self.ask(self, options) else self.linear(hidden)


def _on_itself(gate: Gate, verdict: bool, x: Tensor, options: dict) -> None:
    gate.skip = verdict


def _on_its_owner(gate: Gate, verdict: bool, x: Tensor, options: dict) -> None:
    gate.owner.skip = verdict


def _in_an_object(gate: Gate, verdict: bool, x: Tensor, options: dict) -> None:
    gate.notes.last.skip = verdict


def _in_a_container(gate: Gate, verdict: bool, x: Tensor, options: dict) -> None:
    options["skip"] = verdict


_WAYS = {
    "an attribute of its own": (_on_itself, lambda model, options: model.gate.skip),
    "an attribute of its owner": (_on_its_owner, lambda model, options: model.skip),
    "an object three levels down": (_in_an_object, lambda model, _: model.gate.notes.last.skip),
    "a dict it was given": (_in_a_container, lambda model, options: options.get("skip")),
}


def _serve(twin: Twin, loud: tuple[int, ...], calls: int = 24) -> None:
    with dit_graphs.request(total_steps=calls):
        for index in range(calls):
            twin(twin.where.randn(3, 4, seed=index) + (100.0 if index in loud else 0.0))


@pytest.mark.parametrize("way", _WAYS)
def test_what_a_break_sets_for_the_code_behind_it_is_not_baked(segmenting: Where, way: str) -> None:
    twin = Twin(Model(*_WAYS[way]), segmenting)
    _serve(twin, loud=(12, 13, 18))
    assert twin.replays >= 8, "as long as it set what it set when it was recorded"
    assert twin.fallbacks["break_value_changed"] >= 1
    told = twin.details["break_value_changed"]
    assert ("container" if way == "a dict it was given" else "skip") in told


def test_a_tensor_that_a_break_keeps_for_later_is_not_read_for_ever(segmenting: Where) -> None:
    """The segment behind it would read yesterday's tensor."""

    def keep(gate: Gate, verdict: bool, x: Tensor, options: dict) -> None:
        gate.last = x * 2

    class Reads(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.gate.last

    twin = Twin(Reads(keep, lambda model, options: False), segmenting)
    _serve(twin, loud=())
    assert twin.replays == 0


def test_a_tensor_that_a_break_hands_back_in_a_dict_is_refused(segmenting: Where) -> None:
    def hand_back(gate: Gate, verdict: bool, x: Tensor, options: dict) -> None:
        options["twice"] = x * 2

    class Reads(Model):
        def forward(self, x: Tensor) -> Tensor:
            options: dict = {}
            return self.gate(x, options) + options["twice"]

    twin = Twin(Reads(hand_back, lambda model, options: False), segmenting)
    _serve(twin, loud=())
    assert twin.replays == 0
    assert "python_state" in twin.fallbacks


def test_a_break_that_counts_its_calls_counts_each_once(segmenting: Where) -> None:
    """A replay that is given up because of the new count must not have counted."""

    def count(gate: Gate, verdict: bool, x: Tensor, options: dict) -> None:
        gate.calls += 1

    twin = Twin(Model(count, lambda model, options: False), segmenting)
    for index in range(12):
        twin(segmenting.randn(3, 4, seed=index))
        assert twin.module.gate.calls == twin.plain.gate.calls == index + 1


def test_a_marked_method_that_sets_its_module_is_held_to_it_too(segmenting: Where) -> None:
    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.skip = False

        @eager_on_graph
        def decide(self, x: Tensor) -> None:
            self.skip = bool(x.sum() > 100)

        def forward(self, x: Tensor) -> Tensor:
            self.decide(x)
            return x if self.skip else self.linear(x)

    twin = Twin(Marked(), segmenting)
    _serve(twin, loud=(12, 13, 18))
    assert twin.replays >= 8


def test_a_cache_that_a_break_has_filled_stays_filled(segmenting: Where) -> None:
    """What settles is no change: the table of the first call is the table of all."""

    def fill(gate: Gate, verdict: bool, x: Tensor, options: dict) -> None:
        if gate.last is None:
            gate.last = torch.linspace(0, 1, 4, device=x.device)

    twin = Twin(Model(fill, lambda model, options: False), segmenting)
    _serve(twin, loud=())
    assert twin.replays >= 18
