"""Changes of a module that no argument and no weight shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import dit_graphs
from dit_graphs.module_state import sweep
from dit_graphs.wrapping import runner_of


class Blend(nn.Module):
    """Reads a little of everything that can change under a graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.act: nn.Module = nn.Tanh()
        self.first = False
        self.options = {"scale": 1.0, "fn": torch.relu}
        self.skip = {1}
        self.table = torch.arange(8.0).view(2, 4)

    def forward(self, x: Tensor, row: Tensor) -> Tensor:
        y = self.options["fn"](self.act(self.linear(x))) * self.options["scale"]
        y = y + self.table[row]
        if self.first:
            self.first = False
            return y * 2
        return y * 3 if 3 in self.skip else y


def _swap(module: Blend) -> None:
    module.act = nn.Sigmoid().eval()  # no flag may give the swap away


def _turn(module: Blend) -> None:
    module.options["scale"] = 2.0


def _skip(module: Blend) -> None:
    module.skip.add(3)


def _table(module: Blend) -> None:
    # row 0 stays: the first compare after the change sees nothing
    module.table = torch.cat([module.table[:1], module.table[1:] + 8.0])


def _again(module: Blend) -> None:
    module.first = True


def _inputs(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(3, 4, generator=generator), torch.full((3,), index % 2)


@pytest.mark.parametrize("change", [_swap, _turn, _skip, _table, _again])
def test_the_next_request_sees_it(change: Callable[[Blend], None]) -> None:
    """A weightless submodule, a value in a mixed dict, a set, a table, a one-shot flag."""
    module, plain = Blend().eval(), Blend().eval()
    dit_graphs.wrap(module, backend="recorded")
    with torch.no_grad():
        for image in range(3):
            if image:
                change(module)
                change(plain)
            with dit_graphs.request(total_steps=6):
                for step in range(6):
                    x, row = _inputs(10 * image + step)
                    assert torch.equal(module(x, row), plain(x, row)), (image, step)
    assert runner_of(module).stats.replays > 0


def test_an_interrupted_compare_proves_nothing() -> None:
    """Ctrl-C in eager's half of a compare leaves the new value in the buffer, unproven."""

    class Baked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.stop = False

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            if self.stop:
                raise KeyboardInterrupt
            return x * self.weight * scale.detach().clone()

    module = Baked().eval()
    dit_graphs.wrap(module, backend="recorded")
    one, two = torch.ones(1), torch.full((1,), 2.0)
    with torch.no_grad(), dit_graphs.request(total_steps=12):
        for index in range(6):
            module(_inputs(index)[0], one)
        runner = runner_of(module)
        compares = runner.stats.compares
        module.__dict__["stop"] = True
        with pytest.raises(KeyboardInterrupt):
            module(_inputs(7)[0], two)
        module.__dict__["stop"] = False
        x = _inputs(8)[0]
        assert torch.equal(module(x, two), x * two)
        assert runner.stats.compares == compares + 2  # tried, and tried again


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_value_some_objects_below_the_module_is_seen(depth: int) -> None:
    """`attn.processor.options.limits.scale`: plain state, if one looks far enough."""

    class Below:
        scale = 1.0
        inner: Below | None = None

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below = lowest = Below()
            for _ in range(depth):
                lowest.inner = lowest = Below()
            self.lowest = (lambda: lowest,)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.lowest[0]().scale

    module = Scales()
    dit_graphs.wrap(module, backend="recorded")
    for image in range(3):
        module.lowest[0]().scale = 1.0 + image
        with torch.no_grad(), dit_graphs.request(total_steps=6):
            for step in range(6):
                x = _inputs(10 * image + step)[0]
                assert torch.equal(module(x), x * (1.0 + image))
    assert runner_of(module).stats.replays >= 6


def test_a_config_that_every_layer_holds_is_read_once_per_look() -> None:
    """All layers of a language model hold its one config, which has more values than they have."""
    reads: list[str] = []

    @dataclass
    class Config:
        scale: float = 1.0

        def __getattribute__(self, name: str) -> object:
            if name == "scale":
                reads.append(name)
            return super().__getattribute__(name)

    model, config = nn.ModuleList(nn.Linear(2, 2) for _ in range(9)), Config()
    for layer in model:
        layer.config = config
    before = sweep(model)
    assert len(reads) == 1
    model[4].config = Config()
    assert sweep(model).python == before.python  # another config of equal values
    config.scale = 2.0
    changed = sweep(model).changed_attributes(before)
    assert changed == {f"{number}.config" for number in range(9) if number != 4}
