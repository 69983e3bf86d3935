"""Modules that fill, grow or remember something themselves, while their user turns it back."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where, difference

import dit_graphs
from dit_graphs.request_scope import begin_request, end_request

CAPTURES = ["second_use", "first_use"]


def _generation(
    twin: Twin, where: Where, rows: int, steps: int = 6, seed: int = 0, *, by_hand: bool = True
) -> None:
    """One request: the user's own, or one that nobody looks into, like a pipeline's."""
    running = None if by_hand else begin_request(steps)
    if running is None:
        with dit_graphs.request(total_steps=steps):
            _steps(twin, where, rows, steps, seed)
        return
    _steps(twin, where, rows, steps, seed)
    end_request(running)


def _steps(twin: Twin, where: Where, rows: int, steps: int, seed: int) -> None:
    for step in range(steps):
        twin(where.randn(rows, 8, seed=100 * seed + step))
        mine, theirs = ({**vars(m), "_modules": None} for m in (twin.module, twin.plain))
        for name in ("kept", "big", "most"):
            assert difference(mine.get(name), theirs.get(name)) is None, name


class Keeps(nn.Module):
    """A memory of its own, made where there is none and written in place in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if self.kept is None:
            self.kept = torch.zeros_like(h)
        h = h + self.kept
        self.kept.copy_(h * 0.5)
        return h


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("capture", CAPTURES)
def test_a_memory_that_is_emptied_for_every_request_is_made_anew(
    where: Where, capture: str, by_hand: bool
) -> None:
    """The pass in which it is made says nothing of the writes of those that find it; and what the
    user empties is not the forward's own, however often the forward fills it."""
    twin = Twin(Keeps(), where, capture=capture)
    for number in range(7):
        for module in (twin.module, twin.plain):
            module.kept = None
        _generation(twin, where, 3, seed=number, by_hand=by_hand)


def test_a_memory_of_its_own_gets_a_graph(graphing: Where) -> None:
    twin = Twin(Keeps(), graphing)
    for number in range(4):
        _generation(twin, graphing, 3, seed=number)
    assert twin.replays > 12


class Turns(nn.Module):
    """The first large input sets a switch, and is told by it from the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.big = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if len(x) > 8 and not self.big:
            self.big = True
            return h * 2
        return h


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_switch_that_is_turned_back_for_every_request(graphing: Where, by_hand: bool) -> None:
    """After quiet sizes the pass that sets it is not looked at; no capture follows it at once."""
    twin = Twin(Turns(), graphing)
    for rows in (2, 3, 4, 5, 6):
        _generation(twin, graphing, rows, by_hand=by_hand)
    for number in range(6):
        for module in (twin.module, twin.plain):
            module.big = False
        _generation(twin, graphing, 10, seed=number, by_hand=by_hand)
    assert twin.replays > 30


class Grows(nn.Module):
    """Remembers the largest size, on which all depend; like scaled rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.most = 0

    def forward(self, x: Tensor) -> Tensor:
        self.most = max(self.most, len(x))
        return self.linear(x) * self.most


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("capture", CAPTURES)
def test_what_grows_with_ever_larger_sizes_stays_in_the_key(
    graphing: Where, capture: str, by_hand: bool
) -> None:
    twin = Twin(Grows(), graphing, capture=capture)
    for number, rows in enumerate((3, 4, 5, 6, 3, 8, 3, 9, 3, 4)):
        _generation(twin, graphing, rows, seed=number, by_hand=by_hand)
    assert twin.replays > 10


def test_a_view_made_anew_in_every_call_is_the_same(where: Where) -> None:
    """Two looks find other objects with the same memory: those are never compared by value."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(8.0))
            self.view: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.view = self.table[:8]
            return x + self.view

    twin = Twin(Views(), where)
    for seed in range(3):
        _generation(twin, where, 3, seed=seed)


class OneSize(Keeps):
    """Its memory is of the last size, and made anew for another."""

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is not None and self.kept.shape[0] != len(x):
            self.kept = None
        return super().forward(x)


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("rows", [(4, 4, 6, 4, 4), (4, 4, 4, 6, 4), (4, 4, 4, 4, 6, 6, 6, 4, 4)])
def test_a_memory_that_another_size_exchanges_takes_its_graphs_along(
    where: Where, capture: str, rows: tuple[int, ...]
) -> None:
    """They write to one that the module has no longer; and a compare that finds it exchanged does
    not run the forward again, which would start from another memory."""
    twin = Twin(OneSize(), where, capture=capture)
    for seed, size in enumerate(rows):
        _steps(twin, where, size, 1, seed)


class Table(nn.Module):
    """One table, filled anew in place where the size is not the one before's."""

    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.size = [0]
        table = torch.zeros(16, 8)
        if keeps == "a buffer":
            self.register_buffer("table", table, persistent=False)
        else:
            self.table = [table] if keeps == "a list" else table

    def forward(self, x: Tensor) -> Tensor:
        table = self.table[0] if isinstance(self.table, list) else self.table
        if self.size != [len(x)]:
            self.size = [len(x)]
            table.copy_(torch.ones(16, 8, device=x.device).cumsum(0) * len(x))
        return self.linear(x) * table[: len(x)]

    def _apply(self, fn: object, recurse: bool = True) -> Table:
        if isinstance(table := self.__dict__.get("table"), Tensor):
            self.table = fn(table)  # type: ignore[operator]
        elif table is not None:
            self.table = [fn(table[0])]  # type: ignore[operator]
        return super()._apply(fn, recurse)


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("keeps", ["a buffer", "an attribute", "a list"])
@pytest.mark.parametrize("order", [(3, 3, 3, 3, 4), (3, 3, 4, 5)])
def test_a_table_that_eager_fills_for_another_size_is_not_replayed_over(
    where: Where, capture: str, by_hand: bool, keeps: str, order: tuple[int, ...]
) -> None:
    """The size leaves the key, for the forward itself changes it; and no replay fills a table."""
    twin = Twin(Table(keeps), where, capture=capture, max_graphs=2)
    for number in range(2):
        running = begin_request(60, is_watched=by_hand)
        for step in range(12):
            for rows in order:
                twin(where.randn(rows, 8, seed=100 * number + step))
        end_request(running)


def test_a_table_that_nothing_fills_keeps_its_graph(graphing: Where) -> None:
    twin = Twin(Table("a buffer"), graphing)
    for seed in range(6):
        twin(graphing.randn(3, 8, seed=seed))
    assert twin.replays == 3
    for module in (twin.module, twin.plain):
        module.table.mul_(2.0)  # by its user, as a weight may be
    twin(graphing.randn(3, 8, seed=6))
    assert twin.replays == 4


_SIZES: dict[int, int] = {}  # where nobody looks


class HiddenSize(Table):
    """Its size is no part of any key from the start."""

    @property
    def size(self) -> list[int]:
        return [_SIZES.get(id(self), 0)]

    @size.setter
    def size(self, size: list[int]) -> None:
        _SIZES[id(self)] = size[0]


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [
        (3, 3, 3, 3, 4, 3),  # filled by a plain call, while a graph is trusted
        (4, 3, 3, 3, 4, 3),  # by an observed pass
        (4, 4, 3, 3, 3, 4, 3),  # by eager's side of another graph's compare
    ],
)
def test_whoever_fills_a_table_the_graphs_that_read_it_are_compared(
    where: Where, sizes: tuple[int, ...], by_hand: bool
) -> None:
    _SIZES.clear()
    twin = Twin(HiddenSize("a buffer"), where)
    running = begin_request(20, is_watched=by_hand)
    for seed, rows in enumerate(sizes):
        twin(where.randn(rows, 8, seed=seed))
    end_request(running)


class Counts(nn.Module):
    """Every forward writes the one buffer, so every replay does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1.0)
        return self.linear(x) * self.calls


def test_graphs_that_write_what_they_read_do_not_doubt_one_another(graphing: Where) -> None:
    twin = Twin(Counts(), graphing)
    for seed in range(8):
        for rows in (3, 4):
            twin(graphing.randn(rows, 8, seed=seed))
    assert twin.replays == 2 * (8 - 3)


class Slotted:
    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept = deque[Tensor](maxlen=1)


@pytest.mark.parametrize("is_slot", [True, False])
def test_what_a_capture_leaves_in_a_slot_or_a_deque_is_taken_back(
    graphing: Where, is_slot: bool
) -> None:
    """A capture after a plain call, as sizes have it whose code path is known."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.queue, self.held = deque[Tensor](maxlen=1), Slotted()

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            if len(x) == 5:
                made = torch.full((8,), 2.0, device=x.device)
                if is_slot:
                    self.held.kept = deque([made], maxlen=1)
                else:
                    self.queue.append(made)
            kept = self.held.kept if is_slot else self.queue
            return h + kept[0] if len(x) == 6 and kept else h

    twin = Twin(Keeps(), graphing)
    _steps(twin, graphing, 3, 2, 0)
    with dit_graphs.request(total_steps=12):
        _steps(twin, graphing, 5, 1, 0)
        _steps(twin, graphing, 6, 1, 0)
