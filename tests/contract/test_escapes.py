"""Tensors that a forward leaves with somebody else than its module: a list, a closure, a global.

After a replay they would be yesterday's, and after a capture memory of the graph's pool.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where

import dit_graphs
from dit_graphs import eager_on_graph
from dit_graphs.escapes import Escapes

CAPTURES = ["second_use", "first_use"]


class Leaves(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.linear(x)).sin()


def _values(held: list[Tensor]) -> list[list[float]]:
    return [tensor.cpu().flatten().tolist() for tensor in held]


def _kept(kept: list[Tensor], tensor: Tensor) -> Tensor:
    kept.append(tensor)
    return tensor


BODIES: dict[str, Callable[[list[Tensor], Tensor], Tensor]] = {
    "an activation": lambda kept, h: _kept(kept, h) * 2,
    "a view of one": lambda kept, h: h + _kept(kept, h[:1]),
    "a result written in place": lambda kept, h: _kept(kept, h.clone().mul_(3.0)) + 1,
}


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_tensor_left_with_a_list_keeps_the_module_eager(
    where: Where, body: Callable[[list[Tensor], Tensor], Tensor], capture: str
) -> None:
    kept: list[Tensor] = []
    twin = Twin(Leaves(lambda h: body(kept, h)), where, capture=capture)
    for seed in range(7):
        twin(where.randn(3, 8, seed=seed))
    mine, plain = kept[::2], kept[1::2]
    assert len(mine) == 7 and _values(mine) == _values(plain)
    assert len({str(values) for values in _values(mine)}) == 7
    assert twin.replays == 0
    assert "is still held after the forward" in twin.details["state_escaped"]


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "a view of it": lambda x: x[:1],
    "its data": lambda x: x.data,
}


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_an_argument_left_with_a_list_keeps_the_module_eager(
    where: Where, part: Callable[[Tensor], Tensor], capture: str
) -> None:
    """It would be a graph's input buffer, which the next call writes."""

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            _kept(kept, part(x))
            return x.sin()

    kept: list[Tensor] = []
    twin = Twin(Keeps(), where, capture=capture)
    given = [where.randn(3, 8, seed=seed) for seed in range(7)]
    for x in given:
        twin(x)
    mine, plain = kept[::2], kept[1::2]
    # what the passes were given, up to the one that found it out, were buffers: they hold still
    assert len(mine) == 7 and _values(mine) == _values(plain)
    assert twin.replays == 0 and "state_escaped" in twin.fallbacks


def test_the_same_tensor_given_twice_is_one_tensor_to_a_pass(where: Where) -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x * 2 if x is y else x * y

    twin = Twin(Asks(), where)
    for seed in range(6):
        x = where.randn(3, 8, seed=seed)
        result = twin.module(x, x)  # the copy would be given two: deepcopy is of each
        assert torch.equal(result, x * 2)
    assert twin.replays >= 3


def test_a_returned_tensor_that_is_also_kept_has_escaped(where: Where) -> None:
    class Returns(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return _kept(kept, x.sin())

    kept: list[Tensor] = []
    twin = Twin(Returns(), where)
    for seed in range(6):
        twin(where.randn(3, 8, seed=seed))
    assert len(kept) == 12 and _values(kept[::2]) == _values(kept[1::2])
    assert "state_escaped" in twin.fallbacks


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_cache_elsewhere_that_fills_once_is_no_escape(where: Where, capture: str) -> None:
    tables: dict[torch.device, Tensor] = {}

    def body(h: Tensor) -> Tensor:
        if h.device not in tables:
            tables[h.device] = torch.arange(8.0, device=h.device).cos()
        return h * tables[h.device]

    twin = Twin(Leaves(body), where, capture=capture)
    for seed in range(6):
        twin(where.randn(3, 8, seed=seed))
    assert twin.replays >= 2
    assert not {*twin.fallbacks} - {"warming_up"}


def test_a_size_captured_without_a_pass_is_held_to_it_too(where: Where) -> None:
    if where.backend == "debug":
        pytest.skip("runs the forward's Python on every replay")
    kept: list[Tensor] = []

    def body(h: Tensor) -> Tensor:
        return _kept(kept, h * 2) if h.shape[0] == 5 else h * 2

    twin = Twin(Leaves(body), where)
    for rows in (3, 5):
        for request in range(2):
            with dit_graphs.request(8):
                for step in range(8):
                    twin(where.randn(rows, 8, seed=10 * request + step))
    assert twin.replays >= 8  # of the other size
    assert "state_escaped" in twin.fallbacks
    mine, plain = kept[-2:]
    assert torch.equal(mine, plain)


class Reads(nn.Module):
    """Reads on the host, which makes it an eager break."""

    def forward(self, h: Tensor) -> Tensor:
        return h * 2 if h.sum().item() > -1e9 else h


@eager_on_graph
def _doubled(h: Tensor) -> Tensor:
    return h * 2


def _attended(h: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(h, h, h)


@torch.library.custom_op("dit_graphs_escapes::varlen_double", mutates_args=())
def _varlen(h: Tensor) -> Tensor:
    return h * 2


BREAKS: dict[str, Callable[[Tensor], Tensor]] = {
    "a function": _doubled,
    "a module": Reads(),
    "attention": _attended,
    "an op known by name": _varlen,
}


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("body", BREAKS.values(), ids=BREAKS)
def test_the_result_of_a_break_left_with_a_list_keeps_the_module_eager(
    where: Where, body: Callable[[Tensor], Tensor], capture: str
) -> None:
    """On a replay the list would get none, and what a capture leaves is a buffer of the graph's."""
    kept: list[Tensor] = []
    twin = Twin(Leaves(lambda h: h), where, capture=capture, attention="eager")
    for module in (twin.module, twin.plain):
        module.part = body if isinstance(body, nn.Module) else None
        module.body = lambda h: _kept(kept, body(h)) + 1
    for seed in range(8):
        twin(where.randn(3, 8, seed=seed))
    assert len(kept) == 16 and _values(kept[::2]) == _values(kept[1::2])
    assert twin.replays == 0
    assert not {*twin.fallbacks} - {"warming_up", "state_escaped", "host_read"}


def test_what_a_break_leaves_is_its_own_business(where: Where) -> None:
    if where.backend == "full":
        pytest.skip("no breaks there")
    kept: list[Tensor] = []

    @eager_on_graph
    def keeps(h: Tensor) -> Tensor:
        return _kept(kept, h * 2)

    twin = Twin(Leaves(keeps), where)
    for seed in range(7):
        twin(where.randn(3, 8, seed=seed))
    assert twin.replays >= 3
    mine, plain = kept[-2:]
    assert torch.equal(mine, plain)


def test_an_object_that_a_break_is_given_belongs_to_the_recording(where: Where) -> None:
    """As a BlockMask is: nobody else holds its tensors, and every replay writes them anew."""
    if where.backend == "full":
        pytest.skip("no breaks there")

    class Plan:
        def __init__(self, rows: Tensor) -> None:
            self.rows = rows

    @eager_on_graph
    def scaled(h: Tensor, plan: Plan) -> Tensor:
        return h * plan.rows

    twin = Twin(Leaves(lambda h: scaled(h, Plan(h[0].cos()))), where)
    for seed in range(6):
        twin(where.randn(3, 8, seed=seed))
    assert twin.replays >= 2
    assert not {*twin.fallbacks} - {"warming_up"}


def test_a_cycle_that_nobody_holds_is_no_escape(where: Where) -> None:
    def body(h: Tensor) -> Tensor:
        cycle: list[object] = [h * 2]
        cycle.append(cycle)
        first = cycle[0]
        assert isinstance(first, Tensor)
        return first

    twin = Twin(Leaves(body), where)
    for seed in range(6):
        twin(where.randn(3, 8, seed=seed))
    assert twin.replays >= 2
    assert not {*twin.fallbacks} - {"warming_up"}


def test_a_pass_leaves_no_cycles_to_the_collector(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would keep activations alive, and cost a run of the collector at every look."""
    found: list[bool] = []
    look = Escapes.has_left
    monkeypatch.setattr(Escapes, "has_left", lambda self: found.append(look(self)) or found[-1])
    twin = Twin(Leaves(lambda h: h * 2), where)
    gc.disable()
    try:
        for seed in range(4):
            twin(where.randn(3, 8, seed=seed))
    finally:
        gc.enable()
    assert found and not any(found)
