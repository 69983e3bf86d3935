"""Constants built on the host: found again by line and bytes, never by call order.

`torch.tensor([...])`, list indexing and the like put host values on the device on every call; a
graph holds them as they were observed, and a capture that would hold something else is given up.
On the CPU recorder "host" is everything that does not depend on inputs, weights or randomness.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where

import dit_graphs
from dit_graphs import eager_on_graph
from dit_graphs.wrapping import runner_of


def _runs(twin: Twin, calls: int = 7) -> None:
    for index in range(calls):
        twin(twin.where.randn(3, 8, seed=index))


_BUILDERS = {
    "tensor": lambda x: x * torch.tensor([1.0, 2.0] * 4, device=x.device),
    "tensor with dtype": lambda x: (
        x + torch.tensor(3, device=x.device, dtype=torch.float64).float()
    ),
    "as_tensor": lambda x: x * torch.as_tensor([0.5] * 8, device=x.device),
    "asarray": lambda x: x * torch.asarray([0.5] * 8, device=x.device),
    "scalar_tensor": lambda x: x * torch.scalar_tensor(0.5, device=x.device),
    "new_tensor": lambda x: x + x.new_tensor([0.25] * 8),
    "new_tensor in two lines": lambda x: x + x.new_tensor([0.25] * 8) - x.new_tensor([0.5] * 8),
    "host tensor moved": lambda x: x * torch.arange(8.0).to(x.device),
    "host tensor moved and cast": lambda x: x * torch.arange(8).to(x.device, torch.float32),
    "host tensor moved like another": lambda x: x * torch.arange(8.0).to(x),
    "list index": lambda x: x[:, [0, -1, 3]],
    "list index with a slice": lambda x: x[[2, 0]][:, 1:],
    "range index": lambda x: x[:, range(4)],
    "host index tensor": lambda x: x[:, torch.tensor([1, 2])],
    "host mask": lambda x: x[:, torch.arange(8) % 2 == 0],
    "0-dim host tensor in a device op": lambda x: x * torch.tensor(2.5),
    "copy_ from host": lambda x: torch.empty_like(x[0]).copy_(torch.arange(8.0)) * x,
    "setitem from host": lambda x: _assigned(x, torch.arange(8.0)),
    "setitem with a list": lambda x: _assigned_list(x),
    "full and arange on the device": lambda x: x * torch.arange(8.0, device=x.device) + 1.0,
    "one line in a loop": lambda x: sum(x * torch.tensor(k, device=x.device) for k in (1.0, 2.0)),
    "empty": lambda x: torch.cat([x, torch.tensor([], device=x.device)[None].expand(3, 0)], 1),
    "linspace": lambda x: x * torch.linspace(0, 1, 8, device=x.device),
    "nested list": lambda x: x @ torch.tensor([[1.0, 0.0]] * 8, device=x.device),
}


def _assigned(x: Tensor, row: Tensor) -> Tensor:
    x = x.clone()
    x[0] = row
    return x


def _assigned_list(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, [0, 2]] = 7.0
    return x


class Builds(nn.Module):
    def __init__(self, build: object) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.build = build

    def forward(self, x: Tensor) -> Tensor:
        return self.build(self.linear(x))  # type: ignore[operator]


@pytest.mark.parametrize("kind", _BUILDERS)
def test_a_constant_does_not_keep_the_forward_from_a_graph(where: Where, kind: str) -> None:
    twin = Twin(Builds(_BUILDERS[kind]), where)
    _runs(twin)
    assert twin.replays == 4
    assert where.backend == "debug" or twin.runner.report()["graphs"][0]["breaks"] == 0


def test_a_constant_written_by_the_forward_is_whole_on_every_replay(where: Where) -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            table = torch.tensor([1.0, 2.0, 3.0], device=x.device)
            table.add_(x[0, 0])
            table[0] = 5.0
            return x[:, :3] * table

    twin = Twin(Writes(), where)
    _runs(twin)
    assert twin.replays == 4


@pytest.mark.parametrize("capture", ["second_use", "first_use"])
def test_a_cached_constant_makes_the_second_call_shorter(where: Where, capture: str) -> None:
    """Handed back by call order, the second line's constant would be the first line's."""

    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cached: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.cached is None:
                self.cached = torch.tensor([1.0, 2.0] * 4, device=x.device)
            scale = torch.tensor([10.0, 20.0] * 4, device=x.device)
            shift = torch.tensor([-3.0, 4.0] * 4, device=x.device)
            return x * self.cached * scale + shift

    twin = Twin(Lazy(), where, capture=capture)
    _runs(twin)
    assert twin.replays >= 4


@pytest.mark.parametrize("capture", ["second_use", "first_use"])
def test_one_line_that_is_skipped_later_does_not_shift_the_others(
    where: Where, capture: str
) -> None:
    class Helper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables: dict[int, Tensor] = {}

        def table(self, x: Tensor, size: int) -> Tensor:
            if size not in self.tables:
                self.tables[size] = torch.tensor([float(size)] * 8, device=x.device)
            return self.tables[size]

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.table(x, 3)
            x = x + torch.tensor([0.5] * 8, device=x.device)
            return x * self.table(x, 5)

    twin = Twin(Helper(), where, capture=capture)
    _runs(twin)
    assert twin.replays >= 4


@pytest.mark.parametrize("capture", ["second_use", "first_use"])
def test_a_constant_of_other_bytes_at_capture_gives_up(graphing: Where, capture: str) -> None:
    class Drifts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.tensor([random.random()] * 8, device=x.device)

    twin_module = Drifts()
    dit_graphs.wrap(twin_module, backend=graphing.backend, capture=capture)
    for index in range(6):
        x = graphing.randn(3, 8, seed=index)
        state = random.getstate()
        result = twin_module(x)
        random.setstate(state)
        # the eager result is the last one that ran with this state; a capture in between must not
        # have drawn from the host's random module before it
        expected = x * torch.tensor([random.random()] * 8, device=x.device)
        assert torch.equal(result, expected)
    stats = runner_of(twin_module).stats
    assert stats.replays == 0
    assert stats.fallbacks[dit_graphs.Reason.CONSTANT_CHANGED] >= 3


def test_another_value_of_module_state_is_another_graph(where: Where) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.tensor([self.scale] * 8, device=x.device)

    twin = Twin(Scaled(), where)
    for scale in (1.0, 0.5, 1.0, 0.5):
        twin.module.scale = twin.plain.scale = scale
        _runs(twin, 5)
    assert twin.captures == 2
    assert twin.replays == 2 * (2 + 5)


def test_a_constant_that_depends_on_an_input_is_a_host_read(segmenting: Where) -> None:
    class Depends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.tensor([float(x.max())] * 8, device=x.device)

    twin = Twin(Depends(), segmenting)
    _runs(twin)
    assert twin.replays == 0
    assert twin.fallbacks.get("host_read", 0) >= 4


_OTHER_SIZES = {
    "a constant": lambda m, x: x * torch.tensor([2.0] * 8, device=x.device),
    "a write to a buffer": lambda m, x: x * m.steps.add_(1.0),
    "a write to the input": lambda m, x: x.mul_(2.0),
    "a break": lambda m, x: eager_on_graph(torch.exp)(x),
}


@pytest.mark.parametrize("kind", _OTHER_SIZES)
def test_another_size_may_need_what_the_first_did_not(segmenting: Where, kind: str) -> None:
    """The first size had nothing to observe, so the second is captured right after its plain step:
    and refused there, it must be observed after all, not left behind or half understood."""

    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] > 3:
                x = _OTHER_SIZES[kind](self, x)
            return x + 1

    where = segmenting
    twin = Twin(Sized(), where)
    for size in (3, 4):
        with dit_graphs.request(total_steps=8):
            for index in range(8):
                twin(where.randn(size, 8, seed=index))
    assert twin.graphs == 2
    assert twin.replays >= 5 + 3
