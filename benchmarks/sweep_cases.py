"""What one case of the sweep is: a class, a tiny configuration, inputs of any batch and width.

Owns the form of a case and the drawing of its inputs; the configurations are in sweep_configs.json:
channels and blocks small enough for a CPU. Knows nothing of graphs. The surprising fact:
the same function draws the first and the changed inputs, from two seeds. What it draws anew
(latents, embeddings, timesteps) changes between calls; masks, positions and sizes are built without
drawing, so they stay what they are, because they steer shapes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import diffusers
import torch
from torch import Tensor, nn

from benchmarks.weights import randomise

__all__ = [
    "CONFIGS",
    "Case",
    "Draw",
    "Inputs",
    "Kind",
    "Skipped",
    "Tree",
    "UnknownClass",
    "class_of",
    "made",
]

CONFIGS = Path(__file__).with_name("sweep_configs.json")

Kind = Literal["dit", "unet", "controlnet", "vae"]
Tree = dict[str, object]


class Draw:
    """Seeded values, the same on every device because they are drawn on the CPU."""

    def __init__(self, name: str, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{seed}".encode()))

    def __call__(self, *shape: int) -> Tensor:
        """Normal values."""
        return torch.randn(shape, generator=self._generator)

    def unit(self, *shape: int) -> Tensor:
        """Uniform values between 0.1 and 0.9, as flow-matching timesteps are."""
        return torch.rand(shape, generator=self._generator) * 0.8 + 0.1

    def tokens(self, limit: int, *shape: int) -> Tensor:
        """Whole numbers from zero to `limit` (excluded)."""
        return torch.randint(limit, shape, generator=self._generator)

    def step(self, *shape: int) -> Tensor:
        """Whole timesteps of a thousand, never the first or last ones."""
        return self.tokens(900, *shape) + 50


Inputs = Callable[[Draw, int, int], Tree]


@cache
def _configs() -> dict[str, Tree]:
    configs: dict[str, Tree] = json.loads(CONFIGS.read_text())
    return configs


class UnknownClass(LookupError):
    """The diffusers that is installed is older than this class."""


def class_of(name: str, home: str = "diffusers") -> Callable[..., Any]:
    """A class of diffusers. Raises `UnknownClass` where this one has it not."""
    try:
        found: Callable[..., Any] = getattr(import_module(home), name)
    except (AttributeError, ImportError):
        raise UnknownClass(f"diffusers {diffusers.__version__} has no {name}") from None
    return found


def made(key: str) -> nn.Module:
    """A new model of sweep_configs.json; `key` is a class, or `class#variant`."""
    module = class_of(key.partition("#")[0])(**_configs()[key])
    assert isinstance(module, nn.Module)
    return module


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One method of one class. `inputs(draw, batch, width)` are its arguments.

    `width` is 1 or 2 and multiplies one side of the picture; `widths` and `batches` are those the
    class can do. `make`: where the model is not simply its entry in sweep_configs.json. `why_weak`:
    inputs that cannot change more than half of the output, by path, with the reason.
    """

    kind: Kind
    name: str
    inputs: Inputs
    method: str = "forward"
    make: Callable[[], nn.Module] | None = None
    variant: str = ""
    widths: tuple[int, ...] = (1, 2)
    batches: tuple[int, ...] = (1, 2)
    why_weak: dict[str, str] | None = None

    @property
    def key(self) -> str:
        """The case's name in result files: class, variant and, for a VAE, the method."""
        return self._model if self.method == "forward" else f"{self._model}.{self.method}"

    @property
    def _model(self) -> str:
        return f"{self.name}#{self.variant}" if self.variant else self.name

    def build(self) -> nn.Module:
        """The model in eval mode on the CPU, every weight seeded and none of them zero."""
        module = (self.make() if self.make is not None else made(self._model)).eval()
        randomise(module)
        return module

    def draw(self, seed: int, batch: int, width: int) -> Tree:
        """The arguments of one call."""
        return self.inputs(Draw(self.key, seed), batch, width)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A class the sweep cannot run, and why."""

    kind: Kind
    name: str
    why: str
