"""Owns what a graph relies on of what forwards leave in their module for the calls to come.

Must never know how graphs are made. The surprising fact: most of what a forward leaves is a memory
of what it would compute again, a table for the last size, and graphs outlive it, whoever exchanges
it. A call that reads what *another* kind of call left looks the same from outside. Two things tell
it: its own pass does not make anew what another pass took away, and its result changes with it.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import TypeAlias, cast

from torch import Tensor, nn

from .op_traits import storage_key
from .parts import LEAF_LIMIT, members, own_dict
from .tree import UnknownLeaf, freeze

__all__ = ["Habits", "Reliance", "Restless", "restless_values"]

Restless: TypeAlias = "tuple[tuple[str, Hashable, tuple[int, ...]], ...]"

_NOTHING: Mapping[int, str] = MappingProxyType({})
_MOST_CALLS = 2048
_ENOUGH = 8  # values under which a graph was right: it reads none of them
_STEP = re.compile(r"\.?([^.\[\]]+)|\[([^\]]+)\]")


@dataclass(slots=True)
class Reliance:
    """Of one signature's graph. `doubted`: where another pass took away memory that it reads.

    What restless attributes held when it was captured, what its last pass left in them, and under
    which values it was equal to eager.
    """

    doubted: frozenset[str] = frozenset()
    captured_with: Restless = ()
    left: Restless = ()
    proven_with: list[Restless] = field(default_factory=list)

    def is_known_with(self, restless: Restless, habits: Habits) -> bool:
        """Whether the graph was made or right while restless attributes held this, or was right
        while they held ever other values. Where memories lie does not matter.
        """
        known = (self.captured_with, *self.proven_with)
        if restless in known or len(self.proven_with) >= _ENOUGH:
            return True
        return any(_differ_in_places(restless, each, habits) for each in known)

    def prove(self, restless: Restless) -> None:
        """It was equal to eager while they held this."""
        if restless not in self.proven_with:
            self.proven_with.append(restless)

    def blamed(self, restless: Restless) -> frozenset[str]:
        """The attributes that held none of the values under which the graph was right or made."""
        known = {value for each in (self.captured_with, *self.proven_with) for value in each}
        return frozenset(value[0] for value in restless if value not in known)

    def left_otherwise(self, restless: Restless) -> list[str]:
        """The attributes that hold something else now than its own last pass left in them."""
        return [value[0] for value in restless if value not in self.left]

    def forget_graph(self) -> None:
        """There is no graph any longer."""
        self.doubted, self.captured_with = frozenset(), ()
        self.proven_with.clear()


@dataclass(slots=True)
class _Habit:
    """`turned`: attributes that passes of one kind of call turned. `made`: memory that the last
    one put at each place of the module. `remade`: places at which one did so where another kind of
    call had taken that away.
    """

    turned: frozenset[str] = frozenset()
    made: dict[str, set[int]] = field(default_factory=dict)
    remade: frozenset[str] = frozenset()


class Habits:
    """What the passes of each kind of call were seen to do to their module."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Habit] = {}

    def note(
        self,
        call: Hashable,
        turned: frozenset[str],
        lost: Mapping[int, str] = _NOTHING,
        gained: Mapping[int, str] = _NOTHING,
        doubted: frozenset[str] = frozenset(),
    ) -> None:
        """A pass of such a call left these attributes otherwise than it found them, took `lost`
        from its places in the module and put `gained` there. `doubted`: where another pass had
        taken what its graph reads.
        """
        habit = self._known.setdefault(call, _Habit())
        habit.turned |= turned
        for place in set(gained.values()):
            found = {key for key, where in lost.items() if where == place}
            mine = habit.made.get(place, set())
            if found and (place in doubted or (mine and mine.isdisjoint(found))):
                habit.remade |= {place}
            habit.made[place] = {key for key, where in gained.items() if where == place}
        if len(self._known) > _MOST_CALLS:
            self._known.pop(next(iter(self._known)), None)

    def remade(self, call: Hashable) -> frozenset[str]:
        """Where such a call makes anew by itself what another one has taken away."""
        known = self._known.get(call)
        return known.remade if known is not None else frozenset()

    def are_memories(self, names: Iterable[str]) -> bool:
        """Whether every call seen so far turns all of these where others left them otherwise: they
        are memories of the last call, and what a replay leaves in them does not matter.
        """
        wanted = frozenset(names)
        return all(wanted <= habit.turned for habit in list(self._known.values()))

    def forget_made(self) -> None:
        """Somebody else has exchanged what the module holds."""
        for habit in list(self._known.values()):
            habit.made, habit.remade = {}, frozenset()


def _differ_in_places(one: Restless, other: Restless, habits: Habits) -> bool:
    """Whether two states hold the same but for where the tensors of memories lie."""
    if [(name, plain) for name, plain, _ in one] != [(name, plain) for name, plain, _ in other]:
        return False
    pairs = zip(one, other, strict=True)
    return habits.are_memories(mine[0] for mine, theirs in pairs if mine != theirs)


def restless_values(module: nn.Module, names: Iterable[str]) -> Restless:
    """What stands at each of the places now, by name: plain values, and where tensors lie."""
    return tuple((name, *_key(_at(module, name))) for name in sorted(names))


def _key(value: object) -> tuple[Hashable, tuple[int, ...]]:
    found: list[Tensor] = []
    try:
        return freeze(value, found, limit=LEAF_LIMIT), tuple(map(storage_key, found))
    except UnknownLeaf:
        # an object of its own in every pass, maybe: what it is made of has no name
        return (type(value).__module__, type(value).__qualname__), ()


@lru_cache(maxsize=4096)
def _steps(name: str) -> list[tuple[str, str]]:
    return _STEP.findall(name)


def _at(module: nn.Module, name: str) -> object:
    """What stands at the place that a sweep calls `name`; None where that is a class, or gone."""
    found: object = None if name.startswith("class ") else module
    for attribute, key in _steps(name):
        if isinstance(found, nn.Module) and attribute in found._modules:
            found = found._modules[attribute]
            continue
        try:
            if attribute:
                own = own_dict(found) or {}
                is_member = attribute not in own and attribute in members(found)
                found = getattr(found, attribute) if is_member else own[attribute]
            else:
                found = cast("dict[object, object]", found)[literal_eval(key)]
        except (LookupError, TypeError, ValueError, SyntaxError, AttributeError):
            return None
    return found
