"""A break that does something new at replay: the replay never happened, the call runs eagerly.

The model's own exception reaches the user, nothing is written twice, the random stream is that of
one eager call, and the recording is dropped with the right reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where

import dit_graphs
from dit_graphs import eager_on_graph
from dit_graphs.wrapping import runner_of

BRANCH = 0.5  # input sums above it make the break misbehave


def _module(body: Callable[[Tensor], object], after: object = None) -> nn.Module:
    broken = eager_on_graph(body)
    rest = after or (lambda value: value)

    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            # the first element is the switch: eager_on_graph bodies may look at values
            return self.linear(rest(broken(x.sin())))

    return Moody()


def _calm(where: Where, seed: int) -> Tensor:
    return -where.randn(3, 8, seed=seed).abs()


def _wild(where: Where, seed: int) -> Tensor:
    return where.randn(3, 8, seed=seed).abs() + BRANCH


def _is_wild(h: Tensor) -> bool:
    return float(h.sum()) > 0


_MOODS = {
    "break_shape_changed": (lambda h: h[:2] if _is_wild(h) else h, lambda v: v * 2),
    "break_value_changed": (lambda h: (h, 2 if _is_wild(h) else 1), lambda v: v[0] * v[1]),
}


@pytest.mark.parametrize("reason", _MOODS)
def test_a_changed_break_runs_the_whole_call_eagerly(breaking: Where, reason: str) -> None:
    twin = Twin(_module(*_MOODS[reason]), breaking)
    twin.until_replayed(lambda i: (_calm(breaking, i),))
    twin(_wild(breaking, 1))
    found = {r for r in twin.fallbacks if r.startswith("break_")}
    # for the debug backend the whole forward is the break: its body's change shows as its result's
    assert found == {reason} if breaking.backend != "debug" else len(found) <= 1
    if breaking.backend != "debug":
        assert twin.graphs == 0, "the recording was kept"
    twin(_calm(breaking, 30))


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.double() if _is_wild(h) else h,
        lambda h: h.t().contiguous().t() if _is_wild(h) else h.contiguous(),
    ],
    ids=["dtype", "stride"],
)
def test_dtype_and_stride_of_a_break_are_part_of_its_shape(
    segmenting: Where, change: Callable[[Tensor], object]
) -> None:
    twin = Twin(_module(change, lambda v: v.float() * 2), segmenting)
    twin.until_replayed(lambda i: (_calm(segmenting, i),))
    twin(_wild(segmenting, 1))
    assert twin.fallbacks.get("break_shape_changed") == 1


def test_the_exception_of_a_break_reaches_the_user(breaking: Where) -> None:
    def body(h: Tensor) -> Tensor:
        if _is_wild(h):
            raise ValueError("too wild")
        return h * 2

    twin = Twin(_module(body), breaking)
    twin.until_replayed(lambda i: (_calm(breaking, i),))
    with pytest.raises(ValueError, match="too wild"):
        twin(_wild(breaking, 1))
    assert twin.fallbacks.get("break_raised") == 1
    assert twin.graphs == 0
    twin(_calm(breaking, 40))


def test_an_exception_only_the_replay_sees_gives_the_eager_result(breaking: Where) -> None:
    """A break that fails once (a lost connection) must not fail the user's call."""
    calls = []

    def body(h: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == fail_at[0]:
            raise ConnectionError("once")
        return h * 2

    fail_at = [0]
    twin = Twin(_module(body), breaking)
    twin.until_replayed(lambda i: (_calm(breaking, i),))
    fail_at[0] = len(calls) + 1
    twin(_calm(breaking, 20))
    assert twin.fallbacks.get("break_raised") == 1


def test_a_signature_may_come_back_once_and_then_stays_eager(segmenting: Where) -> None:
    twin = Twin(_module(*_MOODS["break_shape_changed"]), segmenting)
    for round_ in range(2):
        twin.until_replayed(lambda i, r=round_: (_calm(segmenting, 10 * r + i),))
        twin(_wild(segmenting, round_))
    captures = twin.captures
    assert captures == 2
    for index in range(6):
        twin(_calm(segmenting, 60 + index))
    assert twin.captures == captures, "captured again after it was dropped twice"
    assert twin.fallbacks["break_shape_changed"] >= 3
    assert twin.runner.stats.invalidations == 2


def test_a_discarded_replay_draws_no_random_numbers(breaking: Where) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.middle = eager_on_graph(lambda h: h[:2] if _is_wild(h) else h)

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand_like(x)
            return self.middle(x.sin()).sum() + noise + torch.rand_like(x)

    twin = Twin(Noisy(), breaking)
    twin.until_replayed(lambda i: (_calm(breaking, i),))
    twin(_wild(breaking, 1))  # Twin compares the stream after every call
    twin(_calm(breaking, 2))


def test_a_discarded_replay_draws_nothing_from_an_explicit_generator(segmenting: Where) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator(segmenting.device).manual_seed(2)
            self.middle = eager_on_graph(lambda h: h[:2] if _is_wild(h) else h)

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand(x.shape, generator=self.generator, device=x.device)
            return self.middle(x.sin()).sum() + noise

    module = Noisy()
    dit_graphs.wrap(module, backend=segmenting.backend)
    theirs = torch.Generator(segmenting.device).manual_seed(2)
    inputs = [_calm(segmenting, i) for i in range(6)]
    for x in [*inputs, _wild(segmenting, 7), *inputs]:
        noise = torch.rand(x.shape, generator=theirs, device=x.device)
        middle = x.sin()[:2] if _is_wild(x.sin()) else x.sin()
        assert torch.equal(module(x), middle.sum() + noise)
        assert torch.equal(module.generator.get_state(), theirs.get_state())
    assert runner_of(module).stats.replays >= 3


def test_a_discarded_replay_leaves_no_trace_in_module_state(breaking: Where) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(8))
            self.middle = eager_on_graph(lambda h: h[:2] if _is_wild(h) else h)

        def forward(self, x: Tensor) -> Tensor:
            self.seen += x.sum(0)
            return self.middle(x.sin()).sum() + self.seen

    twin = Twin(Counts(), breaking)
    for index in range(8):
        twin(_calm(breaking, index))
    twin(_wild(breaking, 1))
    twin(_calm(breaking, 9))
    assert twin.replays == 0, "state written around a break is refused"
    assert any("module state" in text for text in twin.details.values())


def test_a_break_that_writes_module_state_is_refused(breaking: Where) -> None:
    """A KV cache or step counter advanced inside a break: a discarded replay could not undo it."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        @eager_on_graph
        def advance(self, h: Tensor) -> Tensor:
            self.steps.add_(1.0)
            return h * self.steps

        def forward(self, x: Tensor) -> Tensor:
            return self.advance(x.sin()) + 1

    twin = Twin(Counts(), breaking)
    for index in range(7):
        twin(breaking.randn(3, seed=index))
    assert float(twin.module.steps) == 7.0
    assert twin.replays == 0


def test_a_break_that_writes_its_input_reaches_the_caller(breaking: Where) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bump = eager_on_graph(lambda x: x.add_(1.0))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.bump(x)
            return x * y

    twin = Twin(Writes(), breaking)
    for index in range(7):
        twin(breaking.randn(3, seed=index), breaking.randn(3, seed=50 + index))
    assert twin.replays == 4


def test_a_nested_wrapped_module_inside_a_break_runs_eagerly(segmenting: Where) -> None:
    inner = nn.Linear(8, 8)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner
            self.call = eager_on_graph(lambda h: self.inner(h))

        def forward(self, x: Tensor) -> Tensor:
            return self.call(x.sin()) + 1

    outer = Outer().to(segmenting.device)
    dit_graphs.wrap(inner, backend=segmenting.backend)
    dit_graphs.wrap(outer, backend=segmenting.backend)
    for index in range(8):
        x = segmenting.randn(3, 8, seed=index)
        expected = torch.nn.functional.linear(x.sin(), inner.weight, inner.bias) + 1
        assert torch.equal(outer(x), expected)
    assert runner_of(outer).stats.replays >= 3
    assert "nested_replay" in {r.value for r in runner_of(inner).stats.fallbacks}


@pytest.mark.parametrize("how", ["unwrapped", "wrapped anew", "drop"])
def test_a_break_may_take_away_the_graph_that_it_runs_in(breaking: Where, how: str) -> None:
    """Its last replay goes on to the end; then it goes."""
    ways: list[str] = []

    @eager_on_graph
    def doing(module: nn.Module, x: Tensor) -> Tensor:
        way = ways.pop() if ways else ""
        if way == "unwrapped":
            dit_graphs.unwrap(module)
        elif way == "wrapped anew":
            dit_graphs.wrap(module, backend=breaking.backend, max_graphs=3)
        elif way:
            runner_of(module).drop_graphs()
        return x * 2

    class Doing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(doing(self, x))

    module = Doing().to(breaking.device)
    plain = copy.deepcopy(module)
    dit_graphs.wrap(module, backend=breaking.backend)
    runner = runner_of(module)
    for seed in range(5):
        module(breaking.randn(3, 8, seed=seed))
    assert runner.stats.replays and runner.holds_graphs()
    ways.append(how)
    for seed in range(5, 9):
        x = breaking.randn(3, 8, seed=seed)
        assert torch.equal(module(x), plain(x))
        if seed == 5:
            assert not ways and not runner.holds_graphs()
    assert (runner_of(module) is None) == (how == "unwrapped")
