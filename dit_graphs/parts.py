"""Owns the question "what is an object made of?", for those who look at a module's plain state.

Must never know modules' own tables, nor what a value means. The surprising fact: slots, the object
of a bound method and what `functools.partial` was given are all member descriptors, so one rule
finds them.
"""

from __future__ import annotations

import gc
from array import array
from collections import deque
from collections.abc import Iterator
from functools import partial
from types import MappingProxyType, MemberDescriptorType, MethodType, ModuleType

from .tree import PLAIN

__all__ = [
    "CONTAINERS",
    "LEAF_LIMIT",
    "STRUCTURE",
    "behind",
    "callable_only",
    "members",
    "own_dict",
    "parts",
    "raw",
]

LEAF_LIMIT = 4096  # what holds more is no configuration
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
STRUCTURE = (*CONTAINERS, MethodType, partial)  # known by what they hold, not by identity
_RAW_LIMIT = 1 << 16


def callable_only(value: object) -> bool:
    """Whether the object is a function, class or Python module, whose attributes are not state."""
    return isinstance(value, (type, ModuleType)) or hasattr(type(value), "__code__")


def own_dict(value: object) -> dict[str, object] | None:
    """The dict that holds the object's attributes; whatever code its class has is not run."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return own if isinstance(own, dict) else None


def members(value: object) -> tuple[str, ...]:
    """Names of what the object holds beside its dict: slots, a method's object."""
    return tuple(
        name
        for kind in type(value).__mro__
        for name, each in vars(kind).items()
        if isinstance(each, MemberDescriptorType) and name not in ("__dict__", "__weakref__")
    )


def behind(value: object) -> object:
    """The dict that a read-only view shows; every other object itself."""
    return gc.get_referents(value)[0] if isinstance(value, MappingProxyType) else value


def raw(value: object) -> bytes | None:
    """The bytes of an array, where it is a small one."""
    is_array = isinstance(value, (bytearray, array)) or type(value).__module__ == "numpy"
    if not is_array:
        return None
    try:
        view = memoryview(value)  # type: ignore[arg-type]
        return view.tobytes() if view.nbytes <= _RAW_LIMIT else None
    except (TypeError, ValueError, BufferError):  # a function of numpy's, a format of its own
        return None


def parts(value: object) -> Iterator[tuple[str, object]]:
    """What the object is made of, each part with its way there: items, attributes, members."""
    value = behind(value)
    if isinstance(value, CONTAINERS) and len(value) <= LEAF_LIMIT:
        if isinstance(value, dict):
            yield from [(f"[{key!r}]", item) for key, item in list(value.items())]
        else:
            has_order = not isinstance(value, (set, frozenset))
            for index, item in enumerate(list(value)):
                if has_order or not isinstance(item, PLAIN):
                    yield f"[{index}]", item
    yield from [(f".{name}", item) for name, item in list((own_dict(value) or {}).items())]
    yield from [(f".{name}", getattr(value, name, None)) for name in members(value)]
