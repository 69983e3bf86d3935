"""What a forward writes outside its result: inputs and buffers. Once per call, no more.

Observing, capturing and comparing run a forward more often than the caller does; `Twin` compares
arguments, buffers and results with a module that was only ever called.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where

import dit_graphs

CAPTURES = ["second_use", "first_use"]


def _runs(twin: Twin, calls: int = 7, *shape: int) -> None:
    for index in range(calls):
        twin(twin.where.randn(*(shape or (3, 8)), seed=index))


@pytest.mark.parametrize("capture", CAPTURES)
def test_an_input_written_in_place_reaches_the_caller(where: Where, capture: str) -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.add_(y)
            x[0] = 7.0
            return x * 2

    twin = Twin(Adds(), where, capture=capture)
    for index in range(7):
        twin(where.randn(3, 8, seed=index), where.randn(3, 8, seed=50 + index))
    assert twin.replays >= 4


def test_the_same_tensor_written_call_after_call(where: Where) -> None:
    class Decays(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(0.5).sum()

    twin = Twin(Decays(), where)
    mine, theirs = where.randn(8), where.randn(8)
    with dit_graphs.request():
        for _ in range(7):
            assert torch.equal(twin.module(mine), twin.plain(theirs))
            assert torch.equal(mine, theirs)
    assert twin.replays == 4


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_buffer_is_written_once_per_call(where: Where, capture: str) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))
            self.register_buffer("cache", torch.zeros(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            self.steps.add_(1.0)
            self.cache[1:] += x
            return x * self.steps + self.cache.sum()

    twin = Twin(Counts(), where, capture=capture)
    _runs(twin)
    assert float(twin.module.steps) == 7.0
    # debug is one big break, and state around a break is refused
    assert twin.replays >= (4 if where.backend != "debug" else 0)


def test_two_views_of_one_buffer_are_both_put_back(graphing: Where) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(2, 8))

        def forward(self, x: Tensor) -> Tensor:
            self.cache[0].add_(x[0])
            self.cache[1].mul_(0.5).add_(x[1])
            return x + self.cache.sum()

    twin = Twin(Rows(), graphing)
    _runs(twin)
    assert twin.replays == 4


def test_a_tensor_attribute_is_written_once_per_call(graphing: Where) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.state = [torch.zeros(8)]

        def _apply(self, fn: object, recurse: bool = True) -> nn.Module:
            self.state = [fn(tensor) for tensor in self.state]
            return super()._apply(fn, recurse)

        def forward(self, x: Tensor) -> Tensor:
            self.state[0].add_(x[0])
            return self.linear(x) + self.state[0]

    twin = Twin(Holder(), graphing)
    _runs(twin)
    assert torch.equal(twin.module.state[0], twin.plain.state[0])
    assert twin.replays == 4


@pytest.mark.parametrize("capture", CAPTURES)
def test_averages_that_a_norm_moves_in_training(graphing: Where, capture: str) -> None:
    """Its op says nothing of that in its schema."""
    twin = Twin(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), graphing, capture=capture)
    for is_training in (True, False):
        for module in (twin.module, twin.plain):
            module.train(is_training)
        before = twin.replays
        _runs(twin)
        assert twin.replays >= before + 4, twin.details


@torch.library.custom_op("dit_graphs_tests::fill", mutates_args={"target"})
def _fill(target: Tensor, source: Tensor) -> Tensor:
    target.copy_(source)
    return source * 2


@pytest.mark.parametrize("kind", ["state", "scratch"])
def test_an_op_that_writes_an_argument_and_returns_new_memory(graphing: Where, kind: str) -> None:
    class Fills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("held", torch.zeros(3, 8))

        def forward(self, x: Tensor) -> Tensor:
            target = self.held if kind == "state" else torch.empty_like(x)
            return _fill(target, x).add_(1.0) + target

    twin = Twin(Fills(), graphing)
    _runs(twin)
    assert twin.replays == 4, twin.details
    (entry,) = twin.runner.cache.held()
    assert len(entry.observation.written_externals) == (kind == "state")


def test_a_norm_put_into_training_after_a_graph_existed(where: Where) -> None:
    """The code path is a known one, and so no pass of the new signature has to be watched."""
    twin = Twin(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), where)
    for is_training in (False, True):
        for module in (twin.module, twin.plain):
            module.train(is_training)
        with dit_graphs.request(total_steps=7):
            _runs(twin)


def test_a_rebound_buffer_keeps_the_module_eager(where: Where) -> None:
    class Rebinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            self.total = self.total + x[0]
            return x * self.total

    twin = Twin(Rebinds(), where)
    _runs(twin)
    assert twin.replays == 0


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_refused_result_leaves_state_written_once(where: Where, capture: str) -> None:
    """The observed pass finds that the result cannot be rebuilt: nothing runs a second time."""

    class Opaque:
        pass

    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Tensor) -> object:
            self.steps += 1
            noise = torch.rand_like(x)
            return x + noise, Opaque

    twin = Twin(Returns(), where, capture=capture)
    _runs(twin)

    class Objects(Returns):
        def forward(self, x: Tensor) -> object:
            return {"out": super().forward(x)[0], "cache": object}, iter(())

    module = Objects().to(where.device)
    dit_graphs.wrap(module, backend=where.backend, capture=capture)
    for index in range(5):
        module(where.randn(3, 8, seed=index))
    assert float(module.steps) == 5.0


def test_an_exception_in_the_observed_pass_leaves_state_as_eager_does(where: Where) -> None:
    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Tensor, fail: Tensor | None = None) -> Tensor:
            self.steps += 1
            x = x + torch.rand_like(x)
            if fail is not None:
                raise ValueError("after the write")
            return x

    twin = Twin(Raises(), where)
    for index in range(4):
        with pytest.raises(ValueError, match="after the write"):
            twin(where.randn(3, seed=index), where.randn(1))
    assert float(twin.module.steps) == 4.0


@pytest.mark.parametrize("capture", CAPTURES)
def test_the_same_tensor_given_twice_stays_one_tensor(where: Where, capture: str) -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.add_(1.0)
            return x * y

    twin = Twin(Both(), where, capture=capture)
    for index in range(6):
        x = where.randn(8, seed=index)
        twin(x, x)
        twin(where.randn(8, seed=index), where.randn(8, seed=60 + index))
    assert twin.graphs == 2, "the same tensor twice is not two tensors of equal shape"
    assert twin.replays >= 6


def test_views_that_overlap_and_are_written_stay_eager(where: Where) -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.add_(1.0)
            return x.sum() * y

    twin = Twin(Both(), where)
    for index in range(6):
        base = where.randn(12, seed=index)
        twin(base[:8], base[4:])
    assert twin.replays == 0
    for index in range(6):
        base = where.randn(16, seed=index)
        twin(base[:8], base[8:])
    assert twin.replays == 3, "the two halves of one tensor do not touch"


class Remembers(nn.Module):
    """Writes what it holds before it reads the argument, and the argument before what it holds."""

    def __init__(self, writes: str) -> None:
        super().__init__()
        self.writes = writes
        self.register_buffer("held", torch.zeros(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        (self.held if self.writes == "state" else x).add_(1.0)
        return x * 2 + self.held


@pytest.mark.parametrize("first", [0, 3, 6])
@pytest.mark.parametrize("writes", ["state", "argument"])
def test_state_of_the_module_that_is_an_argument_too(where: Where, writes: str, first: int) -> None:
    """Eagerly one memory, in a graph two: the held tensor, and a buffer with its values."""
    twin = Twin(Remembers(writes), where)
    for index in range(first):
        twin(where.randn(3, 8, seed=index))
    for view in (slice(None), slice(None), slice(3), slice(3), slice(3)):
        mine, theirs = (module(module.held[view]) for module in (twin.module, twin.plain))
        assert torch.equal(mine, theirs)
        assert torch.equal(twin.module.held, twin.plain.held)
    for index in range(3):
        twin(where.randn(3, 8, seed=index))


def test_views_that_overlap_and_are_only_read_are_graphed(where: Where) -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.sum() * y

    twin = Twin(Both(), where)
    for index in range(6):
        base = where.randn(8, 2, seed=index)
        twin(base[:, 0], base[:, 1])
    assert twin.replays == 3
