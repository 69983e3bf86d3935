"""Python attributes: what a forward sets, what a user turns, and what neither may do to a graph.

A forward that changes attributes on every call cannot be replayed; one that fills a cache can; an
attribute that the user turns always belongs to the key.
"""

from __future__ import annotations

from itertools import count

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where, difference

import dit_graphs
from dit_graphs.wrapping import runner_of

CAPTURES = ["second_use", "first_use"]


def _runs(twin: Twin, calls: int = 7, *shape: int) -> None:
    for index in range(calls):
        twin(twin.where.randn(*(shape or (3, 8)), seed=index))


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_python_counter_keeps_the_module_eager(where: Where, capture: str) -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x * self.count

    twin = Twin(Steps(), where, capture=capture)
    _runs(twin)
    assert twin.module.count == 7
    assert twin.replays == 0
    assert "python_state" in twin.fallbacks
    assert "count" in twin.details["python_state"]


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_remembered_activation_keeps_the_module_eager(where: Where, capture: str) -> None:
    """After a replay `last` would be yesterday's activation, or memory of the graph's pool."""

    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            result = x.sin() if self.last is None else x.sin() + self.last
            self.last = x.cos()
            return result

    twin = Twin(Remembers(), where, capture=capture)
    for index in range(7):
        twin(where.randn(3, 8, seed=index))
        assert difference(twin.module.last, twin.plain.last) is None
    assert twin.replays == 0
    assert "python_state" in twin.fallbacks


def test_a_growing_list_keeps_the_module_eager(where: Where) -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.history: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            self.history.append(1.0)
            return x * len(self.history)

    twin = Twin(Grows(), where)
    _runs(twin)
    assert len(twin.module.history) == 7
    assert twin.replays == 0


def test_scratch_containers_made_anew_are_no_state(where: Where) -> None:
    """As the video VAEs do: what one frame leaves for the next, emptied at both ends of a call."""

    class Scratch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.clear()

        def clear(self) -> None:
            self.frames: list[Tensor | None] = [None] * 3
            self.at = [0]
            self.seen: dict[str, object] = {"last": None, "sizes": (0, [1.5])}

        def forward(self, x: Tensor) -> Tensor:
            self.clear()
            for index, part in enumerate(x.unbind(0)):
                self.frames[index] = part.sin()
                self.at[0] += 1
            x = torch.stack([frame for frame in self.frames if frame is not None]) * self.at[0]
            self.clear()
            return x

    twin = Twin(Scratch(), where)
    _runs(twin, 6)
    assert twin.replays == 3
    assert twin.module.frames == [None] * 3 and twin.module.at == [0]


@pytest.mark.parametrize("leaves", ["a tensor", "a count", "another length"])
def test_scratch_that_is_left_full_is_state(where: Where, leaves: str) -> None:
    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[object] = [None]

        def forward(self, x: Tensor) -> Tensor:
            left = {"a tensor": [x.sin()], "a count": [self._next()], "another length": [None] * 2}
            if leaves == "another length" and len(self.kept) == 2:
                left[leaves] = [None]
            self.kept = left[leaves]
            return x * len(self.kept)

        def _next(self) -> int:
            return 1 if self.kept[0] is None else self.kept[0] + 1

    twin = Twin(Leaves(), where)
    _runs(twin)
    assert twin.replays == 0
    assert "kept" in twin.details["python_state"]


def test_a_counting_helper_object_keeps_the_module_eager(where: Where) -> None:
    """Attention processors keep their state in plain attributes, one level below the module."""

    class Processor:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.processor = Processor()

        def forward(self, x: Tensor) -> Tensor:
            return self.processor(x)

    twin = Twin(Attends(), where)
    _runs(twin)
    assert twin.module.processor.calls == 7
    assert twin.replays == 0


def test_a_lazily_filled_cache_does_not_keep_the_module_eager(where: Where) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables: dict[int, Tensor] = {}
            self.last_size: int | None = None

        def forward(self, x: Tensor) -> Tensor:
            size = x.shape[0]
            if size not in self.tables:
                self.tables[size] = torch.arange(size, device=x.device).float()[:, None]
            self.last_size = size
            return x * self.tables[size]

    twin = Twin(Lazy(), where)
    for index in range(7):
        twin(where.randn(3, 8, seed=index))
        twin(where.randn(5, 8, seed=index))
    assert twin.graphs == 2
    # `last_size` is in the key until it was seen to be the forward's own doing (three passes of
    # sizes that had come before: what a new one sets may grow with it)
    assert twin.replays == 4


def test_a_one_slot_cache_does_not_free_what_another_graph_reads(where: Where) -> None:
    """Each size evicts the other's table from the model; the graphs hold their own."""

    class OneSlot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.size = 0
            self.table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.size != x.shape[0]:
                self.size = x.shape[0]
                self.table = torch.linspace(1, 2, x.shape[0], device=x.device)[:, None]
            return x * self.table

    twin = Twin(OneSlot(), where)
    for index in range(8):
        twin(where.randn(3, 8, seed=index))
        twin(where.randn(5, 8, seed=index))
        junk = [torch.full((size, 1), float("nan"), device=where.device) for size in (3, 5)]
        del junk
    assert twin.graphs == 2
    assert twin.replays == 7


class Pops(nn.Module):
    """Takes entries out of what it is given, as the UNet of a T2I-Adapter does."""

    def forward(self, x: Tensor, options: dict[str, object]) -> Tensor:
        scales = options["scales"]
        assert isinstance(scales, list)
        scaled = x * options.pop("scale") + scales.pop(0) * 2
        while len(scales) > 1:
            scaled = scaled - scales.pop()
        return scaled


def _options(where: Where, seed: int, number: int) -> dict[str, object]:
    scales = [where.randn(8, seed=10 * seed + index) for index in range(number)]
    return {"scale": where.randn(8, seed=seed), "scales": scales, "other": where.randn(8)}


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_caller_whose_containers_are_popped_sees_it(where: Where, capture: str) -> None:
    """On replays as well, and in each structure what that one loses."""
    twin = Twin(Pops(), where, capture=capture)
    for number in (3, 4, 2):
        for index in range(5):
            options = _options(where, index, number)
            kept = options["scales"][1]
            twin(where.randn(3, 8, seed=index), options)
            assert list(options) == ["scales", "other"]
            assert len(options["scales"]) == 1 and options["scales"][0] is kept
    assert set(twin.fallbacks) == {"warming_up"}
    assert twin.replays >= 6 and twin.graphs == 3


def test_a_list_given_again_after_it_was_popped_is_another_call(where: Where) -> None:
    class Last(nn.Module):
        def forward(self, x: Tensor, more: list[Tensor]) -> Tensor:
            return x + more.pop() if more else x * 2

    twin = Twin(Last(), where)
    for seed in range(6):
        more = [where.randn(8, seed=seed)]
        for _ in range(2):
            twin(where.randn(3, 8, seed=seed), more)
        assert more == []
    assert twin.replays >= 3


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("is_shared_at_first", [True, False])
def test_a_list_given_twice_loses_its_entry_in_both_places(
    where: Where, is_shared_at_first: bool, capture: str
) -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor, some: list[Tensor], more: list[Tensor]) -> Tensor:
            return x + some.pop() * len(more) + more.pop()

    twin = Twin(Both(), where, capture=capture)
    for is_shared in (is_shared_at_first, not is_shared_at_first):
        for seed in range(6):
            some = [where.randn(8, seed=10 * seed + index) for index in range(3)]
            twin(where.randn(3, 8, seed=seed), some, some if is_shared else [*some])
    assert "loses entries" in twin.details["python_state"]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("given", ["a tensor", "a number"])
def test_a_size_that_pops_is_not_captured_from_what_its_plain_call_left(
    where: Where, given: str, verify: bool
) -> None:
    """Another size of the same structure was simple, so the capture comes right after that call."""

    class Pops5(nn.Module):
        def forward(self, x: Tensor, more: dict[str, object], y: Tensor) -> Tensor:
            if len(x) == 5:
                return x * more.pop("scale", 1.0) - y
            return x * more["scale"] - y

    twin = Twin(Pops5(), where, verify=verify)
    for rows in (3, 5):
        for request in range(2):
            with dit_graphs.request(8):
                for step in range(8):
                    scale = where.randn(8, seed=step) if given == "a tensor" else 2.5
                    y = where.randn(8, seed=10 * request + step)
                    twin(where.randn(rows, 8, seed=step), {"scale": scale}, y)
    assert twin.graphs == 2 and set(twin.fallbacks) == {"warming_up"}


def test_a_popped_argument_of_a_graph_that_is_wrong_is_whole_for_eager(graphing: Where) -> None:
    """The compare runs eager several times; each of them needs all entries."""

    calls = count(1)

    class Counts(nn.Module):
        def forward(self, x: Tensor, more: list[Tensor]) -> Tensor:
            # the number is no attribute of the module: baked, and found by the compare
            return x * next(calls) + more.pop()

    module, x = Counts(), graphing.randn(8)
    dit_graphs.wrap(module, backend=graphing.backend)
    with torch.no_grad():
        for _ in range(8):
            more = [x, x]
            module(x, more)
            assert len(more) == 1
    runner = runner_of(module)
    assert runner is not None and "eager_nondeterministic" in runner.stats.fallbacks


def test_a_caller_whose_list_is_extended_sees_it_extended(where: Where) -> None:
    class Extends(nn.Module):
        def forward(self, x: Tensor, outputs: list[Tensor]) -> Tensor:
            outputs.append(x * 2)
            return x * 3

    twin = Twin(Extends(), where)
    for index in range(6):
        outputs: list[Tensor] = []
        twin(where.randn(3, 8, seed=index), outputs)
        assert torch.equal(outputs[0], where.randn(3, 8, seed=index) * 2)
    assert twin.replays == 0


def test_training_mode_flips_are_another_graph(where: Where) -> None:
    class Mode(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (2.0 if self.training else 3.0)

    twin = Twin(Mode(), where)
    for training in (False, True, False):
        twin.module.train(training)
        twin.plain.train(training)
        _runs(twin, 5)
    assert twin.captures == 2


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_scale_turned_in_every_request_never_leaves_the_key(where: Where, length: int) -> None:
    twin = Twin(Scaled(), where)
    for number, scale in enumerate([1.0, 0.5, 2.0, 3.0, 0.25, 0.5, 1.0, 7.0, 0.5, 1.0] * 2):
        twin.module.scale = twin.plain.scale = scale
        with dit_graphs.request(total_steps=length):
            for step in range(length):
                twin(where.randn(3, seed=100 * number + step))


def test_a_scale_turned_between_calls_outside_requests(where: Where) -> None:
    twin = Twin(Scaled(), where)
    for number, scale in enumerate([1.0, 0.5, 2.0, 3.0, 0.25, 1.0, 7.0, 0.5] * 4):
        twin.module.scale = twin.plain.scale = scale
        twin(where.randn(3, seed=number))
    assert twin.replays > 0, "a state that returns finds its own graph"
