"""Owns what a graph relies on of what forwards leave in their module for the calls to come.

Must never know how graphs are made. The surprising fact: most of what a forward leaves is a memory
of what it would compute again, a table for the last size, and graphs outlive it, whoever exchanges
it. A call that reads what *another* kind of call left looks the same from outside. Two things tell
it: its own pass does not make anew what another pass took away, and its result changes with it.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

from .ambient import outside_modes
from .module_state import OBJECT_DEPTH, Exchange, tensor_key
from .op_traits import storage_key, storage_parts
from .parts import LEAF_LIMIT, callable_only, members, own_dict, parts, raw
from .tree import UnknownLeaf, freeze

__all__ = [
    "Habits",
    "Made",
    "Reliance",
    "Restless",
    "objects_among",
    "restless_storages",
    "restless_values",
]

# of each attribute its name, what it is (a value, a tensor's layout), and where its tensors lie
Restless: TypeAlias = "tuple[tuple[str, Hashable, tuple[Hashable, ...]], ...]"

_NOTHING = Exchange()
_MOST_CALLS = 2048
_ENOUGH = 8  # values under which a graph was right: it reads none of them
_TIRED = 3  # places of tensors otherwise alike, each compared for nothing
_IN_VAIN = 12  # compares without a replay between them
_STEP = re.compile(r"\.?([^.\[\]]+)|\[([^\]]+)\]")


@dataclass(slots=True)
class Reliance:
    """Of one signature's graph. `doubted`: where another pass took away memory that it reads.

    `exchanges`: how often other passes exchanged tensors of the module since it was captured, and
    `weighed`: how many of these a compare has followed. Then what restless attributes held when it
    was captured, what its last pass left in them, and under which values it was equal to eager.
    `touched` and `unread`: those whose tensors it touches, and those where nothing of it may.
    `in_vain`: compares since it served, when it had served `served` times.
    """

    doubted: frozenset[str] = frozenset()
    exchanges: int = 0
    weighed: int = 0
    captured_with: Restless = ()
    touched: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    left: Restless = ()
    proven_with: list[Restless] = field(default_factory=list)
    in_vain: int = 0
    served: int = 0

    def is_known_with(self, restless: Restless, habits: Habits, call: Hashable) -> bool:
        """Whether the graph was made or right while restless attributes held this, or was right
        while they held ever other values. Where memories lie does not matter, nor where that lies
        which is none of this kind of call's business.
        """
        known = (self.captured_with, *self.proven_with)
        if restless in known:
            return True
        is_enough = len(set(map(_values, self.proven_with))) >= _ENOUGH
        strange = self._strange(restless, habits, call)
        return any(_differ_in_places(restless, each, habits, strange, is_enough) for each in known)

    def _strange(self, restless: Restless, habits: Habits, call: Hashable) -> frozenset[str]:
        """Attributes whose tensors somebody else exchanges and this kind of call never looks at.

        It turns nothing itself, its graph touches none of them, and was equal to eager with others
        of the same layout in their place.
        """
        if not self.unread or not habits.turns_memories_alone(call):
            return frozenset()
        before = {name: (value, places) for name, value, places in self.captured_with}
        same = {name for name, value, _ in restless if before.get(name, ())[:1] == (value,)}
        return frozenset(
            name
            for each in self.proven_with
            for name, value, places in each
            if name in same & self.unread and value == before[name][0] and places != before[name][1]
        )

    def prove(self, restless: Restless) -> str | None:
        """It was equal to eager while they held this.

        Returns the attributes whose tensors lie elsewhere each time, where that will go on.
        """
        if restless in self.proven_with:
            return None
        self.proven_with.append(restless)
        alike = [each for each in self.proven_with if _values(each) == _values(restless)]
        if len(alike) <= _TIRED:
            return None
        moved = {
            mine[0]
            for each in alike
            for mine, theirs in zip(each, restless, strict=True)
            if mine != theirs
        }
        return ", ".join(sorted(name.lstrip(".") for name in moved))

    def is_proven_in_vain(self, replays: int, attempts: int) -> bool:
        """Whether it is compared again and again and never serves, although it is equal each time.

        The more `attempts` of this kind failed, the sooner.
        """
        self.in_vain = self.in_vain + 1 if replays == self.served else 1
        self.served = replays
        return self.in_vain > _IN_VAIN >> min(attempts, 2)

    def blamed(self, restless: Restless) -> frozenset[str]:
        """The attributes that held none of the values under which the graph was right or made."""
        known = {value for each in (self.captured_with, *self.proven_with) for value in each}
        return frozenset(value[0] for value in restless if value not in known)

    def is_as_captured(self, restless: Restless, *, writes: bool) -> bool:
        """Whether a pass does now what it did when the graph was captured, and writes nowhere else,
        where it `writes` to tensors of its module.
        """
        is_alike = not self.exchanges and _values(restless) == _values(self.captured_with)
        return is_alike and not (writes and restless != self.captured_with)

    def touches_elsewhere(self, restless: Restless) -> frozenset[str]:
        """Attributes that hold other tensors now than those that the graph touches."""
        places = {name: places for name, _, places in self.captured_with}
        moved = (name for name, _, now in restless if now != places.get(name, now))
        return frozenset(moved) & self.touched

    def left_otherwise(self, restless: Restless) -> list[str]:
        """The attributes that hold something else now than its own last pass left in them."""
        return [value[0] for value in restless if value not in self.left]

    def forget_graph(self) -> None:
        """There is no graph any longer."""
        self.doubted, self.captured_with = frozenset(), ()
        self.touched = self.unread = frozenset()
        self.exchanges = self.weighed = self.in_vain = self.served = 0
        self.proven_with.clear()


@dataclass(slots=True)
class _Habit:
    """`turned`: attributes that passes of one kind of call turned. `made`: memory that the last
    one put at each place of the module. `remade`: places at which one did so where another kind of
    call had taken that away. `is_barred`: they gave no graph, so that no compare tells what they
    read of what they turn.
    """

    turned: frozenset[str] = frozenset()
    made: dict[str, set[int]] = field(default_factory=dict)
    remade: frozenset[str] = frozenset()
    is_barred: bool = False


class Made(NamedTuple):
    """An object that has no key: its kind and what is in it, whichever object it is."""

    kind: tuple[str, str]
    content: bytes | None
    parts: tuple[tuple[str, Hashable], ...]


class Habits:
    """What the passes of each kind of call were seen to do to their module."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Habit] = {}

    def note(
        self,
        call: Hashable,
        turned: frozenset[str],
        exchange: Exchange = _NOTHING,
        doubted: frozenset[str] = frozenset(),
    ) -> None:
        """A pass of such a call left these attributes otherwise than it found them, and exchanged
        tensors. `doubted`: where another pass had taken what its graph reads.
        """
        lost, gained = exchange.lost, exchange.gained
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

    def turned(self, call: Hashable) -> frozenset[str]:
        """What passes of such a call were seen to turn."""
        known = self._known.get(call)
        return known.turned if known is not None else frozenset()

    def are_memories(self, names: Iterable[str]) -> bool:
        """Whether every call seen so far turns all of these where others left them otherwise: they
        are memories of the last call, and what a replay leaves in them does not matter. A switch
        that calls turn to and fro is none, and such calls give no graph.
        """
        wanted, known = frozenset(names), list(self._known.values())
        return not wanted or all(wanted <= each.turned and not each.is_barred for each in known)

    def judge(self, call: Hashable, *, is_proven: bool) -> None:
        """A graph of such a call was equal to eager, or none was possible."""
        if (known := self._known.get(call)) is not None:
            known.is_barred = not is_proven

    def turns_memories_alone(self, call: Hashable) -> bool:
        """Whether such a call was seen to turn nothing that another kind of call may read."""
        known = self._known.get(call)
        return known is not None and self.are_memories(known.turned)

    def forget_made(self) -> None:
        """Somebody else has exchanged what the module holds."""
        for habit in list(self._known.values()):
            habit.made, habit.remade = {}, frozenset()


def objects_among(restless: Restless) -> frozenset[str]:
    """The attributes that hold an object without a key."""
    return frozenset(name for name, value, _ in restless if _holds_made(value))


def _holds_made(value: Hashable) -> bool:
    if isinstance(value, Made):
        return True
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Made)


def _names(restless: Restless) -> list[str]:
    return [name for name, _, _ in restless]


def _values(restless: Restless) -> Hashable:
    """What the attributes hold, wherever that lies."""
    return tuple((name, value) for name, value, _ in restless)


def _differ_in_places(
    one: Restless, other: Restless, habits: Habits, strange: frozenset[str], is_enough: bool
) -> bool:
    """Whether two states differ only in where memories and strange tensors lie, and, where it is
    enough, in values.
    """
    if _names(one) != _names(other) or not (is_enough or _values(one) == _values(other)):
        return False
    pairs = zip(one, other, strict=True)
    moved = {mine[0] for mine, theirs in pairs if mine[2] != theirs[2]}
    return habits.are_memories(moved - strange)


@outside_modes
def restless_values(module: nn.Module, names: Iterable[str]) -> Restless:
    """What stands at each of the places now, by name: plain values, and where tensors lie."""
    return tuple((name, *_key(_at(module, name))) for name in sorted(names))


@outside_modes
def restless_storages(
    module: nn.Module, names: Iterable[str], device: torch.device
) -> dict[str, frozenset[int]]:
    """Of places that hold tensors of this device alone: the memory of each."""
    found: dict[str, frozenset[int]] = {}
    for name in names:
        tensors: list[Tensor] = []
        _frozen(_at(module, name), tensors)
        lying = [part for tensor in tensors for part in storage_parts(tensor)]
        keys = frozenset(map(storage_key, lying))
        if keys and 0 not in keys and all(part.device == device for part in lying):
            found[name] = keys
    return found


def _key(value: object) -> tuple[Hashable, tuple[Hashable, ...]]:
    found: list[Tensor] = []
    plain = _frozen(value, found)
    if not found:
        return plain, ()
    layouts, places = zip(*map(_layout_and_place, found), strict=True)
    return (plain, layouts), places


def _frozen(value: object, found: list[Tensor], depth: int = OBJECT_DEPTH) -> Hashable:
    """What the value is, without its tensors, which `found` holds then."""
    mine: list[Tensor] = []
    try:
        plain = freeze(value, mine, limit=LEAF_LIMIT)
    except UnknownLeaf:
        # one of its own in every pass, maybe, in which the parts have no name
        kind, inside = type(value), []
        if depth and not callable_only(value):
            inside = list(islice(parts(value), LEAF_LIMIT))
        items = tuple((way, _frozen(item, found, depth - 1)) for way, item in inside)
        return Made((kind.__module__, kind.__qualname__), raw(value), items)
    found.extend(mine)
    return plain


def _layout_and_place(tensor: Tensor) -> tuple[Hashable, Hashable]:
    key = tensor_key(tensor)
    if isinstance(key, tuple) and isinstance(key[0], int):
        return key[1:], key[0]
    return None, key  # of parts, or at no one place


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
