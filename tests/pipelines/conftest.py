"""One accelerated and one plain tiny pipeline per family, shared by the tests of a file."""

from __future__ import annotations

from functools import cache

import pytest
import tiny
import torch
from torch import Tensor

import dit_graphs


class Pair:
    """Two equal tiny pipelines; one replays through the CPU recorder."""

    def __init__(self, name: str, **config: object) -> None:
        self.name = name
        self.fast, self.plain = tiny.build(name), tiny.build(name)
        dit_graphs.accelerate(self.fast, **{"backend": "recorded", **config})

    def latents(self, size: int | tuple[int, int] = 32, **options: object) -> Tensor:
        """Latents of one call, bit for bit those of the plain pipeline."""
        known = ("steps", "seed", "prompt", "negative_prompt")
        named = {key: options.pop(key) for key in known if key in options}
        mine, theirs = (
            tiny.latents(pipe, {**tiny.call_kwargs(self.name, size=size, **named), **options})
            for pipe in (self.fast, self.plain)
        )
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
        return mine

    def component(self, label: str = "denoiser") -> dict[str, object]:
        """The stats of one component."""
        found = dit_graphs.stats(self.fast)["components"][label]
        assert isinstance(found, dict)
        return found

    @property
    def replays(self) -> int:
        return sum(
            part["replays"]
            for label, part in dit_graphs.stats(self.fast)["components"].items()
            if label.startswith("denoiser")
        )


@cache
def _shared(name: str) -> Pair:
    return Pair(name)


@pytest.fixture(scope="module", params=tiny.NAMES)
def pair(request: pytest.FixtureRequest) -> Pair:
    """The pair of one family; its graphs accumulate over the tests that share it."""
    return _shared(request.param)


@pytest.fixture
def make_pair() -> type[Pair]:
    """The class, for tests that need a pair of their own."""
    return Pair
