"""What a forward reads of its module in places that are neither attribute nor registered layer."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from types import MappingProxyType, MethodType, SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from twin import difference

import dit_graphs
from dit_graphs.wrapping import runner_of

Change = Callable[["Scaled"], object]


class Slots:
    __slots__ = ("more", "scale")

    def __init__(self, scale: object = 1.0) -> None:
        self.scale = scale
        self.more = [1.0]


class Plain:
    def __init__(self, scale: object = 1.0) -> None:
        self.scale = scale

    def get(self) -> object:
        return self.scale


class Titled(dict):  # type: ignore[type-arg]
    """A dict that has attributes, as configurations do."""


class Guarded:
    """An object that raises where it is asked for what it has not."""

    def __init__(self) -> None:
        self.__dict__["kept"] = {"scale": 1.0}

    def __getattr__(self, name: str) -> object:
        return self.__dict__["kept"][name]


class Added(nn.Module):
    """An adapter that stands in for a layer's forward and is registered nowhere."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = [layer]
        self.before, self.scale = layer.forward, 1.0
        self.down = nn.Linear(4, 4, bias=False)
        nn.init.constant_(self.down.weight, 0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.before(x) + self.down(x) * self.scale


class Scaled(nn.Module):
    options: ClassVar[dict[str, float]] = {"scale": 1.0}
    scales = (1.0, 2.0)
    table = torch.ones(2)

    def __init__(self, held: object, get: Callable[[Scaled], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.held, self.get = [held], get

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.get(self)


def _titled() -> Titled:
    titled = Titled(a=1)
    titled.scale = 1.0
    return titled


def _constant(value: float) -> nn.Linear:
    layer = nn.Linear(4, 4)
    nn.init.constant_(layer.weight, value)
    nn.init.constant_(layer.bias, value)
    return layer


def _get(scale: float) -> float:
    return scale


def _in_held(name: str, value: object = 2.0) -> Change:
    return lambda module: setattr(module.held[0], name, value)


def _item(key: object) -> Change:
    return lambda module: module.held[0].__setitem__(key, 2.0)


ONES = torch.ones(4)
PLACES: dict[str, tuple[Callable[[], object], Callable[[Scaled], object], Change]] = {
    "a slot": (Slots, lambda m: m.held[0].scale, _in_held("scale")),
    "a list in a slot": (
        Slots, lambda m: m.held[0].more[0], lambda m: m.held[0].more.__setitem__(0, 2.0),
    ),
    "a tensor in a slot": (
        lambda: Slots(torch.ones(4)), lambda m: m.held[0].scale, _in_held("scale", torch.zeros(4)),
    ),
    "a slot below an object": (
        lambda: Plain(Slots()), lambda m: m.held[0].scale.scale,
        lambda m: setattr(m.held[0].scale, "scale", 2.0),
    ),
    "a deque": (lambda: deque([1.0]), lambda m: m.held[0][0], _item(0)),
    "a deque of objects": (
        lambda: deque([Plain()]), lambda m: m.held[0][0].scale,
        lambda m: setattr(m.held[0][0], "scale", 2.0),
    ),
    "an object in a set": (
        lambda: {Plain()}, lambda m: next(iter(m.held[0])).scale,
        lambda m: setattr(next(iter(m.held[0])), "scale", 2.0),
    ),
    "an array": (lambda: np.ones(2), lambda m: float(m.held[0][0]), _item(0)),
    "bytes": (
        lambda: bytearray(b"a"), lambda m: m.held[0][0], lambda m: m.held[0].__setitem__(0, 2),
    ),
    "a key's name": (
        lambda: SimpleNamespace(scale=2.0), lambda m: getattr(m.held[0], "scale", 1.0),
        lambda m: vars(m.held[0]).update(other=vars(m.held[0]).pop("scale")),
    ),
    "a dict behind a view": (
        lambda: MappingProxyType({"a": [1.0]}), lambda m: m.held[0]["a"][0],
        lambda m: m.held[0]["a"].__setitem__(0, 2.0),
    ),
    "a dict of a class of its own": (
        lambda: UserDict(a=1.0), lambda m: m.held[0]["a"], lambda m: m.held[0].update(a=2.0),
    ),
    "an attribute of a dict": (_titled, lambda m: m.held[0].scale, _in_held("scale")),
    "a partial's keyword": (
        lambda: functools.partial(_get, scale=1.0), lambda m: m.held[0](),
        lambda m: m.held[0].keywords.update(scale=2.0),
    ),
    "a partial's object": (
        lambda: functools.partial(Plain.get, Plain()), lambda m: m.held[0](),
        lambda m: setattr(m.held[0].args[0], "scale", 2.0),
    ),
    "a method's object": (
        lambda: Plain().get, lambda m: m.held[0](),
        lambda m: setattr(m.held[0].__self__, "scale", 2.0),
    ),
    "an object's class": (
        Plain, lambda m: m.held[0].get(),
        lambda m: setattr(m.held[0], "__class__", type("Two", (Plain,), {"get": lambda _: 2.0})),
    ),
    "an object's dict": (Plain, lambda m: m.held[0].scale, _in_held("__dict__", {"scale": 2.0})),
    "a guarded object": (
        Guarded, lambda m: m.held[0].scale, lambda m: m.held[0].kept.update(scale=2.0),
    ),
    "a thousand numbers": (lambda: [1.0] * 1000, lambda m: m.held[0][700], _item(700)),
    "a layer in a list": (
        lambda: _constant(0.5), lambda m: m.held[0](ONES),
        lambda m: m.held.__setitem__(0, _constant(0.25)),
    ),
    "a weight of a layer in a list": (
        lambda: _constant(0.5), lambda m: m.held[0](ONES),
        lambda m: setattr(m.held[0], "weight", nn.Parameter(torch.ones(4, 4))),
    ),
    "a number of a layer in a list": (
        lambda: _constant(0.5), lambda m: m.held[0](ONES) * getattr(m.held[0], "scale", 1.0),
        _in_held("scale"),
    ),
    "a hook of a layer in a list": (
        lambda: _constant(0.5), lambda m: m.held[0](ONES),
        lambda m: m.held[0]._forward_hooks.update({-1: lambda *given: given[-1] * 2}),
    ),
    "a dict of the class": (
        int, lambda m: m.options["scale"], lambda m: type(m).options.update(scale=2.0),
    ),
    "a tuple of the class": (
        int, lambda m: m.scales[0], lambda m: setattr(type(m), "scales", (2.0, 1.0)),
    ),
    "one layer at two places": (int, lambda m: 1.0, lambda m: m.layers.append(m.layers[0])),
    "one layer for another": (
        int, lambda m: 1.0, lambda m: m.layers._modules.update({"2": m.layers[0]}),
    ),
    "a layer's second place": (
        int, lambda m: 1.0,
        lambda m: m.layers._modules.update({"2": m.layers._modules.pop("2")}),
    ),
    "a dict of attributes": (
        int, lambda m: getattr(m.layers[1], "scale", 1.0),
        lambda m: setattr(m.layers[1], "__dict__", {**vars(m.layers[1]), "scale": 2.0}),
    ),
    "a table of layers": (
        int, lambda m: 1.0,
        lambda m: setattr(m.layers, "_modules", OrderedDict(list(m.layers._modules.items())[:2])),
    ),
    "a table of weights": (
        int, lambda m: 1.0,
        lambda m: setattr(m.layers[0], "_parameters", _constant(0.5)._parameters),
    ),
    "a table of hooks": (
        int, lambda m: 1.0,
        lambda m: setattr(m.layers[0], "_forward_hooks", OrderedDict({-1: lambda *g: g[-1] * 2})),
    ),
    "a patched method": (
        int, lambda m: m.layers[1].scale(),
        lambda m: setattr(m.layers[1], "scale", MethodType(lambda _: 2.0, m)),
    ),
}  # fmt: skip
BETWEEN_REQUESTS = (
    "an object's dict",
    "a dict of the class",
    "a tuple of the class",
    "a dict of attributes",
    "a table of layers",
    "a table of weights",
    "a table of hooks",
)


def _two(name: str) -> list[Scaled]:
    make, get, _ = PLACES[name]
    kinds = [type("Scaled", (Scaled,), {"options": {"scale": 1.0}}) for _ in range(2)]
    both = [kind(make(), get).eval() for kind in kinds]
    for module in both:
        module.layers[1].__dict__.setdefault("scale", MethodType(lambda _: 1.0, module))
        if name == "a layer's second place":  # Tanh, Linear, Tanh; then Tanh, Tanh, Linear
            tanh, linear = module.layers[1], module.layers[0]
            module.layers._modules = {"1": tanh, "2": linear, "3": tanh}
        if name == "a dict of attributes":
            module.layers[1].scale = 1.0
    return both


def _same(fast: nn.Module, plain: nn.Module) -> int:
    """Six calls of both are alike; how many of them were replays."""
    runner = runner_of(fast)
    assert runner is not None
    before = runner.stats.replays
    with torch.no_grad():
        for seed in range(6):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
            assert difference(fast(x), plain(x)) is None
    return runner.stats.replays - before


@pytest.mark.parametrize("name", PLACES)
def test_a_change_in_a_hidden_place_is_seen_by_the_next_call(name: str) -> None:
    fast, plain = _two(name)
    dit_graphs.wrap(fast, backend="recorded")
    assert _same(fast, plain)
    for module in (fast, plain):
        PLACES[name][2](module)
    _same(fast, plain)


@pytest.mark.parametrize("name", [name for name in PLACES if name not in BETWEEN_REQUESTS])
def test_a_change_in_a_hidden_place_is_seen_inside_a_request(name: str) -> None:
    fast, plain = _two(name)
    dit_graphs.wrap(fast, backend="recorded")
    with dit_graphs.request():
        assert _same(fast, plain)
        for module in (fast, plain):
            PLACES[name][2](module)
        _same(fast, plain)


def test_a_tensor_of_a_class_is_exchanged() -> None:
    """Tensors that differ have no truth value, and nobody asks for one."""
    fast, plain = _two("a slot")
    dit_graphs.wrap(fast, backend="recorded")
    assert _same(fast, plain)
    for module in (fast, plain):
        type(module).table = torch.zeros(2)
    assert _same(fast, plain)


def test_an_adapter_that_stands_in_for_a_forward_is_part_of_the_module() -> None:
    """As LoRA trainers do: its strength and its weights are turned on itself; then it goes."""
    both = _two("a slot")
    adapters = [Added(module.layers[0]) for module in both]
    for module, adapter in zip(both, adapters, strict=True):
        module.layers[0].forward = adapter.forward
    dit_graphs.wrap(both[0], backend="recorded")
    changes: list[Callable[[Added], object]] = [
        lambda adapter: setattr(adapter, "scale", 0.5),
        lambda adapter: setattr(adapter.down, "weight", nn.Parameter(torch.ones(4, 4))),
        lambda adapter: adapter.down.weight.data.fill_(0.125),
        lambda adapter: adapter.layer[0].__dict__.pop("forward"),
    ]
    assert _same(*both)
    with dit_graphs.request():
        for change in changes:
            for adapter in adapters:
                change(adapter)
            assert _same(*both)


def test_an_adapter_that_is_taken_away_is_freed_by_the_next_call() -> None:
    module = _two("a slot")[0]
    dit_graphs.wrap(module, backend="recorded")
    adapter = Added(module.layers[0])
    gone = weakref.ref(adapter.down)
    module.layers[0].forward = adapter.forward
    with torch.no_grad():
        for _ in range(6):
            module(torch.ones(2, 4))
        del module.layers[0].forward, adapter
        module(torch.ones(2, 4))
    gc.collect()
    assert gone() is None
