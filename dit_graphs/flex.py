"""Owns the break at flex attention, which no mode can see: it hands itself to Dynamo.

Must never know graphs or models. The surprising fact: under a dispatch mode an uncompiled flex
attention raises, because Dynamo steps aside for modes that it does not know; so the call has to be
caught before it, by name, in the module where libraries look it up.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps

import torch
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from .breaks import BreakSite, active_handler, call_break

__all__ = ["breaking_flex_attention"]

_HOME = "torch.nn.attention.flex_attention"
_NAME = "flex_attention"
_SITE = BreakSite("op", _NAME)
_lock = threading.Lock()
_holders = 0


@contextmanager
def breaking_flex_attention() -> Iterator[None]:
    """Inside, flex attention is an eager break of the forward this thread observes or captures.

    Its mask is planned on the host (a BlockMask), so it is dynamic attention. Other threads' calls
    pass through.
    """
    home = sys.modules.get(_HOME)
    if home is None:  # nobody has imported it, so nobody calls it
        yield
        return
    _hold(vars(home))
    try:
        yield
    finally:
        _release(vars(home))


def _hold(names: dict[str, object]) -> None:
    global _holders
    with _lock:
        _holders += 1
        if _holders == 1:
            names[_NAME] = _as_break(names[_NAME])


def _release(names: dict[str, object]) -> None:
    global _holders
    with _lock:
        _holders -= 1
        if _holders == 0:
            names[_NAME] = getattr(names[_NAME], "__wrapped__")  # noqa: B009


def _as_break(original: object) -> object:
    assert callable(original)

    def body(*args: object, **kwargs: object) -> object:
        with _without_modes():
            return original(*args, **kwargs)

    @wraps(original)
    def call(*args: object, **kwargs: object) -> object:
        if active_handler() is None:
            return original(*args, **kwargs)
        return call_break(_SITE, body, args, kwargs)

    return call


@contextmanager
def _without_modes() -> Iterator[None]:
    """Inside, no mode sees anything; unlike `unwatched`, functions may enter modes of their own."""
    with _disable_current_modes(), ExitStack() as stack:
        while torch._C._len_torch_function_stack():
            stack.enter_context(_pop_mode_temporarily())
        yield
