"""Random forwards under random traffic: every call is compared with an untouched copy.

A forward is a list of steps drawn from what real ones do: constants, caches, writes to buffers and
to the input, random numbers, eager breaks, host reads in a submodule, views as results. The calls
change sizes, modes, requests, weights and attributes in between.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where, difference

import dit_graphs
from dit_graphs import break_graph, eager_on_graph

CPU = torch.device("cpu")
WIDTH = 8


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > 0 else x - 1


@eager_on_graph
def _apart(x: Tensor) -> Tensor:
    return x.exp().clamp(max=9.0)


@eager_on_graph
def _same(x: Tensor) -> tuple[Tensor, float]:
    return x, 0.5


@eager_on_graph
def _row(module: nn.Module, x: Tensor) -> Tensor:
    return module.bias[None].expand(x.shape[0], WIDTH)


@eager_on_graph
def _noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def _cached(m: nn.Module, x: Tensor) -> Tensor:
    if x.shape[0] not in m.tables:
        m.tables[x.shape[0]] = torch.tensor([float(i) for i in range(x.shape[0])])[:, None]
    return x + m.tables[x.shape[0]]


def _one_slot(m: nn.Module, x: Tensor) -> Tensor:
    if m.slot != x.shape[0]:
        m.slot, m.table = x.shape[0], torch.linspace(1, 2, x.shape[0])[:, None]
    return x * m.table


def _read(m: nn.Module, x: Tensor) -> Tensor:
    return m.reads(x)


def _in_place(m: nn.Module, x: Tensor) -> Tensor:
    x = x * 1.0
    x[:, ::2] += 1.0
    x[0].mul_(0.5)
    return x


def _ends(m: nn.Module, x: Tensor) -> Tensor:
    break_graph()
    return x


def _counts(m: nn.Module, x: Tensor) -> Tensor:
    m.count += 1
    return x + m.count


STEPS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "linear": lambda m, x: m.linear(x),
    "gelu": lambda m, x: torch.nn.functional.gelu(x),
    "constant": lambda m, x: x * torch.tensor([0.5, 2.0] * 4),
    "list index": lambda m, x: x[:, [3, 1, 0, 2, 7, 6, 5, 4]],
    "scale": lambda m, x: x * m.scale,
    "cached": _cached,
    "one slot": _one_slot,
    "buffer": lambda m, x: x + m.steps.add_(1.0),
    "buffer row": lambda m, x: x + m.rows[1].mul_(0.5).add_(x[0].detach()),
    "random": lambda m, x: x + torch.rand_like(x),
    "generator": lambda m, x: x + torch.rand(x.shape, generator=m.generator),
    "break": lambda m, x: _apart(x),
    "break with a number": lambda m, x: (lambda pair: pair[0] * pair[1])(_same(x)),
    "break to a weight": lambda m, x: x + _row(m, x),
    "break with noise": lambda m, x: _noise(x),
    "break in place": lambda m, x: _apart(x).mul_(0.5),
    "empty break": _ends,
    "read": _read,
    "in place": _in_place,
    "input in place": lambda m, x: x.mul_(0.9),
    "python counter": _counts,
}
RARE = ("python counter", "read", "generator", "buffer", "buffer row", "input in place")
ENDS: dict[str, Callable[[Tensor], object]] = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, None, x[0]),
    "dict": lambda x: {"sample": x[:, 1:5]},
    "expanded": lambda x: x[:1].expand(3, WIDTH),
    "list": lambda x: [x.t(), x.argmax(-1)],
}


class Program(nn.Module):
    def __init__(self, steps: list[str], end: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.reads = Reads()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("rows", torch.zeros(2, WIDTH))
        self.scale = 1.0
        self.count = 0
        self.slot, self.table, self.tables = 0, None, {}
        self.program, self.end = steps, end

    def __deepcopy__(self, memo: dict[int, object]) -> Program:
        other = Program(list(self.program), self.end)
        other.load_state_dict(self.state_dict())
        return other

    @property
    def generator(self) -> torch.Generator:
        return self._generators[0]

    def forward(self, x: Tensor, y: Tensor | None = None) -> object:
        for name in self.program:
            x = STEPS[name](self, x)
        if y is not None:
            x = x * y
        return ENDS[self.end](x)


def _program(chance: Random) -> Program:
    names = [
        chance.choice([n for n in STEPS if n not in RARE]) for _ in range(chance.randint(1, 5))
    ]
    if chance.random() < 0.6:
        names.insert(chance.randint(0, len(names)), chance.choice(RARE))
    if "input in place" in names[1:]:
        names.remove("input in place")
        names.insert(0, "input in place")
    torch.manual_seed(chance.randint(0, 99))
    return Program(names, chance.choice(list(ENDS)))


def _change(chance: Random, twin: Twin) -> None:
    pair = (twin.module, twin.plain)
    match chance.choice(["scale", "write", "swap", "nothing", "nothing", "nothing"]):
        case "scale":
            value = chance.choice([1.0, 0.5, 2.0])
            for module in pair:
                module.scale = value
        case "write":
            for module in pair:
                module.linear.weight.mul_(0.5)
        case "swap":
            for module in pair:
                module.linear.weight.data = module.linear.weight.data.clone() * 1.5


def _traffic(seed: int, backend: str, capture: str) -> Twin:
    chance = Random(seed)
    program = _program(chance)
    twin = Twin(program, Where(backend, CPU), capture=capture, max_graphs=chance.choice([1, 2, 16]))
    for module in (twin.module, twin.plain):
        object.__setattr__(module, "_generators", [torch.Generator().manual_seed(seed)])
    for number in range(chance.randint(3, 6)):
        _change(chance, twin)
        calls = chance.randint(2, 7)
        size = chance.choice([3, 3, 5])
        kept = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(number))
        boundary = dit_graphs.request(total_steps=chance.choice([None, calls]))
        mode = torch.inference_mode() if chance.random() < 0.3 else torch.no_grad()
        with mode:
            if chance.random() < 0.7:
                with boundary:
                    _calls(chance, twin, calls, size, kept)
            else:
                _calls(chance, twin, calls, size, kept)
        states = [module._generators[0].get_state() for module in (twin.module, twin.plain)]
        assert torch.equal(*states), "the explicit generators are apart"
    # a wrong graph would be caught by the compare and run eagerly: here there must be none
    assert not {"verify_mismatch", "eager_nondeterministic"} & set(twin.fallbacks), twin.details
    return twin


def _calls(chance: Random, twin: Twin, calls: int, size: int, kept: Tensor) -> None:
    y = torch.randn(WIDTH, generator=torch.Generator().manual_seed(size))
    given = chance.choice([None, y])
    before: tuple[object, object] | None = None
    for step in range(calls):
        x = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(100 + step))
        same = chance.random() < 0.3 and "input in place" not in twin.module.program
        result = twin(kept if same else x, given)
        if before is not None:
            assert difference(*before) is None, "a later call wrote into an earlier result"
        before = result, copy.deepcopy(result)


@pytest.mark.parametrize("capture", ["second_use", "first_use"])
@pytest.mark.parametrize("backend", ["recorded", "debug"])
@pytest.mark.parametrize("seed", range(25))
def test_a_random_forward_under_random_traffic(seed: int, backend: str, capture: str) -> None:
    with torch.no_grad():
        twin = _traffic(seed, backend, capture)
    assert twin.runner.stats.eager_calls + twin.replays > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 2000))
def test_many_more_random_forwards(seed: int) -> None:
    with torch.no_grad():
        for backend, capture in (("recorded", "second_use"), ("recorded", "first_use")):
            _traffic(seed, backend, capture)


def test_random_traffic_does_reach_the_graphs() -> None:
    with torch.no_grad():
        served = sum(_traffic(seed, "recorded", "second_use").replays for seed in range(10))
    assert served >= 30
