"""Owns what the restless attributes of a module hold: those that are no part of the key.

Must never know graphs. The surprising fact: a replay asks this, so attributes are looked up by the
names that a sweep gave them, and nothing is swept. A name that does not lead there by itself (a key
that is no literal, an item of a set, the class of an object in an attribute) must stay in the key.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Hashable, Iterable
from functools import lru_cache
from itertools import islice
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

from .ambient import outside_modes
from .class_facts import ClassFacts, class_name
from .module_state import OBJECT_DEPTH, tensor_key
from .op_traits import storage_key, storage_parts
from .parts import LEAF_LIMIT, behind, callable_only, members, own_dict, parts, raw
from .tree import SIMPLE, UnknownLeaf, freeze

__all__ = [
    "Contents",
    "Restless",
    "can_find",
    "objects_among",
    "restless_storages",
    "restless_values",
]

# per attribute: its name, what it is (a plain value, layouts of tensors), where its tensors lie
Restless: TypeAlias = "tuple[tuple[str, Hashable, tuple[Hashable, ...]], ...]"

_STEP = re.compile(r"\.?([^.\[\]]+)|\[([^\]]+)\]")
_GONE = ("nothing is found there",)


class Contents(NamedTuple):
    """What an object without a key is: its kind and its parts, whichever object it is."""

    kind: tuple[str, str]
    raw: bytes | None
    parts: tuple[tuple[str, Hashable], ...]


@outside_modes
def restless_values(module: nn.Module, names: Iterable[str]) -> Restless:
    """What the attributes of these names hold now, in the order of their names."""
    return tuple((name, *_key(_at(module, name))) for name in sorted(names))


class _Shared(NamedTuple):
    """A class of the tree's, under the name of what all its objects share."""

    kind: type


@outside_modes
def restless_storages(
    module: nn.Module, names: Iterable[str], device: torch.device
) -> dict[str, frozenset[int]]:
    """The memory of each attribute that holds tensors, all of this device and each at one place."""
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
    if value is _GONE:
        return _GONE, ()
    if isinstance(value, _Shared):
        facts = ClassFacts.of(value.kind)
        return Contents(_named(value.kind), None, tuple(("", fact) for fact in facts)), ()
    kind = type(value)  # the commonest first: every replay asks
    if kind in SIMPLE:
        return (kind, value), ()
    if isinstance(value, Tensor) and kind is Tensor:
        layout, place = _layout_and_place(value)
        return (Tensor, (layout,)), (place,)
    found: list[Tensor] = []
    plain = _frozen(value, found)
    if not found:
        return plain, ()
    layouts, places = zip(*map(_layout_and_place, found), strict=True)
    return (plain, layouts), places


def _named(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


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
        return Contents(_named(kind), raw(value), items)
    found.extend(mine)
    return plain


def _layout_and_place(tensor: Tensor) -> tuple[Hashable, Hashable]:
    key = tensor_key(tensor)
    if isinstance(key, tuple) and isinstance(key[0], int):
        return key[1:], key[0]
    return None, key  # of parts, or at no one place


def objects_among(restless: Restless) -> frozenset[str]:
    """The attributes that hold an object without a key."""
    return frozenset(name for name, value, _ in restless if _holds_object(value))


def _holds_object(value: Hashable) -> bool:
    if isinstance(value, Contents):
        return True
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Contents)


@lru_cache(maxsize=4096)
def _steps(name: str) -> tuple[tuple[str, object], ...] | None:
    """The way to the attribute that a sweep calls `name`: attributes, and keys of containers.

    None where the name does not tell, because something stands under a key that is no literal.
    """
    matches = list(_STEP.finditer(name))
    if "".join(each[0] for each in matches) != name:
        return None
    try:
        return tuple((each[1] or "", each[2] and literal_eval(each[2])) for each in matches)
    except (ValueError, SyntaxError):
        return None


@outside_modes
def can_find(module: nn.Module, name: str) -> bool:
    """Whether something stands there now, and is found without a sweep."""
    return _at(module, name) is not _GONE


def _at(module: nn.Module, name: str) -> object:
    """What the attribute holds that a sweep calls `name`; `_GONE` where that is not found."""
    if name.startswith("class "):
        kinds = dict.fromkeys(map(type, module.modules()))
        return next((_Shared(kind) for kind in kinds if class_name(kind) == name), _GONE)
    found: object = module
    steps = _steps(name)
    if steps is None:
        return _GONE
    for attribute, key in steps:
        if isinstance(found, nn.Module) and attribute in found._modules:
            found = found._modules[attribute]
            continue
        try:
            if attribute:
                own = own_dict(found) or {}
                is_member = attribute not in own and attribute in members(found)
                found = getattr(found, attribute) if is_member else own[attribute]
            else:
                found = cast("dict[object, object]", behind(found))[key]
        except (LookupError, TypeError, AttributeError):
            return _GONE
    return found
