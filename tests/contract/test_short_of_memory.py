"""What is raised on the way to a graph is the machinery's concern: the caller gets eager's result.

Here a module raises once, at each place in turn where it is run in addition to the caller's own
call. The surprising fact: plain eager would not have run it there, so nothing may reach the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where, difference, random_state, set_random_state

import dit_graphs
from dit_graphs import Reason, eager_on_graph
from dit_graphs.static_inputs import StaticInputs


class _Raising:
    """When to raise, out of reach of every look at a module."""

    runs = 0
    at = 0
    error: type[Exception] = torch.OutOfMemoryError


_raising = _Raising()


class Once(nn.Module):
    """Raises in its `at`-th run, of the wrapped module or its copy; counts and draws before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("total", torch.zeros(8))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        _raising.runs += 1
        self.total.add_(x[0])
        noise = torch.rand_like(x)
        if _raising.runs == _raising.at:
            raise _raising.error("on purpose")
        return self.linear(x + noise) + self.total


def _arm(error: type[Exception], runs_from_now: int) -> None:
    _raising.error, _raising.runs, _raising.at = error, 0, runs_from_now


@pytest.fixture(autouse=True)
def _disarmed() -> object:
    yield
    _raising.at = 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("run", [1, 2])
def test_a_pass_or_capture_that_raises_costs_a_graph_and_nothing_else(
    where: Where, error: type[Exception], run: int
) -> None:
    twin = Twin(Once(), where)
    twin(where.randn(3, 8))
    _arm(error, run)  # the observed pass, then the capture
    for index in range(4):
        twin(where.randn(3, 8, seed=index))
    is_short = error is torch.OutOfMemoryError
    expected = Reason.OUT_OF_MEMORY if is_short else Reason.CAPTURE_FAILED
    assert set(twin.runner.stats.fallbacks) == {Reason.WARMING_UP, expected}
    assert ("; graphs hold" in twin.details[expected]) is is_short


def test_memory_that_was_short_once_does_not_forbid_a_graph_for_ever(graphing: Where) -> None:
    twin = Twin(Once(), graphing)
    twin(graphing.randn(3, 8))
    _arm(torch.OutOfMemoryError, 1)
    for index in range(45):
        twin(graphing.randn(3, 8, seed=index))
    assert twin.runner.stats.captures == 1
    assert twin.runner.stats.replays > 0


@pytest.mark.parametrize("step", ["__init__", "bind", "changed_unproven", "perturb"])
def test_buffers_for_which_there_is_no_memory(
    where: Where, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_use = step == "perturb"
    twin = Twin(nn.Linear(8, 8), where, capture="first_use" if first_use else "second_use")
    real = getattr(StaticInputs, step)
    left = [1]

    def short(self: StaticInputs, *args: object) -> object:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("on purpose")
        return real(self, *args)

    monkeypatch.setattr(StaticInputs, step, short)
    for index in range(4):
        twin(where.randn(3, 8, seed=index))
    assert left == [0]
    assert twin.runner.stats.fallbacks[Reason.OUT_OF_MEMORY] >= 1


class Picky(nn.Module):
    """Refuses values that no caller sends."""

    def forward(self, x: Tensor) -> Tensor:
        return _whole_numbers(x) * 2


@eager_on_graph
def _whole_numbers(x: Tensor) -> Tensor:
    if not torch.equal(x, x.round()):
        raise ValueError("expected whole numbers")
    return x + 1


def test_values_made_up_for_a_first_compare_raise_for_nobody(breaking: Where) -> None:
    twin = Twin(Picky(), breaking, capture="first_use")
    for index in range(5):
        twin(breaking.randn(3, 8, seed=index).round())
    stats = twin.runner.stats
    assert stats.captures == 1
    assert stats.replays >= 3, "the calls' own values prove the graph"
    assert set(stats.fallbacks) == {Reason.WARMING_UP}


def test_the_compare_that_runs_out_of_memory_leaves_the_random_stream(graphing: Where) -> None:
    twin = Twin(Once(), graphing)
    runner = twin.runner
    for index in range(2):
        twin(graphing.randn(3, 8, seed=index))

    def short(*args: object, **kwargs: object) -> object:
        del vars(runner)["call_eager"]
        torch.rand(3, device=graphing.device)
        raise torch.OutOfMemoryError("on purpose")

    assert [entry.state.value for entry in runner.cache.held()] == ["captured"]
    vars(runner)["call_eager"] = short
    twin(graphing.randn(3, 8, seed=2))
    assert "call_eager" not in vars(runner)
    assert twin.fallbacks == {"warming_up": 2, "out_of_memory": 1}


@pytest.mark.parametrize("short", ["the comparison", "eager's second run", "the second comparison"])
def test_a_compare_short_of_memory_after_eagers_call_returns_what_that_gave(
    graphing: Where, short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has written and drawn already: to run it once more would do both twice."""
    twin = Twin(Once(), graphing)
    for index in range(2):
        twin(graphing.randn(3, 8, seed=index))
    compared: list[None] = []

    def results_equal(left: object, right: object) -> str | None:
        compared.append(None)
        if (short, len(compared)) in (("the comparison", 1), ("the second comparison", 2)):
            raise torch.OutOfMemoryError("on purpose")
        return "made up" if len(compared) == 1 else None

    monkeypatch.setattr("dit_graphs.verify.results_equal", results_equal)
    if short == "eager's second run":
        _arm(torch.OutOfMemoryError, 2)
    twin(graphing.randn(3, 8, seed=2))
    assert compared and twin.graphs == 0
    assert twin.fallbacks == {"warming_up": 2, "out_of_memory": 1}
    twin(graphing.randn(3, 8, seed=3))


class Cache:
    """An object that a forward fills."""

    def __init__(self) -> None:
        self.items: list[Tensor] = []


class Starts(nn.Module):
    """Changes what it is given, then runs out of memory if told to."""

    def forward(self, x: Tensor, given: object) -> Tensor:
        if isinstance(given, Tensor):
            x = x + given.add_(1)
        elif isinstance(given, list):
            x = x + given.pop() * len(given)
        elif isinstance(given, dict):
            x = x + given.pop("scale", 7.0)
        elif isinstance(given, torch.Generator):
            x = x + torch.rand(8, generator=given, device=given.device)
        elif isinstance(given, Cache):
            given.items.append(x)
            x = x + len(given.items)
        x = x + torch.rand_like(x)
        _raising.runs += 1
        if _raising.runs == _raising.at:
            raise _raising.error("on purpose")
        return x


GIVEN: dict[str, tuple[Callable[[Where], object], bool]] = {
    "a tensor, written": (lambda where: where.randn(8, seed=1), False),
    "a list, popped": (lambda where: [where.randn(8, seed=index) for index in range(3)], True),
    "a dict, popped": (lambda where: {"scale": 2.0, "other": 1}, True),
    "a generator": (lambda where: torch.Generator(where.device).manual_seed(3), True),
    "an object of somebody's": (lambda where: Cache(), False),
}


@pytest.mark.parametrize("has_entry", [True, False])
@pytest.mark.parametrize("name", GIVEN)
def test_a_second_try_without_graphs_starts_where_the_first_did(
    where: Where, name: str, has_entry: bool
) -> None:
    """Or is not made: where it could not start there, the caller gets the error."""
    make, can_start_again = GIVEN[name]
    holder = Twin(nn.Linear(8, 8), where)
    holder.until_replayed(lambda index: (where.randn(3, 8, seed=index),))
    module, plain, x = Starts(), Starts(), where.randn(3, 8)
    dit_graphs.wrap(module, backend=where.backend)
    _arm(torch.OutOfMemoryError, 1)
    given, expected = make(where), make(where)
    before = random_state(where.device)
    with dit_graphs.disabled(module) if not has_entry else nullcontext():
        if not can_start_again:
            with pytest.raises(torch.OutOfMemoryError):
                module(x, given)
            assert holder.graphs == 0, "the next try has their memory"
            return
        result = module(x, given)
    after = random_state(where.device)
    set_random_state(where.device, before)
    assert torch.equal(result, plain(x, expected))
    assert all(map(torch.equal, after, random_state(where.device)))
    if not isinstance(given, torch.Generator):
        assert difference(given, expected) is None
