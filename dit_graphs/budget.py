"""Owns the question how much memory graphs may hold.

Must never know how graphs are kept. The surprising fact: all graphs of a device share one pool, so
one number bounds the pool, and over it every graph goes; a number per component bounds what that
component's own graphs have added, and the other components' graphs are no concern of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .config import GraphConfig
from .counters import log
from .errors import CaptureAborted, Reason
from .memory import DeviceState

__all__ = ["keep_budget"]


def keep_budget(
    state: DeviceState,
    config: GraphConfig,
    component: str,
    own_bytes: Callable[[], int],
    evict_one: Callable[[], bool],
) -> None:
    """After a capture: what graphs hold is within the budget, the new one included.

    Over a component's own number, `evict_one` is asked as often as it finds a graph that is worth
    less than the new one. Raises `CaptureAborted` where the new one cannot stay.
    """
    budget = config.budget_for(component)
    if not isinstance(config.memory_budget, Mapping) or budget == "auto":
        _keep_pool(state, state.default_budget() if budget == "auto" else budget, component)
        return
    while own_bytes() > budget:
        held = own_bytes()
        if not evict_one():
            raise CaptureAborted(
                Reason.MEMORY_BUDGET, f"{component} {_over(held, budget)}; memory_budget is its own"
            )


def _keep_pool(state: DeviceState, limit: int, component: str) -> None:
    held = state.pool_bytes()
    if held <= limit:
        return
    dropped = state.retire()
    log.warning(
        "%s: graph memory of %s: %d graphs dropped; raise memory_budget",
        component, _over(held, limit), dropped,
    )  # fmt: skip
    raise CaptureAborted(Reason.MEMORY_BUDGET, _over(held, limit))


def _over(held: int, limit: int) -> str:
    return f"{held / 2**20:.4g} MiB is over {limit / 2**20:.4g} MiB"
