"""The quick look sees whatever the sweep sees, and keeps quiet where the sweep finds nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import dit_graphs
from dit_graphs.backends.recorded import RecordedRecording
from dit_graphs.glance import Glance
from dit_graphs.module_state import sweep, weight_keys
from dit_graphs.wrapping import runner_of


@dataclass(slots=True)
class Slotted:
    rate: float = 0.5
    more: list[int] = field(default_factory=lambda: [1, 2])


class Scale:
    unit = 2.0

    def __init__(self) -> None:
        self.scale = 1.0
        self.below = SimpleNamespace(numbers=[1, [2, [3, [4]]]], table=torch.ones(3))


def beside(x: Tensor) -> Tensor:
    return x


class Layer(nn.Module):
    factor = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = nn.Tanh()
        self.register_buffer("table", torch.ones(2, 2))
        self.register_buffer("nothing", None)
        self.number, self.flag, self.name, self.zero = 1, True, "a", 0.0
        self.shape = (1, 2)
        self.names = {"x", "y"}
        self.options = {"scale": 1.0, "list": [1, 2, {"deep": (3, [4])}], "fn": torch.relu}
        self.processor = Scale()
        self.record = Slotted()
        self.cached = torch.arange(4.0)
        self.caches = [torch.ones(2), torch.zeros(2)]
        self.by_size = {4: torch.ones(4)}

    def forward(self, x: Tensor) -> Tensor:
        return beside(self.act(self.linear(x))) * self.number


def _set(path: str, value: object) -> Callable[[Layer], None]:
    *owners, last = path.split(".")

    def change(layer: Layer) -> None:
        owner: object = layer
        for name in owners:
            owner = owner[int(name)] if name.isdigit() else getattr(owner, name)  # type: ignore[index]
        setattr(owner, last, value)

    return change


def _layout(layer: Layer) -> None:
    layer.linear.weight.data = layer.linear.weight.data.t()


def _other_class(layer: Layer) -> None:
    layer.act.__class__ = nn.Sigmoid


CHANGES: dict[str, Callable[[Layer], object]] = {
    "a number": _set("number", 2),
    "a bool for a number": _set("number", True),
    "a negative zero": _set("zero", -0.0),
    "a number for a bool": _set("flag", 1),
    "a string": _set("name", "b"),
    "a tuple": _set("shape", (1, 3)),
    "a new attribute": _set("fresh", 1),
    "one attribute less": lambda layer: delattr(layer, "name"),
    "one goes, one comes": lambda layer: (delattr(layer, "name"), setattr(layer, "other", "a")),
    "train()": lambda layer: layer.act.train(),
    "a set": lambda layer: layer.names.add("z"),
    "a dict's value": lambda layer: layer.options.update(scale=2.0),
    "a dict's function": lambda layer: layer.options.update(fn=torch.tanh),
    "a dict's new key": lambda layer: layer.options.update(more=2.0),
    "a list in a dict": lambda layer: layer.options["list"].append(3),
    "a list four levels down": lambda layer: layer.options["list"][2]["deep"][1].append(5),
    "an object's number": _set("processor.scale", 2.0),
    "an object below an object": _set("processor.below.numbers", [2]),
    "lists in lists of an object": lambda layer: layer.processor.below.numbers[1][1][1].append(5),
    "an object's tensor": _set("processor.below.table", torch.zeros(3)),
    "another object": lambda layer: setattr(layer, "processor", Scale()),
    "a record's number": _set("record.rate", 0.25),
    "a record's list": lambda layer: layer.record.more.append(3),
    "a tensor": _set("cached", torch.zeros(4)),
    "a tensor in a list": lambda layer: layer.caches.__setitem__(1, torch.ones(2)),
    "one tensor more": lambda layer: layer.caches.append(torch.ones(2)),
    "the last tensor less": lambda layer: layer.caches.pop(),
    "a tensor in a dict": lambda layer: layer.by_size.update({8: torch.ones(8)}),
    "a weight": lambda layer: setattr(layer.linear, "weight", nn.Parameter(torch.ones(4, 4))),
    "a weight's data": lambda layer: setattr(layer.linear.weight, "data", torch.ones(4, 4)),
    "a weight's layout": _layout,
    "a weight's type": lambda layer: layer.linear.half(),
    "no bias": lambda layer: setattr(layer.linear, "bias", None),
    "a buffer": lambda layer: setattr(layer, "nothing", torch.ones(1)),
    "a new buffer": lambda layer: layer.act.register_buffer("fresh", torch.ones(1)),
    "another layer": lambda layer: setattr(layer, "act", nn.Tanh()),
    "another class": _other_class,
    "a new layer": lambda layer: layer.linear.add_module("more", nn.Tanh()),
    "a layer less": lambda layer: layer._modules.pop("act"),
    "a layer's name": lambda layer: layer._modules.update(act2=layer._modules.pop("act")),
    "an assigned state": lambda layer: layer.load_state_dict(
        {name: weight.clone() for name, weight in layer.state_dict().items()}, assign=True
    ),
    "a patched forward": _set("forward", lambda x: x),
    "a hook": lambda layer: layer.act.register_forward_hook(lambda *_: None),
    "a first hook": lambda layer: layer.act.register_forward_pre_hook(lambda *_: None),
}
OF_A_CLASS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a number": lambda patch: patch.setattr(Layer, "factor", 2.0),
    "a parent's number": lambda patch: patch.setattr(Scale, "unit", 1.0),
    "a method": lambda patch: patch.setattr(nn.Linear, "forward", lambda self, x: x),
    "a new method": lambda patch: patch.setattr(Layer, "__call__", lambda self, x: x, False),
    "a function beside it": lambda patch: patch.setitem(globals(), "beside", lambda x: x * 2),
}


def _layer() -> nn.Sequential:
    layer = nn.Sequential(Layer(), nn.Tanh()).eval()
    layer(torch.ones(1, 4))
    return layer


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    layer = _layer()
    glance, before = Glance(layer), sweep(layer)
    layer(torch.ones(1, 4))
    assert glance.is_same() and glance.is_exactly_same() and sweep(layer) == before
    CHANGES[name](layer[0])
    assert sweep(layer) != before, "no change at all"
    assert not glance.is_exactly_same()
    if name not in ("a weight's layout", "another class", "a layer's name"):
        assert not glance.is_same()


@pytest.mark.parametrize("name", OF_A_CLASS)
def test_a_change_of_a_class_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _layer()
    glance, before = Glance(layer), sweep(layer)
    assert glance.is_exactly_same()
    OF_A_CLASS[name](monkeypatch)
    assert sweep(layer) != before, "no change at all"
    assert not glance.is_exactly_same()


def test_a_write_to_a_tensor_of_the_host_is_seen() -> None:
    """Beside weights on a device its values are baked."""
    layer = _layer()
    glance = Glance(layer)
    layer[0].cached.add_(1)
    assert not glance.is_same()


def test_equal_values_made_anew_are_no_change() -> None:
    layer = _layer()
    glance = Glance(layer)
    for _ in range(2):
        layer[0].zero, layer[0].name = float("0.0"), "".join(["a", ""])
        layer[0].shape = tuple(map(int, "12"))
        layer[0].options["scale"] = float("1.0")
        layer[0].act.train().eval()
        assert glance.is_same()
    layer[0].zero = 1.0
    assert not glance.is_same()


def test_what_changes_by_itself_is_left_out() -> None:
    layer = _layer()
    volatile = frozenset({"0.number", "0.options"})
    glance, before = Glance(layer, volatile), sweep(layer, volatile)
    layer[0].number, layer[0].options = 7, {}
    assert glance.is_exactly_same() and sweep(layer, volatile) == before
    layer[0].name = "b"
    assert not glance.is_same()


def test_what_changes_by_itself_below_an_object_is_left_out() -> None:
    layer = _layer()
    volatile = frozenset({"0.processor.scale", "0.options['scale']", "0.caches[0]"})
    glance = Glance(layer, volatile)
    layer[0].processor.scale, layer[0].options["scale"] = 5.0, 7.0
    layer[0].caches[0] = torch.ones(2)
    assert glance.is_exactly_same()
    layer[0].caches.append(torch.ones(2))
    assert not glance.is_same()
    layer[0].caches.pop()
    assert glance.is_same()
    layer[0].options["fn"] = torch.tanh
    assert not glance.is_same()


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_scripted_layer_is_never_taken_for_unchanged(
    monkeypatch: pytest.MonkeyPatch, is_traced: bool
) -> None:
    """Its tables lie below Python; the sweep reads them, a look does not. So it comes first, and no
    replay is launched to be given up.
    """
    launches = []
    replay = RecordedRecording.replay
    monkeypatch.setattr(
        RecordedRecording, "replay", lambda self: launches.append(1) or replay(self)
    )
    layer = nn.Linear(4, 4)
    hidden = torch.jit.trace(layer, torch.zeros(2, 4)) if is_traced else torch.jit.script(layer)
    module = nn.Sequential(hidden, nn.Tanh()).eval()
    assert not Glance(module).is_same()
    plain = copy.deepcopy(module)
    dit_graphs.wrap(module, backend="recorded")
    with torch.no_grad():
        for index in range(12):
            x = torch.full((2, 4), float(index))
            with dit_graphs.request(total_steps=2):
                assert torch.equal(module(x), plain(x)) and torch.equal(module(-x), plain(-x))
    runner = runner_of(module)
    assert runner is not None and runner.stats.replays > 0
    assert len(launches) == runner.stats.replays + runner.stats.compares


def _plain_places(holder: dict[str, object]) -> Iterator[tuple[dict[str, object], str]]:
    for name, value in holder.items():
        if isinstance(value, (bool, int, float, str)) and not name.startswith("_"):
            yield holder, name
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict) and not isinstance(value, (nn.Module, type, dict)):
            yield from ((own, key) for key, item in own.items() if isinstance(item, (int, float)))


@pytest.mark.parametrize("name", ["flux", "sdxl", "wan", "z-image"])
def test_every_number_and_string_of_a_model_is_looked_at(name: str) -> None:
    pipe = tiny.build(name)
    module = getattr(pipe, "transformer", None) or pipe.unet
    glance, seen = Glance(module), 0
    for child in module.modules():
        for holder, key in list(_plain_places(vars(child))):
            before = holder[key]
            holder[key] = not before if isinstance(before, bool) else before * 2 or 1
            assert not glance.is_same(), (type(child), key)
            holder[key] = before
            seen += 1
    assert seen > 100 and glance.is_exactly_same()


def test_a_look_asks_no_function_mode() -> None:
    """Under `torch.set_default_device` each question would take ten times as long."""

    class Counting(TorchFunctionMode):
        asked = 0

        def __torch_function__(self, func: Callable, types: object, args=(), kwargs=None) -> object:
            Counting.asked += 1
            return func(*args, **(kwargs or {}))

    layer = _layer()
    with Counting():
        glance, before = Glance(layer), sweep(layer)
        assert glance.is_same() and glance.is_exactly_same() and sweep(layer) == before
        assert weight_keys(layer) == before.weights
    assert not Counting.asked
