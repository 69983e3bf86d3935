"""Owns the replacing of methods of submodules while a forward is recorded, and the putting back.

Must never know what is replaced. The surprising fact: the replacement is an instance attribute, so
other instances of the class, and this one outside a recording, run diffusers' own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["Function", "replacing"]

Function = Callable[..., object]


@contextmanager
def replacing(
    modules: list[nn.Module], name: str, make: Callable[[nn.Module, Function], Function]
) -> Iterator[None]:
    """Inside, method `name` of each module is `make(module, its own)`."""
    before = [(vars(module), vars(module).get(name)) for module in modules]
    for module in modules:
        vars(module)[name] = make(module, getattr(module, name))
    try:
        yield
    finally:
        for attributes, own in before:
            if own is None:
                del attributes[name]
            else:
                attributes[name] = own
