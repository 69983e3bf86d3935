"""An accelerated tiny pipeline beside a plain one: everything is done to both and compared.

Owns the comparison of whole generations. The surprising fact: the plain pipeline is built anew, not
copied, because a copy of an accelerated pipeline is what some tests are about.
"""

from __future__ import annotations

from collections.abc import Callable

import tiny
import torch
from torch import Tensor

import dit_graphs

__all__ = ["Pair"]


class Pair:
    """Two equal pipelines of one family on the CPU (or `device`); `fast` is accelerated.

    `prepare` is applied to both before `accelerate`. Every other keyword is a field of the config;
    only the denoisers get graphs unless `components` says otherwise.
    """

    def __init__(
        self,
        name: str,
        *,
        prepare: Callable[[object], object] | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        **config: object,
    ) -> None:
        self.name = name
        self.device = device
        self.fast, self.plain = (tiny.build(name, dtype).to(device) for _ in range(2))
        if prepare is not None:
            self.both(prepare)
        dit_graphs.accelerate(
            self.fast,
            **{
                "backend": "recorded" if device == "cpu" else "breakable",
                "components": ("denoiser",),
                **config,
            },
        )

    def both(self, change: Callable[[object], object]) -> None:
        """`change(pipe)` for each of the two."""
        for pipe in (self.plain, self.fast):
            change(pipe)

    def call(self, pipe: object, size: int = 32, steps: int = 4, **options: object) -> Tensor:
        """The latents of one call of one of the two."""
        # Z-Image writes its template into the list of prompts it is given
        options = {k: list(v) if isinstance(v, list) else v for k, v in options.items()}
        known = {k: options.pop(k) for k in ("seed", "prompt", "negative_prompt") if k in options}
        arguments = tiny.call_kwargs(self.name, size=size, steps=steps, **known)
        return tiny.latents(pipe, {**arguments, **options})

    def latents(self, **options: object) -> Tensor:
        """The accelerated pipeline's latents, which are the plain one's, bit for bit."""
        mine, theirs = self.call(self.fast, **options), self.call(self.plain, **options)
        assert torch.isfinite(theirs).all()
        assert torch.equal(mine, theirs)
        return mine

    def components(self) -> dict[str, dict[str, object]]:
        """What `stats` says of every part."""
        return dit_graphs.stats(self.fast)["components"]

    def component(self, label: str = "denoiser") -> dict[str, object]:
        """What `stats` says of one component."""
        return self.components()[label]

    @property
    def replays(self) -> int:
        return self.component()["replays"]

    @property
    def captures(self) -> int:
        return self.component()["captures"]

    def reasons_of(self, calls: int = 1, **options: object) -> dict[str, int]:
        """The denoiser's eager calls by reason over the next `calls` generations."""
        before = dict(self.component()["fallbacks"])
        for seed in range(calls):
            self.latents(**{"seed": seed, **options})
        after = self.component()["fallbacks"]
        return {r: n - before.get(r, 0) for r, n in after.items() if n != before.get(r, 0)}
