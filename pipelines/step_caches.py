"""Owns what diffusers' step caches carry from step to step, so that they run under graphs.

Must never know graphs, and never repeats a cache's own arithmetic: each decision is made by the
hook that diffusers installed, once per step and branch of guidance. The surprising fact: a cache
needs little. FirstBlockCache reads two residuals before it writes them, MagCache one and a few
host numbers; all else in their states is written before it is read.

A cache with state in every block (TaylorSeer, PAB, FasterCache) stays eager: binding and handing
out hundreds of tensors per step and graph costs more memory than the graph saves time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from dit_graphs import eager_on_graph

__all__ = ["SERVED_CONFIGS", "SERVED_HOOKS", "StepCache", "cannot_serve"]

_FIRST_BLOCK, _MAG, _MAG_BLOCK = (
    "fbc_leader_block_hook",
    "mag_cache_leader_block_hook",
    "mag_cache_block_hook",
)
SERVED_HOOKS = frozenset({_FIRST_BLOCK, "fbc_block_hook", _MAG, _MAG_BLOCK})
SERVED_CONFIGS = frozenset({"FirstBlockCacheConfig", "MagCacheConfig"})
_NO_STEP = -1  # far from the last step, at which MagCache empties itself
_DECISION = "_should_compute_remaining_blocks"
_MAG_NUMBERS = ("accumulated_ratio", "accumulated_err", "accumulated_steps", "step_index")


class StepCache:
    """What the step cache of `module` carries; nothing while none is installed."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._kept: _FirstBlock | _Magnitude | None = None

    def begin(self) -> object | None:
        found = _leading_hook(self.module)
        if found is None:
            self._kept = None
            return None
        name, hook = found
        if self._kept is None or self._kept.hook is not hook:
            self._kept = (
                _FirstBlock(hook) if name == _FIRST_BLOCK else _Magnitude(hook, self.module)
            )
        return self._kept.begin()

    def put(self, state: object) -> None:
        assert self._kept is not None
        self._kept.put(state)

    def take(self) -> object:
        assert self._kept is not None
        return self._kept.take()

    def end(self, state: object) -> None:
        assert self._kept is not None
        self._kept.end(state)

    def branch(self) -> Hashable:
        return self._kept.branch() if self._kept is not None else None

    def deciding(self) -> AbstractContextManager[None]:
        return self._kept.deciding() if self._kept is not None else nullcontext()


def _hooks_of(block: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = getattr(vars(block).get("_diffusers_hook"), "hooks", {})
    return found


def _context_of(hook: Any) -> str | None:
    """The name of the cache context that the hook's states are kept for; None outside of one."""
    manager = hook.state_manager
    if hasattr(manager, "_context"):
        found: str | None = getattr(manager._context, "name", None)
    else:  # diffusers before 0.41 has no more than the name
        found = manager._current_context
    return found


def _context(name: str) -> object:
    from diffusers.hooks import hooks

    make = getattr(hooks, "CacheContext", None)
    return make(name=name) if make is not None else name


def _leading_hook(module: nn.Module) -> tuple[str, Any] | None:
    """The hook that decides: diffusers puts it on the first block of the first list of blocks."""
    for child in module._modules.values():  # read on every step: `children()` builds a set
        if not isinstance(child, nn.ModuleList):
            continue
        block = next(iter(child._modules.values()), None)
        hooks = _hooks_of(block) if block is not None else {}
        if hooks:
            for name in (_FIRST_BLOCK, _MAG):
                if name in hooks:
                    return name, hooks[name]
    return None


def cannot_serve(module: nn.Module, *, allows_breaks: bool) -> str | None:
    """Why the step cache on `module` must stay eager although its hooks are served ones."""
    found = _leading_hook(module)
    if found is not None and found[0] == _MAG and found[1].config.calibrate:
        return "MagCache is calibrating: it reads a norm of every step"
    if found is not None and found[0] == _FIRST_BLOCK and not allows_breaks:
        return (
            'FirstBlockCache decides within the forward, where backend="full" allows no eager '
            'break; take "auto" or "breakable"'
        )
    return None


class _FirstBlock:
    """FirstBlockCache: does the first block's residual differ enough from the last computed one?"""

    def __init__(self, hook: Any) -> None:
        self.hook = hook
        self._verdicts: dict[str | None, bool] = {}
        self._branch: Hashable = None
        self._compare: Callable[[Tensor], bool] = getattr(hook, _DECISION)

    def begin(self) -> object | None:
        context = _context_of(self.hook)
        if context is None:
            return None  # outside of cache_context the hook raises
        # without a residual to compare with nothing is decided: every block runs
        is_first = self._state.head_block_residual is None
        self._branch = "first" if is_first else self._verdicts.get(context, True)
        return self.take()

    @property
    def _state(self) -> Any:
        return self.hook.state_manager.get_state()

    def put(self, state: object) -> None:
        held = self._state
        held.head_block_residual, held.tail_block_residuals = cast("tuple[object, object]", state)
        held.head_block_output = None  # written before it is read; it may lie in a graph's memory

    def take(self) -> object:
        return self._state.head_block_residual, self._state.tail_block_residuals

    def end(self, state: object) -> None:
        self.put(state)

    def branch(self) -> Hashable:
        return self._branch

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """The hook's own comparison is an eager break that returns its verdict."""

        def decide(residual: Tensor) -> bool:
            return self._branch == "first" or _decide(self, residual)

        attributes = vars(self.hook)
        patched = attributes.get(_DECISION)
        self._compare = getattr(self.hook, _DECISION)
        attributes[_DECISION] = decide
        try:
            yield
        finally:
            del attributes[_DECISION]
            if patched is not None:
                attributes[_DECISION] = patched

    def verdict(self, residual: Tensor) -> bool:
        """What the hook says of this step's residual."""
        found = bool(self._compare(residual))
        self._branch = self._verdicts[_context_of(self.hook)] = found
        return found


@eager_on_graph
def _decide(cache: _FirstBlock, residual: Tensor) -> bool:
    return cache.verdict(residual)


class _Magnitude:
    """MagCache: the host adds up the error that skipping would make, from ratios known before.

    So the decision is known before the call. The hook makes it in a rehearsal without blocks; in
    the call itself it gets numbers that lead to the same verdict, since its own arithmetic with
    host tensors has no place in a graph.
    """

    def __init__(self, hook: Any, module: nn.Module) -> None:
        self.hook = hook
        self._tail = _tail_hook(module)
        self._numbers: dict[str, object] = {}
        self._is_computed = True

    @property
    def _state(self) -> Any:
        return self.hook.state_manager.get_state()

    def begin(self) -> object:
        if _context_of(self.hook) is None:
            self.hook.state_manager.set_context(_context("inference"))  # as the hook does
        state = self._state
        residual = state.previous_residual
        before = {name: getattr(state, name) for name in _MAG_NUMBERS}
        try:
            self._rehearse(state, torch.zeros(()))
            self._numbers = {name: getattr(state, name) for name in _MAG_NUMBERS}
            self._is_computed = state.should_compute
        finally:
            state.previous_residual = residual
            vars(state).update(before)
        return (residual,)

    def _rehearse(self, state: Any, stand_in: Tensor) -> None:
        """The hook decides about blocks that do nothing, with tensors that weigh nothing."""
        if state.previous_residual is not None:
            state.previous_residual = stand_in
        names = {self.hook._metadata.hidden_states_argument_name, "encoder_hidden_states"}
        reference = self.hook.fn_ref
        block, reference.original_forward = reference.original_forward, _nothing
        try:
            self.hook.new_forward(None, **dict.fromkeys(names, stand_in))
        finally:
            reference.original_forward = block

    def put(self, state: object) -> None:
        held = self._state
        (held.previous_residual,) = cast("tuple[object]", state)
        held.head_block_input = None
        held.accumulated_ratio, held.accumulated_err, held.accumulated_steps = 1.0, 0.0, 0
        held.step_index = _NO_STEP

    def take(self) -> object:
        return (self._state.previous_residual,)

    def end(self, state: object) -> None:
        self.put(state)
        self._count(is_done=True)

    def branch(self) -> Hashable:
        return self._is_computed

    @contextmanager
    def deciding(self) -> Iterator[None]:
        own = self.hook.config
        threshold = -1.0 if self._is_computed else math.inf
        forced = dataclasses.replace(
            own, threshold=threshold, max_skip_steps=1 << 30, retention_ratio=-8.0
        )
        forced.mag_ratios = [1.0]
        self.hook.config = forced
        try:
            yield
        except BaseException:  # the counters must stand where the hooks that ran would leave them
            self._count(is_done=self._state.step_index != _NO_STEP)
            raise
        finally:
            self.hook.config = own

    def _count(self, *, is_done: bool) -> None:
        held = self._state
        vars(held).update(self._numbers)
        held.should_compute = self._is_computed
        if is_done:
            self._tail._advance_step(held)


def _tail_hook(module: nn.Module) -> Any:
    """The hook that counts a step as done, on the last block."""
    for child in module.modules():
        hook = _hooks_of(child).get(_MAG_BLOCK)
        if hook is not None and hook.is_tail:
            return hook
    raise LookupError("MagCache without a last block")


def _nothing(*args: object, **kwargs: object) -> None:
    return None
