"""Owns the one walk over argument and result structures: `leaves`, `map_tensors`, `freeze`.

Must never know signatures, graphs or models. The surprising fact: containers are rebuilt with
their own type (diffusers and transformers outputs are dicts that are also dataclasses), and an
object that is neither container, number, string nor tensor raises `UnknownLeaf` so that nothing
is ever compared by `id()` alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor, nn

__all__ = [
    "PLAIN",
    "SIMPLE",
    "Identity",
    "LeafKeys",
    "UnknownLeaf",
    "freeze",
    "has_named_parts",
    "has_own_key",
    "map_tensors",
    "register_parts",
    "tensor_leaves",
    "typed",
    "unchanged",
    "untyped",
]

LeafKeys = Mapping[type, Callable[[object], Hashable]]
_ORDINARY = (Tensor, nn.Parameter)
_NO_KEYS: LeafKeys = MappingProxyType({})
_CONTAINERS = (tuple, list, dict)
_SELF_KEYED = (torch.dtype, torch.device, torch.layout, torch.memory_format, range, type, bytes)
PLAIN = (bool, int, float, complex, str, type(None), *_SELF_KEYED, slice, Enum, torch.Size)
SIMPLE = frozenset({bool, int, str, type(None)})  # of which equal ones of one type are the same
_PASSED_ON = (*PLAIN, torch.Generator)


_known_by_parts: set[type] = set()


def register_parts(kind: type) -> None:
    """From now on an object of exactly `kind` is what its attributes are.

    It is compared by them and rebuilt from them, without its constructor. For plain holders of
    tensors; an object that holds anything else is unknown as before.
    """
    _known_by_parts.add(kind)


class UnknownLeaf(Exception):
    """An object without an exact key. `kind` is its type, or "size" past the leaf limit."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class Identity:
    """A hashable stand-in for an object compared by identity; holds it, so its id stays its own."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__} object>"


def freeze(
    value: object,
    tensors: list[Tensor],
    keys: LeafKeys = _NO_KEYS,
    limit: int = 4096,
    *,
    names_generators: bool = True,
    is_exact: bool = False,
) -> Hashable:
    """A hashable copy of `value`'s structure and Python leaves; tensors go to `tensors` in order.

    `True`, `1` and `1.0` freeze differently, as do `0.0` and `-0.0`. Raises `UnknownLeaf`, for
    arguments and with `is_exact` also for a container that holds more than its parts.
    """
    is_exact = is_exact or keys is not _NO_KEYS
    try:
        return _Freezer(tensors, keys, limit, names_generators, is_exact).walk(value)
    except RecursionError:  # a container that holds itself
        raise UnknownLeaf("size") from None


def has_own_key(kind: type) -> bool:
    """Whether `freeze` knows objects of `kind` by what they hold: no other key would be read, or
    it would be read for every container of a call.
    """
    return issubclass(kind, Tensor) or kind in (bool, int, float, str, type(None), *_CONTAINERS)


def has_named_parts(kind: type) -> bool:
    """Whether an object of `kind` is frozen as pairs of a name and a part."""
    return issubclass(kind, Mapping) or dataclasses.is_dataclass(kind) or kind in _known_by_parts


def typed(key: Hashable) -> Hashable:
    """A key of a user's own making, in which 1, 1.0 and True differ, as do 0.0 and -0.0."""
    if isinstance(key, tuple):
        return (type(key), *map(typed, key))
    return (type(key), key.hex() if isinstance(key, float) else key)


def untyped(frozen: Hashable) -> object:
    """The key that `typed` was given, for people to read."""
    kind, *values = cast("tuple[type, Hashable]", frozen)
    if issubclass(kind, tuple):
        return tuple(map(untyped, values))
    return float.fromhex(cast(str, values[0])) if issubclass(kind, float) else values[0]


class _Freezer:
    __slots__ = ("budget", "is_exact", "keys", "names_generators", "tensors")

    def __init__(
        self,
        tensors: list[Tensor],
        keys: LeafKeys,
        limit: int,
        names_generators: bool,
        is_exact: bool,
    ) -> None:
        self.tensors = tensors
        self.keys = keys
        self.budget = limit
        self.names_generators = names_generators
        self.is_exact = is_exact

    def walk(self, value: object) -> Hashable:
        self.budget -= 1
        if self.budget < 0:
            raise UnknownLeaf("size")
        kind = type(value)
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return Tensor if kind in _ORDINARY else (Tensor, kind)
        if value is None or kind is bool or kind is str or kind is int:
            return (kind, value)
        if kind is float:
            return (float, value.hex())  # type: ignore[attr-defined]
        if kind in self.keys:
            return (kind, typed(self.keys[kind](value)))
        if kind is tuple or kind is list:
            return (kind, tuple(map(self.walk, value)))  # type: ignore[call-overload]
        if kind is dict or isinstance(value, Mapping):
            if kind is not dict:
                self.check(value)
            return (kind, tuple((self.key(k), self.walk(v)) for k, v in value.items()))  # type: ignore[attr-defined]
        if isinstance(value, (tuple, list)):
            self.check(value)
            return (kind, tuple(map(self.walk, value)))
        return self.rare(kind, value)

    def check(self, value: object) -> None:
        """A container of a type of its own must be no more than its parts."""
        if self.is_exact and _holds_more(value):
            kind = type(value)
            raise UnknownLeaf(f"{kind.__module__}.{kind.__qualname__} with more than its parts")

    def key(self, value: object) -> Hashable:
        return value if type(value) is str else self.walk(value)

    def rare(self, kind: type, value: object) -> Hashable:
        if isinstance(value, Enum):
            return (kind, value.name)
        if isinstance(value, _SELF_KEYED):
            return (kind, value)
        if isinstance(value, complex):
            return (kind, value.real.hex(), value.imag.hex())
        if isinstance(value, slice):
            return (kind, self.walk((value.start, value.stop, value.step)))
        if isinstance(value, torch.Generator):
            return (kind, Identity(value) if self.names_generators else str(value.device))
        if isinstance(value, (int, str)):  # subclasses: numpy integers are not among them
            return (kind, repr(value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            self.check(value)
            names = [f.name for f in dataclasses.fields(value)]
            return (kind, tuple((n, self.walk(getattr(value, n))) for n in names))
        if kind in _known_by_parts:
            return (kind, tuple((n, self.walk(v)) for n, v in vars(value).items()))
        if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
            raw = getattr(value, "tobytes", None)
            if raw is not None:
                return (kind, raw())
        raise UnknownLeaf(f"{kind.__module__}.{kind.__qualname__}")


def _holds_more(value: object) -> bool:
    """Whether a container has attributes that it is not made from."""
    own = getattr(value, "__dict__", {})
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return not all(f.init for f in fields) or not own.keys() <= {f.name for f in fields}
    is_mapping = isinstance(value, Mapping)
    return any(not (is_mapping and value.get(name) is held) for name, held in own.items())  # type: ignore[attr-defined]


def map_tensors(
    value: object,
    fn: Callable[[Tensor], object],
    *,
    keep_unknown: bool = False,
    opaque: LeafKeys = _NO_KEYS,
) -> object:
    """`value` rebuilt with every tensor replaced by `fn(tensor)`, depth first, in freeze order.

    Objects of a type in `opaque` pass through untouched. Any other object that cannot be taken
    apart raises `UnknownLeaf`, or passes through with `keep_unknown`. A container that its
    constructor does not make of its parts raises always.
    """

    return _Mapper(fn, opaque, keep_unknown).walk(value)


class _Mapper:
    # no closure that calls itself: its cycle would keep tensors until the collector runs
    __slots__ = ("fn", "keep_unknown", "opaque")

    def __init__(
        self, fn: Callable[[Tensor], object], opaque: LeafKeys, keep_unknown: bool
    ) -> None:
        self.fn = fn
        self.opaque = opaque
        self.keep_unknown = keep_unknown

    def walk(self, node: object) -> object:
        if isinstance(node, Tensor):
            return self.fn(node)
        kind = type(node)
        if kind in self.opaque:
            return node
        if kind is tuple or kind is list:
            return kind(map(self.walk, node))  # type: ignore[call-overload]
        if kind is dict:
            return {k: self.walk(v) for k, v in node.items()}  # type: ignore[attr-defined]
        if isinstance(node, _PASSED_ON):
            return node
        if isinstance(node, Mapping):
            items = {k: self.walk(v) for k, v in node.items()}
            by_name = dataclasses.is_dataclass(kind)
            return _rebuilt(kind, kind, **items) if by_name else _rebuilt(kind, kind, items)
        if isinstance(node, (tuple, list)):
            parts = [self.walk(v) for v in node]
            return _rebuilt(kind, getattr(kind, "_make", kind), parts)
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            names = [f.name for f in dataclasses.fields(node) if f.init]
            return _rebuilt(kind, kind, **{n: self.walk(getattr(node, n)) for n in names})
        if kind in _known_by_parts:
            whole = object.__new__(kind)
            vars(whole).update({n: self.walk(v) for n, v in vars(node).items()})
            return whole
        if self.keep_unknown:
            return node
        raise UnknownLeaf(f"{kind.__module__}.{kind.__qualname__}")


def _rebuilt(kind: type, make: Callable[..., object], *parts: object, **named: object) -> object:
    """The container made of its parts. Raises `UnknownLeaf` where it then holds anything else."""
    try:
        whole = make(*parts, **named)
        by_name = named and not isinstance(whole, Mapping)
        held = {name: getattr(whole, name) for name in named} if by_name else whole
        is_same = unchanged(named or next(iter(parts), {}), held)
    except Exception:  # whatever a stranger's constructor raises
        is_same = False
    if not is_same:
        raise UnknownLeaf(f"{kind.__module__}.{kind.__qualname__}")
    return whole


def tensor_leaves(value: object) -> list[Tensor]:
    """Every tensor in `value`, in freeze order. Raises `UnknownLeaf`."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, keep)
    return found


def unchanged(before: object, after: object) -> bool:
    """Whether containers still hold the very same leaves."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return list(before) == list(after) and all(
            unchanged(value, after[key]) for key, value in before.items()
        )
    if isinstance(before, (list, tuple)) and isinstance(after, (list, tuple)):
        return len(before) == len(after) and all(map(unchanged, before, after))
    if dataclasses.is_dataclass(before) and type(before) is type(after):
        names = [field.name for field in dataclasses.fields(before)]
        return all(unchanged(getattr(before, n), getattr(after, n)) for n in names)
    if type(before) in _known_by_parts and type(before) is type(after):
        return unchanged(vars(before), vars(after))
    return before is after
