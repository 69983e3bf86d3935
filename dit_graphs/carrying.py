"""Owns runners of modules that hand state from one call to the next, past arguments and results.

Must never know who keeps the state (a step cache of diffusers does). The surprising fact: such a
forward is made pure. Its state goes in as one more argument and comes out as one more result, so
signatures, compares, replays and fallbacks need to know nothing of it; and what the forward decides
on the host joins the signature, so that there is one graph per branch.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import cast

from torch import Tensor, nn

from .ambient import ambient_state
from .cache import Entry
from .calls import Call, Carried, Eager, RunnerOptions
from .config import GraphConfig
from .errors import Reason
from .runner import GraphRunner
from .tree import map_tensors
from .watch import unwatched

__all__ = ["CarryingRunner"]

_STATE = "state carried from call to call"


class _Pure:
    """The forward as a function of its state: `(result, next state)` where a state is given."""

    def __init__(self, eager: Eager, carried: Carried) -> None:
        self.__wrapped__ = eager
        self._carried = carried

    def __call__(self, *args: object, **kwargs: object) -> object:
        if _STATE not in kwargs:
            return self.__wrapped__(*args, **kwargs)
        state = kwargs.pop(_STATE)
        self._carried.put(state)
        with self._carried.deciding():
            result = self.__wrapped__(*args, **kwargs)
        after = self._carried.take()
        with unwatched():  # what a capture produced lies in a graph's memory, and goes
            self._carried.put(map_tensors(state, Tensor.detach))  # it is ours that stays there
        return result, after


class CarryingRunner(GraphRunner):
    """A runner whose calls start from what `carried` holds and leave there what they produced."""

    def __init__(
        self, module: nn.Module, eager: Eager, config: GraphConfig, options: RunnerOptions
    ) -> None:
        assert options.carried is not None
        self._carried = options.carried
        super().__init__(module, _Pure(eager, options.carried), config, options)

    def __call__(self, *args: object, **kwargs: object) -> object:
        state = self._carried.begin()
        if state is None:
            return super().__call__(*args, **kwargs)
        pair = super().__call__(*args, **kwargs, **{_STATE: state})
        result, after = cast("tuple[object, object]", pair)
        self._carried.end(after)
        return result

    def _extra(self) -> Hashable:
        return super()._extra(), self._carried.branch()

    def _is_by_itself(self, call: Call) -> bool:
        return _STATE not in call.kwargs and super()._is_by_itself(call)

    def _drop(self, entry: Entry, call: Call, reason: Reason, detail: str) -> object:
        """A decision fell otherwise than in this graph: the other branch's graph serves."""
        signature = entry.signature.under(ambient_state(self.device), self._extra())
        if call.has_turned or signature == entry.signature:
            return super()._drop(entry, call, reason, detail)
        call.has_turned = True
        number = call.request.number if call.request is not None else None
        turned = self.cache.find(signature, number)
        if turned is None:
            turned = self.cache.add(signature, self.options.policy, number, self._own_key())
        return self._serve(turned, call)

    def _prove_by_perturbing(self, entry: Entry, call: Call) -> None:
        """Other values may decide otherwise: such a graph is compared on its next real call."""
        if _STATE not in call.kwargs:
            super()._prove_by_perturbing(entry, call)
