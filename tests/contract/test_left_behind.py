"""What a forward leaves in its module for the calls to come: memories of its own, and more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from random import Random

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where

import dit_graphs
from dit_graphs.holding import GraphHolding
from dit_graphs.request_scope import begin_request, end_request
from dit_graphs.static_inputs import StaticInputs


@pytest.fixture(autouse=True)
def _no_request_is_left() -> Iterator[None]:
    yield
    end_request()


class Sets(nn.Module):
    """One kind of call sets a number that the other kind reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gain = 1.0

    def forward(self, x: Tensor, gain: float | None = None) -> Tensor:
        if gain is not None:
            self.gain = gain
        return self.linear(x) * self.gain


class Exchanges(nn.Module):
    """The same with a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gain = torch.ones(8)

    def forward(self, x: Tensor, gain: float | None = None) -> Tensor:
        if gain is not None:
            self.gain = torch.full((8,), gain, device=x.device)
        return self.use(self.linear(x))

    def use(self, h: Tensor) -> Tensor:
        return h * self.gain


def _enter(boundary: str, steps: int) -> None:
    """A request that nobody looks into between its calls, like a pipeline's, or none."""
    end_request()
    if boundary == "unwatched":
        begin_request(steps)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("boundary", ["none", "by hand", "unwatched"])
@pytest.mark.parametrize("kind", [Sets, Exchanges])
def test_what_one_kind_of_call_leaves_is_what_the_other_kind_finds(
    graphing: Where, kind: type[nn.Module], boundary: str, seed: int
) -> None:
    """However often the forward turns it: that makes it no memory of its own."""
    twin, chance = Twin(kind().to(graphing.device), graphing), Random(seed)
    if kind is Exchanges:
        for module in (twin.module, twin.plain):
            module.gain = module.gain.to(graphing.device)
    for number in range(6):
        if boundary == "by hand":
            with dit_graphs.request(total_steps=10):
                _mixed(twin, graphing, chance, number)
            continue
        _enter(boundary, 10)
        _mixed(twin, graphing, chance, number)
    assert twin.replays > 0


def _mixed(twin: Twin, where: Where, chance: Random, number: int) -> None:
    for step in range(10):
        gain = chance.choice([None, None, None, 2.0, 3.0])
        twin(where.randn(3, 8, seed=10 * number + step), *(() if gain is None else (gain,)))


def test_a_call_that_turns_what_its_key_holds_gets_no_graph_under_that_key(
    graphing: Where,
) -> None:
    """After the pass the module is in another state, whose key is known already: captured there,
    the graph would serve where the first state holds, and leave it as it is."""
    twin = Twin(Sets(), graphing)
    for rows in (3, 4):
        for _ in range(4):
            for module in (twin.module, twin.plain):
                module.gain = 1.0
            with dit_graphs.request(total_steps=6):
                for step in range(6):
                    twin(graphing.randn(rows, 8, seed=step), 2.0)
                    assert twin.module.gain == 2.0
    assert twin.graphs == 2 and twin.replays > 2 * 4 * 3


class OneSlot(nn.Module):
    """A table for the last size, and which one that was."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.size = 0
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.size != len(x):
            self.size = len(x)
            self.table = torch.linspace(0, 1, len(x), device=x.device)[:, None]
        return self.linear(x) + self.table


@pytest.mark.parametrize("boundary", ["none", "unwatched"])
def test_a_memory_of_the_last_size_keeps_the_graphs_of_two_sizes_in_turn(
    graphing: Where, boundary: str
) -> None:
    """As with guidance in two calls whose prompts differ in length."""
    twin = Twin(OneSlot(), graphing)
    for number in range(6):
        _enter(boundary, 12)
        for step in range(6):
            twin(graphing.randn(3, 8, seed=10 * number + step))
            twin(graphing.randn(5, 8, seed=10 * number + step))
        if number == 1:
            captures, compares = twin.captures, twin.runner.stats.compares
            replays = twin.replays
    assert twin.graphs == 2
    assert (twin.captures, twin.runner.stats.compares) == (captures, compares)
    assert twin.replays == replays + 4 * 12


def test_a_graph_that_another_size_took_its_table_from_is_compared_once(graphing: Where) -> None:
    """Its own pass makes the table anew: from then on it is known to read nothing of others."""
    twin = Twin(OneSlot(), graphing)
    for seed in range(4):
        twin(graphing.randn(3, 8, seed=seed))
    compares, captures = twin.runner.stats.compares, twin.captures
    twin(graphing.randn(5, 8))
    for seed in range(3):
        twin(graphing.randn(3, 8, seed=20 + seed))
    assert (twin.runner.stats.compares, twin.captures) == (compares + 1, captures)
    assert twin.replays == 2


class Toggles(nn.Module):
    """One kind of call puts a tensor there or takes it away; the other adds the one it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.shift: Tensor | None = None

    def forward(self, x: Tensor, shift: float | None = None) -> Tensor:
        if shift is not None:
            is_there = self.shift is not None
            self.shift = None if is_there else torch.full((8,), shift, device=x.device)
        h = self.linear(x)
        return h if self.shift is None else h + self.shift


@pytest.mark.parametrize("seed", [40, 47, 66])
def test_a_tensor_that_comes_and_goes_is_the_one_that_is_there(graphing: Where, seed: int) -> None:
    twin, chance = Twin(Toggles(), graphing), Random(seed)
    for number in range(60):
        shift = chance.choice([None, None, None, 2.0, 3.0])
        twin(graphing.randn(3, 8, seed=number), *(() if shift is None else (shift,)))
    assert twin.replays > 0


class SlotAndGain(OneSlot):
    """What it makes anew by itself is one thing, what it finds another."""

    def __init__(self) -> None:
        super().__init__()
        self.gain: Tensor | None = None

    def forward(self, x: Tensor, gain: float | None = None) -> Tensor:
        if self.gain is None or gain is not None:
            self.gain = torch.full((8,), gain or 1.0, device=x.device)
        return super().forward(x) * self.gain


def test_a_memory_of_its_own_says_nothing_of_what_others_leave(graphing: Where) -> None:
    twin = Twin(SlotAndGain(), graphing)
    for number in range(6):
        for seed in range(4):
            twin(graphing.randn(3, 8, seed=seed))
            twin(graphing.randn(5, 8, seed=seed))
        twin(graphing.randn(3, 8), 1.0 + number)
    assert twin.replays > 0


class Stretched(nn.Module):
    """A longer input makes its table anew, with other values at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.arange(6.0) / 6, persistent=False)

    def forward(self, x: Tensor, extra: object = None) -> Tensor:
        if len(x) > len(self.table):
            self.table = torch.arange(float(len(x)), device=x.device) / len(x)
        if extra == "raise":
            raise ValueError("half way")
        return self.linear(x) + self.table[: len(x), None]


class Odd:
    def __deepcopy__(self, memo: object) -> Odd:
        return self


class Sub(Tensor):
    def __deepcopy__(self, memo: object) -> Sub:
        return self.as_subclass(Tensor).clone().as_subclass(Sub)


def _raising(twin: Twin, x: Tensor) -> None:
    with suppress(ValueError):
        twin(x, "raise")


def _disabled(twin: Twin, x: Tensor) -> None:
    with dit_graphs.disabled(twin.module):
        twin(x)


def _with_gradients(twin: Twin, x: Tensor) -> None:
    with torch.enable_grad():
        twin(x)


_TEACHING_NOTHING: dict[str, Callable[[Twin, Tensor], object]] = {
    "raises": _raising,
    "unknown argument": lambda twin, x: twin(x, Odd()),
    "tensor subclass": lambda twin, x: twin(x.as_subclass(Sub)),
    "disabled": _disabled,
    "gradients": _with_gradients,
}


@pytest.mark.parametrize("kind", _TEACHING_NOTHING)
@pytest.mark.parametrize("sizes", [(6,), (6, 5, 4, 3, 2)], ids=["at first", "after quiet sizes"])
def test_what_an_eager_call_left_is_found_by_the_next_call_of_its_request(
    graphing: Where, kind: str, sizes: tuple[int, ...]
) -> None:
    """No pass was to be learned from, so none was looked at, and nobody looks between the calls."""
    twin = Twin(Stretched(), graphing)
    for rows in sizes:
        _enter("unwatched", 6)
        for seed in range(6):
            twin(graphing.randn(rows, 8, seed=seed))
    _enter("unwatched", 9)
    twin(graphing.randn(6, 8))
    before = twin.replays
    _TEACHING_NOTHING[kind](twin, graphing.randn(9, 8))
    for seed in range(6):
        twin(graphing.randn(6, 8, seed=seed))
    assert twin.replays > before


def test_eager_calls_that_leave_nothing_take_no_graph_from_the_others(graphing: Where) -> None:
    twin = Twin(Stretched(), graphing)
    for number in range(4):
        _enter("unwatched", 12)
        for seed in range(6):
            twin(graphing.randn(6, 8, seed=10 * number + seed))
            twin(graphing.randn(5, 8, seed=10 * number + seed), Odd())
    assert (twin.captures, twin.replays) == (1, 4 * 6 - 3)


def test_weights_that_a_pass_moved_are_not_left_in_the_memory_of_a_graph(graphing: Where) -> None:
    """A capture runs the forward once more, and what lies in its memory holds nothing."""

    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, bias: float = 0.0) -> Tensor:
            if bias:
                self.linear.bias.data = torch.full((8,), bias, device=x.device)
            return self.linear(x)

    twin = Twin(Moves(), graphing, capture="warmup_only")
    twin(graphing.randn(3, 8))
    with twin.runner.warming_up():
        for seed in range(3):
            twin(graphing.randn(3, 8, seed=seed), 0.5)
    for seed in range(3):
        twin(graphing.randn(3, 8, seed=seed))


def test_no_other_threads_call_is_served_from_what_a_look_has_found_outdated(
    graphing: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread's call in the moment in which the graphs are about to go."""
    twin, x = Twin(Sets(), graphing), graphing.randn(3, 8, seed=50)
    for seed in range(6):
        with dit_graphs.request(total_steps=1):
            twin(graphing.randn(3, 8, seed=seed))
    assert twin.replays
    for module in (twin.module, twin.plain):
        torch.manual_seed(3)
        module.linear.weight.data = torch.randn(8, 8).to(graphing.device)
    invalidate, others = GraphHolding._invalidate, []

    def other() -> bool:
        with torch.no_grad(), dit_graphs.request(total_steps=1):
            return torch.equal(twin.module(x), twin.plain(x))

    def late(self: GraphHolding) -> None:
        if not others:
            others.append(False)
            with ThreadPoolExecutor(1) as pool:
                others[0] = pool.submit(other).result(timeout=60)
        invalidate(self)

    monkeypatch.setattr(GraphHolding, "_invalidate", late)
    with dit_graphs.request(total_steps=1):
        twin(x)
    assert others == [True]


def test_inputs_are_not_perturbed_between_another_threads_binding_and_its_replay(
    graphing: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = Twin(Sets(), graphing)
    x = graphing.randn(3, 8, seed=50)
    for seed in range(4):
        twin(graphing.randn(3, 8, seed=seed))
    (entry,) = twin.runner.cache.held()
    bind, late = StaticInputs.bind, []
    pool = ThreadPoolExecutor(1)

    def perturb() -> object:
        with torch.no_grad():
            return twin.runner._capturer.compare_perturbed(entry, (), {"x": x})

    def bound(self: StaticInputs, tensors: list[Tensor]) -> None:
        bind(self, tensors)
        if not late:
            late.append(pool.submit(perturb))
            wait(late, timeout=0.3)

    monkeypatch.setattr(StaticInputs, "bind", bound)
    before = twin.replays
    with pool:
        twin(x)
    assert twin.replays == before + 1 and late[0].result().reason is None


class Breaks(Exchanges):
    """Only the body of a break reads the table that another kind of call exchanges."""

    def use(self, h: Tensor) -> Tensor:
        return _scaled(h, self.gain) + 1


@dit_graphs.eager_on_graph
def _scaled(x: Tensor, gain: Tensor) -> Tensor:
    return x * gain


@pytest.mark.parametrize("boundary", ["none", "by hand", "unwatched"])
def test_what_the_body_of_a_break_reads_is_read_by_its_graph(
    segmenting: Where, boundary: str
) -> None:
    twin, chance = Twin(Breaks(), segmenting), Random(3)
    for module in (twin.module, twin.plain):
        module.gain = module.gain.to(segmenting.device)
    for number in range(5):
        if boundary == "by hand":
            with dit_graphs.request(total_steps=10):
                _mixed(twin, segmenting, chance, number)
            continue
        _enter(boundary, 10)
        _mixed(twin, segmenting, chance, number)
