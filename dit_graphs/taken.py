"""Owns entries that a forward takes out of lists and dicts it is given: a replay takes them too.

Must never know graphs. The surprising fact: the UNet of a T2I-Adapter pops every feature from its
list. Which entries go follows from the call's structure and plain values, which its signature
holds; anything else that is done to a container keeps the call eager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import cast

from torch import Tensor

from .signature import registered_leaves
from .tree import map_tensors, unchanged

__all__ = ["GIVEN_TWICE", "Taken", "entries_taken", "holds_twice", "reached", "repeatable", "take"]

GIVEN_TWICE = "a container that it was given twice loses entries"


@dataclass(frozen=True, slots=True)
class Taken:
    """`entries` (keys or indices) go from the container at `where`, a path of keys and indices."""

    where: tuple[object, ...]
    entries: tuple[object, ...]


def entries_taken(before: object, after: object) -> tuple[Taken, ...] | None:
    """What was taken out of the containers of a call; None where something else was done to one."""
    found: list[Taken] = []
    return tuple(found) if _walk(before, after, (), found) else None


def _walk(before: object, after: object, where: tuple[object, ...], found: list[Taken]) -> bool:
    """Inner containers come first in `found`: their paths hold until the outer ones change."""
    kind = type(before)
    if kind is not type(after) or kind not in (list, tuple, dict):
        return unchanged(before, after)
    if kind is dict:
        old, new = cast("dict[object, object]", before), cast("dict[object, object]", after)
        gone: tuple[object, ...] | None = tuple(key for key in old if key not in new)
        kept = [key for key in old if key in new]
        if kept != list(new):
            return False
        pairs = [(key, old[key], new[key]) for key in kept]
    else:
        items, left = cast("list[object]", before), cast("list[object]", after)
        gone, pairs = (), []
        if len(items) == len(left):
            pairs = [(i, *pair) for i, pair in enumerate(zip(items, left, strict=True))]
        else:
            gone = _gone(items, left) if kind is list else None
    if gone is None or not all(_walk(a, b, (*where, key), found) for key, a, b in pairs):
        return False
    if gone:
        found.append(Taken(where, gone))
    return True


def _gone(items: list[object], left: list[object]) -> tuple[int, ...] | None:
    """The indices of `items` without which `left` remains."""
    gone, matched = [], 0
    for index, item in enumerate(items):
        if matched < len(left) and unchanged(item, left[matched]):
            matched += 1
        else:
            gone.append(index)
    return tuple(gone) if matched == len(left) else None


def holds_twice(given: object) -> bool:
    """Whether one list or dict stands in two places: what goes from it is missing in both."""
    places = [id(value) for value in reached(given) if isinstance(value, (list, dict))]
    return len(places) != len(set(places))


def reached(given: object) -> Iterator[object]:
    """All values in lists, tuples and dicts, these among them, once for each of their places."""
    entered: set[int] = set()
    waiting = [given]
    while waiting:
        value = waiting.pop()
        yield value
        if isinstance(value, (list, tuple, dict)) and id(value) not in entered:
            entered.add(id(value))
            waiting.extend(value.values() if isinstance(value, dict) else value)


def take(taken: tuple[Taken, ...], given: object) -> None:
    """The containers of the call `given` lose what those of the captured one lost."""
    for one in taken:
        container = given
        for step in one.where:
            container = cast("dict[object, object]", container)[step]
        for entry in reversed(one.entries):
            del cast("dict[object, object]", container)[entry]


def repeatable(
    eager: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    taken: tuple[Taken, ...],
) -> Callable[[], object]:
    """The call, as often as wanted: on containers of its own where it takes something out."""
    if not taken:
        return partial(eager, *args, **kwargs)

    def call() -> object:
        opaque = registered_leaves()
        own = map_tensors((args, kwargs), _same, keep_unknown=True, opaque=opaque)
        own_args, own_kwargs = cast("tuple[tuple[object, ...], dict[str, object]]", own)
        return eager(*own_args, **own_kwargs)

    return call


def _same(tensor: Tensor) -> Tensor:
    return tensor
