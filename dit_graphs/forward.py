"""Owns `Forward`: the wrapped method as passes and captures call it, on buffers, out of any mode.

Must never know graphs. The surprising fact: each call gets containers of its own, and gets them
checked afterwards, because a forward may pop from what it is given and a replay must do so too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from .calls import Eager, Family
from .errors import CaptureAborted, Reason
from .signature import registered_leaves
from .taken import GIVEN_TWICE, Taken, entries_taken, holds_twice
from .tree import UnknownLeaf, map_tensors

__all__ = ["Forward", "Run", "prepared"]


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

    def on(self, buffers: list[Tensor], args: tuple[object, ...], kwargs: dict[str, object]) -> Run:
        """The call with `buffers` in place of its tensors (those that are in the signature)."""
        return Run(self, buffers, args, kwargs)


class Run:
    """A call on buffers, to be made any number of times; `taken`: what the last one took out."""

    def __init__(
        self,
        forward: Forward,
        buffers: list[Tensor],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> None:
        self.taken: tuple[Taken, ...] = ()
        self._forward = forward
        self._buffers = buffers
        self._holds_twice = holds_twice((args, kwargs))
        places: list[Tensor] = []

        def place(_: Tensor) -> Tensor:
            places.append(torch.empty(0))  # the caller's may go
            return places[-1]

        # as they are now: the caller's own lose what the forward takes out of them
        try:
            self._args, self._kwargs = self._in_own_containers(args, kwargs, place)
        except UnknownLeaf as leaf:  # taken apart is not yet put together again
            raise CaptureAborted(Reason.UNSUPPORTED_ARGUMENT, leaf.kind) from None
        if len(places) != len(buffers):  # as a key, in a slice: there none can be exchanged
            raise CaptureAborted(Reason.UNSUPPORTED_ARGUMENT, "a tensor where none is expected")

    def __call__(self) -> object:
        """The result. Raises `CaptureAborted` where a replay could not change a container so."""
        # fresh containers each time: a forward may pop from what it gets. Fresh tensors too: ops
        # make them, so that a watch sees who keeps one
        own = {id(buffer): _alias(buffer) for buffer in self._buffers}
        given, named = self._on(own)
        before = self._on(own)
        result = self._forward.eager(*given, **named)
        taken = entries_taken(before, (given, named))
        if taken is None:
            raise CaptureAborted(Reason.PYTHON_STATE, "a container it was given was changed")
        if taken and self._holds_twice:  # it had two here, and the caller has one
            raise CaptureAborted(Reason.PYTHON_STATE, GIVEN_TWICE)
        self.taken = taken
        return result

    def _on(self, own: dict[int, Tensor]) -> tuple[list[object], dict[str, object]]:
        following = iter(self._buffers)
        return self._in_own_containers(self._args, self._kwargs, lambda _: own[id(next(following))])

    def _in_own_containers(
        self,
        args: Sequence[object],
        kwargs: dict[str, object],
        swap: Callable[[Tensor], Tensor],
    ) -> tuple[list[object], dict[str, object]]:
        opaque = registered_leaves()

        def rebuilt(value: object) -> object:
            return map_tensors(value, swap, keep_unknown=True, opaque=opaque)

        ignored = self._forward.ignore
        return [rebuilt(value) for value in args], {
            name: value if name in ignored else rebuilt(value) for name, value in kwargs.items()
        }


def _alias(buffer: Tensor) -> Tensor:
    alias: Tensor = torch.ops.aten.alias(buffer)
    return alias.requires_grad_() if buffer.requires_grad else alias


def prepared(serving: Eager, family: Family | None) -> Eager:
    """A runner's own method on prepared arguments, held weakly.

    In a cycle with its runner, weights would wait for the collector after `unwrap`.
    """
    return partial(_call_prepared, WeakMethod(serving), family)


def _call_prepared(
    serving: WeakMethod[Eager], family: Family | None, /, *args: object, **kwargs: object
) -> object:
    eager = serving()
    assert eager is not None, "called by the runner whose method it is"
    return eager(*args, **kwargs) if family is None else family.run(partial(eager, *args), kwargs)
