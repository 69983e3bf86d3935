"""Owns what all objects of a class share and somebody may exchange: functions, names, values.

Must never know modules. The surprising fact: a patched method, or another function under the name
that a forward looks up beside its class, changes what every object computes, and no object shows
it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from inspect import unwrap
from types import FunctionType

from torch import nn

from .parts import CONTAINERS, LEAF_LIMIT, parts
from .tree import PLAIN, SIMPLE, UnknownLeaf, freeze

__all__ = ["ClassFacts", "class_name"]

_EVERYBODYS = (nn.Module, object)
_FUNCTIONS = (FunctionType, staticmethod, classmethod, property)
_CALLS = ("forward", "__call__")


def class_name(kind: type) -> str:
    """What a sweep calls the facts of this class."""
    return f"class {kind.__module__}.{kind.__qualname__}"


class ClassFacts:
    """What all objects of some classes share, as it was when this was made.

    That is the classes' functions and plain values, and whatever global stands under a name that a
    `forward` or `__call__` of theirs uses.
    """

    def __init__(self, kinds: Iterable[type]) -> None:
        parents = dict.fromkeys(p for kind in kinds for p in kind.__mro__ if p not in _EVERYBODYS)
        self._own = [(vars(parent), dict(vars(parent))) for parent in parents]
        named = [each for _, own in self._own for name in _CALLS for each in _named_in(own, name)]
        self._named = [(*each, each[0].get(each[1])) for each in named]
        self._filled = [
            (held, _content(held))
            for _, own in self._own
            for name, held in own.items()
            if isinstance(held, CONTAINERS) and not name.startswith("__")
        ]

    def is_same(self) -> bool:
        """Whether the classes, and the globals that their calls use, are still the same objects."""
        return (
            all(_are_same(own, before) for own, before in self._own)
            and all(names.get(name) is value for names, name, value in self._named)
            and all(_content(held) == before for held, before in self._filled)
        )

    @staticmethod
    def of(kind: type) -> Iterator[Hashable]:
        """The facts of one class, as they belong to a key."""
        for parent in kind.__mro__:
            if parent in _EVERYBODYS:
                continue
            for name, value in vars(parent).items():
                if isinstance(value, _FUNCTIONS):
                    yield value
                elif type(value) in SIMPLE or type(value) is float:
                    yield type(value), value
                elif isinstance(value, CONTAINERS) and not name.startswith("__"):
                    yield name, _content(value)
                if name in _CALLS:
                    found = (names.get(n) for names, n in _named_in(vars(parent), name))
                    yield from (each for each in found if isinstance(each, FunctionType))


def _content(held: object) -> Hashable:
    """What a container of a class holds, as far as it is plain."""
    try:
        return freeze(held, [], limit=LEAF_LIMIT)
    except UnknownLeaf:
        return tuple(
            sorted(f"{way} {item!r}" for way, item in parts(held) if isinstance(item, PLAIN))
        )


def _are_same(own: Mapping[str, object], before: dict[str, object]) -> bool:
    """Never `==` between values: a class may hold tensors."""
    return len(own) == len(before) and all(
        name is other and value is held
        for (name, value), (other, held) in zip(own.items(), before.items(), strict=True)
    )


def _named_in(own: Mapping[str, object], call: str) -> Iterator[tuple[dict[str, object], str]]:
    """The globals that a method named `call` uses: the dict that holds them, and their names."""
    value = own.get(call)
    plain = unwrap(value) if isinstance(value, FunctionType) else None
    if isinstance(plain, FunctionType):
        yield from ((plain.__globals__, name) for name in plain.__code__.co_names)
