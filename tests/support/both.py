"""An accelerated pipeline of any kind beside a plain one: both get every call, and are compared.

Owns the comparison of what a call returns. Knows nothing of graphs. The surprising fact: the two
are built anew and not copied, and each gets a generator and lists of its own, because pipelines
change what they are given.
"""

from __future__ import annotations

from collections.abc import Callable

import diffusers
import numpy as np
import PIL.Image
import torch
from torch import Tensor

import dit_graphs

__all__ = ["Both", "picture"]

Make = Callable[[], diffusers.DiffusionPipeline]


class Both:
    """Two pipelines that `make` builds; `fast` replays through the CPU recorder."""

    def __init__(self, make: Make, **config: object) -> None:
        self.fast, self.plain = make(), make()
        dit_graphs.accelerate(self.fast, **{"backend": "recorded", **config})

    def __call__(self, seed: int = 0, **options: object) -> Tensor:
        """What the call returns first, which is the plain pipeline's, bit for bit."""
        found = [self._call(pipe, seed, options) for pipe in (self.fast, self.plain)]
        assert torch.isfinite(found[1]).all()
        assert torch.equal(*found)
        return found[0]

    def _call(self, pipe: object, seed: int, options: dict[str, object]) -> Tensor:
        given = {k: list(v) if isinstance(v, list) else v for k, v in options.items()}
        given = {"output_type": "latent", **given}
        generator = torch.Generator().manual_seed(seed)
        made = pipe(**given, generator=generator, return_dict=False)[0]
        return made if isinstance(made, Tensor) else torch.from_numpy(np.asarray(made))

    def change(self, change: Callable[[object], object]) -> None:
        """`change(pipe)` for each of the two."""
        for pipe in (self.plain, self.fast):
            change(pipe)

    def part(self, label: str = "denoiser") -> dict[str, object]:
        """What `stats` says of one component."""
        return dit_graphs.stats(self.fast)["components"][label]

    def check_served(self, replays: int, *labels: str) -> None:
        """At least so many calls of each part were replayed, and only warm-ups were eager."""
        for label in labels or ("denoiser",):
            part = self.part(label)
            assert part["replays"] >= replays, part
            assert set(part["fallbacks"]) <= {"warming_up"}, part["details"]


def picture(seed: int = 0, height: int = 64, width: int = 64) -> PIL.Image.Image:
    """Seeded noise."""
    noise = torch.rand(height, width, 3, generator=torch.Generator().manual_seed(seed))
    return PIL.Image.fromarray((noise * 255).byte().numpy())
