"""A module of everyday state that somebody may exchange, and the ways to do it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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


def swap(module: Blend) -> None:
    module.act = nn.Sigmoid().eval()  # no flag may give the swap away


def turn(module: Blend) -> None:
    module.options["scale"] = 2.0


def skip(module: Blend) -> None:
    module.skip.add(3)


def table(module: Blend) -> None:
    # row 0 stays: the first compare after the change sees nothing
    module.table = torch.cat([module.table[:1], module.table[1:] + 8.0])


def again(module: Blend) -> None:
    module.first = True


def inputs(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(3, 4, generator=generator), torch.full((3,), index % 2)
