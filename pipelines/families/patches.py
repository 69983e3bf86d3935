"""Owns the replacing of methods of submodules while a forward is recorded, and the putting back.

Must never know what is replaced. The surprising fact: the replacement is an instance attribute, so
other instances of the class, and this one outside a recording, run diffusers' own code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["Function", "replacing"]

Function = Callable[..., object]


@contextmanager
def replacing(
    modules: list[nn.Module], name: str, make: Callable[[nn.Module, Function], Function]
) -> Iterator[None]:
    """Inside, method `name` of each module is `make(module, its own)`, for this thread's calls."""
    before = [(vars(module), vars(module).get(name)) for module in modules]
    for module in modules:
        own = getattr(module, name)
        vars(module)[name] = _here(make(module, own), own)
    try:
        yield
    finally:
        for attributes, earlier in before:
            if earlier is None:
                del attributes[name]
            else:
                attributes[name] = earlier


def _here(made: Function, own: Function) -> Function:
    me = threading.get_ident()

    def call(*args: object, **kwargs: object) -> object:
        return (made if threading.get_ident() == me else own)(*args, **kwargs)

    return call
