"""Owns `Forward`: the wrapped method as passes and captures call it, on buffers, out of any mode.

Must never know graphs. The surprising fact: each call gets containers of its own, and gets them
checked afterwards, because a forward may pop from what it is given and a replay would not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .errors import CaptureAborted, Reason
from .signature import registered_leaves
from .tree import map_tensors, unchanged

__all__ = ["Forward"]


@dataclass(frozen=True, slots=True)
class Forward:
    """The wrapped method under the conditions of a capture."""

    module: nn.Module
    eager: Callable[..., object]
    device: torch.device
    ignore: frozenset[str] = frozenset()

    @contextmanager
    def conditions(self) -> Iterator[None]:
        """No gradients, no inference mode, autocast as the caller's but without its cache."""
        kind = self.device.type
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            if torch.is_autocast_enabled(kind):
                dtype = torch.get_autocast_dtype(kind)
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            yield

    def on(
        self, buffers: list[Tensor], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Callable[[], object]:
        """The call with `buffers` in place of its tensors (those that are in the signature)."""

        def rebuilt() -> tuple[list[object], dict[str, object]]:
            following = iter(buffers)

            def swap(value: object) -> object:
                return map_tensors(
                    value, lambda _: next(following), keep_unknown=True, opaque=registered_leaves()
                )

            swapped = [swap(value) for value in args]
            return swapped, {
                name: value if name in self.ignore else swap(value)
                for name, value in kwargs.items()
            }

        def call() -> object:
            # fresh containers each time: a forward may pop from what it is given
            swapped, named = rebuilt()
            before = rebuilt()
            result = self.eager(*swapped, **named)
            if not unchanged(before, (swapped, named)):
                raise CaptureAborted(Reason.PYTHON_STATE, "a container it was given was changed")
            return result

        return call
