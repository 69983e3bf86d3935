"""Owns the eager call: the method as it would run without this package, with a counted reason.

Must never know how a graph is made. The surprising fact: memory may run out because of the graphs
alone, so a call that fails for want of it lets all of them go and runs once more, on the same
random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .cache import Entry
from .calls import Call
from .counters import log
from .errors import FallbackError, Reason, forget_refusals
from .holding import GraphHolding

__all__ = ["EagerCalls"]


class EagerCalls(GraphHolding):
    """A holder of graphs that serves without them."""

    def _miss(self, entry: Entry, call: Call, reason: Reason, detail: str = "") -> object:
        differs = self._difference(reason, entry.signature)
        random = self.state.random_state()
        return self._fall_back(reason, detail, call.args, call.kwargs, differs, random)

    def _fall_back(
        self,
        reason: Reason,
        detail: str,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        differs: Sequence[str] = (),
        random: list[Tensor] | None = None,
    ) -> object:
        self.stats.count_eager(reason, detail, differs)
        self._watch.ran_eager = True
        if self.config.strict and not reason.is_asked_for:
            raise FallbackError(reason, detail) from None
        try:
            return self.call_eager(*args, **kwargs)
        except torch.OutOfMemoryError:
            held = self.state.pool_bytes()
            if not self.state.retire():
                raise
            log.warning(
                "%s: out of memory; %d MiB of graphs released, trying once more",
                self.stats.component, held >> 20,
            )  # fmt: skip
            self.stats.count_eager(Reason.OUT_OF_MEMORY, f"{held >> 20} MiB of graphs released")
            if random is not None:  # what the first try drew is drawn again
                self.state.set_random_state(random)
        except Exception as error:
            forget_refusals(error)
            raise
        return self.call_eager(*args, **kwargs)
