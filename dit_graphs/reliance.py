"""Owns what a graph relies on of the state that forwards leave in their module for later calls.

Must never know how graphs are made. The words: a *restless* attribute is one that forwards changed
so often that it left the key. It is a *memory* where every kind of call makes it anew for itself,
like a table for the last size; a *kind of call* is a signature without the module's state.

The surprising fact: most of what a forward leaves is a memory, and a graph stays right whoever
exchanges that. A call that reads what *another* kind of call left looks the same from outside. Two
things tell it: its own pass does not make anew what another pass took away, and its result changes
with it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from .module_state import Exchange
from .restless import Restless

__all__ = ["Habits", "Reliance"]

_NOTHING = Exchange()
_MOST_CALLS = 2048
_ENOUGH = 8  # values of an attribute under which a graph was right: it does not read that one
_TIRED = 3  # compares in a row of which only the places of tensors were new
_MOST_STATES = 64  # compared ones that a graph remembers
_IN_VAIN = 12  # compares without a replay between them


@dataclass(slots=True)
class Reliance:
    """What one signature's graph was captured, compared and left with.

    `doubted`: places from which another pass took memory that the graph reads. `exchanges`: how
    often other passes exchanged tensors of the module since the capture, and `weighed`: how many of
    these came before its last compare began. `touched`: restless attributes whose tensors the graph
    reads, writes or hands out; `untouched`: those of which it certainly does none of that.

    `captured_with`, `proven_with`, `left`: what restless attributes held at the capture, before
    each compare that was equal, and after the last eager pass of this signature. `in_vain`: equal
    compares since its last replay, which was number `served`.
    """

    doubted: frozenset[str] = frozenset()
    exchanges: int = 0
    weighed: int = 0
    captured_with: Restless = ()
    touched: frozenset[str] = frozenset()
    untouched: frozenset[str] = frozenset()
    left: Restless = ()
    proven_with: list[Restless] = field(default_factory=list)
    in_vain: int = 0
    served: int = 0

    def is_known_with(self, restless: Restless, habits: Habits, call: Hashable) -> bool:
        """Whether the graph may serve while the restless attributes hold this.

        It may where they held the same at its capture or in an equal compare. Two differences from
        that do not matter. One is where a memory lies, or a tensor that only stands by. The other
        is an attribute of which many values were compared, while the rest was as it is now.
        """
        proven = tuple(self.proven_with)  # other threads compare, too
        known = (self.captured_with, *proven)
        if restless in known:
            return True
        differing = [_differing(restless, each) for each in known]
        return any(
            names is not None
            and _is_indifferent_to(names, proven, differing[1:])
            and self._may_lie_elsewhere(_moved(restless, each), restless, names, habits, call)
            for each, names in zip(known, differing, strict=True)
        )

    def _may_lie_elsewhere(
        self,
        moved: frozenset[str],
        restless: Restless,
        names: frozenset[str],
        habits: Habits,
        call: Hashable,
    ) -> bool:
        """Whether the places of these do not matter; the values of `names` are known not to."""
        if habits.are_memories(moved):
            return True
        is_bystander = self.untouched and habits.changes_memories_alone(call)
        return bool(is_bystander) and habits.are_memories(moved - self._stand_by(restless, names))

    def _stand_by(self, restless: Restless, names: frozenset[str]) -> frozenset[str]:
        """Attributes whose tensors the graph touches none of, and that were compared while other
        tensors stood there: of the layout at the capture and now, or any where that is in `names`.
        """
        before = {name: (value, places) for name, value, places in self.captured_with}
        same = {name for name, value, _ in restless if before.get(name, ())[:1] == (value,)}
        untouched = self.untouched & before.keys()  # other threads may let go of the graph
        return frozenset(
            name
            for each in tuple(self.proven_with)
            for name, value, places in each
            if name in untouched
            and places != before[name][1]
            and (name in names or (name in same and value == before[name][0]))
        )

    def prove(self, restless: Restless) -> str | None:
        """The graph was equal to eager while the attributes held this.

        Returns those that ask for one compare after the other, where no end of that is seen.
        """
        if restless in self.proven_with:
            return None
        self.proven_with.append(restless)
        alike = [each for each in self.proven_with if _values(each) == _values(restless)]
        if len(alike) <= _TIRED and len(self.proven_with) <= _MOST_STATES:
            return None
        compared = alike if len(alike) > _TIRED else self.proven_with
        other = {held[0] for each in compared for held in each if held not in restless}
        return ", ".join(sorted(name.lstrip(".") for name in other))

    def is_proven_in_vain(self, replays: int, attempts: int) -> bool:
        """Whether it is compared again and again and never serves, although it is equal each time.

        The more `attempts` of this kind failed, the sooner.
        """
        self.in_vain = self.in_vain + 1 if replays == self.served else 1
        self.served = replays
        return self.in_vain > _IN_VAIN >> min(attempts, 2)

    def blamed(self, restless: Restless) -> frozenset[str]:
        """The attributes that may be why the graph is wrong: they hold now what they held neither
        at the capture nor in a compare. Those that held many values meanwhile come last.
        """
        proven = [held for each in tuple(self.proven_with) for held in each]
        new = frozenset(held[0] for held in restless if held not in (*self.captured_with, *proven))
        tried = {name: {held[1] for held in proven if held[0] == name} for name in new}
        unlikely = {name for name, values in tried.items() if len(values) >= _ENOUGH}
        return new - unlikely or new

    def is_as_captured(self, restless: Restless, *, writes: bool) -> bool:
        """Whether an eager pass would do now what it did at the capture.

        Where it `writes` to tensors of its module, it must also find them where they lay.
        """
        is_alike = not self.exchanges and _values(restless) == _values(self.captured_with)
        return is_alike and not (writes and restless != self.captured_with)

    def touches_elsewhere(self, restless: Restless) -> frozenset[str]:
        """The attributes whose tensors the graph touches, and that hold others now."""
        places = {name: places for name, _, places in self.captured_with}
        moved = (name for name, _, now in restless if now != places.get(name, now))
        return frozenset(moved) & self.touched

    def left_otherwise(self, restless: Restless) -> list[str]:
        """The attributes that hold something else now than this signature's last pass left."""
        left = {held[0]: held for held in self.left}
        return [held[0] for held in restless if held != left.get(held[0])]

    def forget_graph(self) -> None:
        """There is no graph any longer."""
        self.doubted, self.captured_with = frozenset(), ()
        self.touched = self.untouched = frozenset()
        self.exchanges = self.weighed = self.in_vain = self.served = 0
        self.proven_with.clear()


@dataclass(slots=True)
class _Habit:
    """What passes of one kind of call did to their module.

    `changed`: attributes that some of them changed. `made`: the memory that the last one put at
    each place. `remade`: places that one filled again after another kind of call had taken what
    stood there. `is_barred`: they have no graph, so no compare shows what they read.
    """

    changed: frozenset[str] = frozenset()
    made: dict[str, set[int]] = field(default_factory=dict)
    remade: frozenset[str] = frozenset()
    is_barred: bool = False

    @property
    def memories(self) -> frozenset[str]:
        """The attributes that may be memories, as far as such calls tell."""
        return frozenset() if self.is_barred else self.changed


class Habits:
    """What the passes of each kind of call were seen to do to their module."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Habit] = {}
        self._forgotten: list[frozenset[str]] = []  # the memories of those there was no room for
        # every replay asks, in any thread: found once, and anew where the stamp is another
        self._stamp = object()
        self._memories: tuple[object, frozenset[str]] = (None, frozenset())

    def note(
        self,
        call: Hashable,
        changed: frozenset[str],
        exchange: Exchange = _NOTHING,
        doubted: frozenset[str] = frozenset(),
    ) -> None:
        """A pass of such a call changed these attributes and exchanged these tensors.

        `doubted`: places from which another pass had taken what the graph of such a call reads.
        """
        lost, gained = exchange.lost, exchange.gained
        is_new = call not in self._known
        habit = self._known.setdefault(call, _Habit())
        for place in set(gained.values()):
            found = {key for key, where in lost.items() if where == place}
            mine = habit.made.get(place, set())
            if found and (place in doubted or (mine and mine.isdisjoint(found))):
                habit.remade |= {place}
            habit.made[place] = {key for key, where in gained.items() if where == place}
        if is_new or not changed <= habit.changed:
            habit.changed |= changed
            self._stamp = object()
        if len(self._known) > _MOST_CALLS:
            oldest = self._known.pop(next(iter(self._known)), _Habit())
            self._forgotten = [frozenset.intersection(oldest.memories, *self._forgotten)]

    def remade(self, call: Hashable) -> frozenset[str]:
        """Places that such a call fills by itself after another one has taken what stood there."""
        known = self._known.get(call)
        return known.remade if known is not None else frozenset()

    def changed(self, call: Hashable) -> frozenset[str]:
        """The attributes that passes of such a call were seen to change."""
        known = self._known.get(call)
        return known.changed if known is not None else frozenset()

    def are_memories(self, names: Iterable[str]) -> bool:
        """Whether every kind of call seen so far changes all of these: then each makes them anew
        for itself, and what a replay leaves in them does not matter.

        Not so where one of those kinds has no graph: it may turn a switch by what it finds.
        """
        if not (wanted := frozenset(names)):
            return True
        stamp, memories = self._memories
        if stamp is not self._stamp:
            stamp = self._stamp
            each = [habit.memories for habit in list(self._known.values())] + self._forgotten
            memories = frozenset.intersection(*each) if each else frozenset()
            self._memories = stamp, memories
        return wanted <= memories

    def judge(self, call: Hashable, *, is_proven: bool) -> None:
        """A graph of such a call was equal to eager, or none was possible."""
        known = self._known.get(call)
        if known is not None and known.is_barred == is_proven:
            known.is_barred = not is_proven
            self._stamp = object()

    def changes_memories_alone(self, call: Hashable) -> bool:
        """Whether such a call was seen to change nothing that another kind of call may read."""
        known = self._known.get(call)
        return known is not None and self.are_memories(known.changed)

    def forget_made(self) -> None:
        """Somebody else has exchanged what the module holds."""
        for habit in list(self._known.values()):
            habit.made, habit.remade = {}, frozenset()


def _values(restless: Restless) -> Hashable:
    """What the attributes hold, wherever that lies."""
    return tuple((name, value) for name, value, _ in restless)


def _differing(one: Restless, other: Restless) -> frozenset[str] | None:
    """Names of the attributes whose values differ; None where these are not the same attributes."""
    if len(one) != len(other):
        return None
    found = []
    for (name, mine, _), (other_name, theirs, _) in zip(one, other, strict=True):
        if name != other_name:
            return None
        if mine != theirs:
            found.append(name)
    return frozenset(found)


def _moved(one: Restless, other: Restless) -> frozenset[str]:
    """Names of the attributes whose tensors lie at other places, in two states of the same ones."""
    pairs = zip(one, other, strict=True)
    return frozenset(mine[0] for mine, theirs in pairs if mine[2] != theirs[2])


def _is_indifferent_to(
    names: frozenset[str], proven: Iterable[Restless], differing: Iterable[frozenset[str] | None]
) -> bool:
    """Whether of each of these attributes many values were compared while the others held what they
    hold now. `differing`: of each compared state the attributes that held another value.
    """
    if not names:
        return True
    seen: dict[str, set[Hashable]] = {name: set() for name in names}
    for each, others in zip(proven, differing, strict=True):
        if others is not None and others <= names:
            for name, value, _ in each:
                if name in seen:
                    seen[name].add(value)
    return all(len(values) >= _ENOUGH for values in seen.values())
