"""Owns `Signature`: the exact, hashable name of one call, and how two of them differ.

Must never know modules' weights, graphs or devices' state. The surprising fact: call style is
normalised away (positional, keyword and left-out defaults give one signature) but nothing else
is: `True`, `1` and `1.0` are three signatures, and None is not a tensor of zeros.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .ambient import changed_settings, outside_modes
from .buffers import same_view, skew_bytes, span_bytes
from .errors import ConfigError
from .tree import LeafKeys, UnknownLeaf, freeze, has_named_parts, has_own_key, untyped

__all__ = [
    "CallForm",
    "Signature",
    "TensorSpec",
    "names_of_different",
    "register_leaf",
    "registered_leaves",
    "sign",
]

_NUMBERS = (int, float)
_leaf_keys: dict[type, Callable[[object], Hashable]] = {}


def register_leaf(kind: type, key: Callable[[object], Hashable]) -> None:
    """From now on objects of exactly `kind` enter signatures as `key(object)`.

    `key` must return a hashable value that changes whenever the object would change the result.
    Raises `ConfigError` for no type or function, and for a type that is keyed by its values anyway.
    """
    if not isinstance(kind, type):
        raise ConfigError(f"register_leaf: expected a type, got {kind!r}")
    if not callable(key):
        raise ConfigError(f"register_leaf: expected a function as key, got {key!r}")
    if has_own_key(kind):
        raise ConfigError(
            f"register_leaf: {kind.__name__} is keyed by what it holds: register a type of your own"
        )
    _leaf_keys[kind] = key


def registered_leaves() -> LeafKeys:
    """The registered leaf types, as a read-only view."""
    return _leaf_keys


class TensorSpec(NamedTuple):
    """What a kernel sees of a tensor besides its values.

    `group`: the first leaf that is the same view of the same memory. `overlaps`: earlier leaves
    that share some of its memory, each with the distance in bytes. `skew`: bytes past alignment.
    `tracked`: it asks for gradients, which a forward may ask it even where none are on.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    group: int
    overlaps: tuple[tuple[int, int], ...] = ()
    skew: int = 0
    tracked: bool = False

    def __str__(self) -> str:
        size = "×".join(map(str, self.shape)) or "scalar"
        return f"{size} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """Equal exactly where one graph may serve both calls. Hash is computed once."""

    structure: Hashable
    tensors: tuple[TensorSpec, ...]
    ambient: Hashable
    extra: Hashable
    _hash: int
    _masked: Hashable = None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Signature)
            and self._hash == other._hash
            and self.structure == other.structure
            and self.tensors == other.tensors
            and self.ambient == other.ambient
            and self.extra == other.extra
        )

    def under(self, ambient: Hashable, extra: Hashable) -> Signature:
        """The same call under other ambient settings and module state."""
        value = hash((self.structure, self.tensors, ambient, extra))
        return Signature(self.structure, self.tensors, ambient, extra, value)

    @property
    def call(self) -> Hashable:
        """The call by itself, whatever the module and the settings are like."""
        return self.structure, self.tensors

    def looks_like(self, other: Signature) -> bool:
        """Whether the same values, sizes and dtypes stand in the arguments of both."""
        mine, theirs = ([(spec.shape, spec.dtype) for spec in s.tensors] for s in (self, other))
        return self.structure == other.structure and mine == theirs

    def argument_structure(self) -> Hashable:
        """The signature without sizes: what decides which code path the forward takes."""
        dtypes = tuple((spec.dtype, spec.device.type, len(spec.shape)) for spec in self.tensors)
        return self._without_values(), dtypes

    def without_numbers(self) -> Hashable:
        """The signature with every Python int and float leaf replaced by its type."""
        return (self._without_values(), self.tensors, self.ambient, self.extra)

    def _without_values(self) -> Hashable:
        if self._masked is None:
            object.__setattr__(self, "_masked", _mask(self.structure))
        return self._masked

    def numbers(self) -> tuple[object, ...]:
        """The Python int and float leaves, in order."""
        found: list[object] = []
        _collect_numbers(self.structure, found)
        return tuple(found)

    def describe(self) -> str:
        """The call in words: each argument with its shape and dtype, other leaves by value."""
        return ", ".join(f"{name} {text}" for name, text in self.leaves().items()) or "no args"

    def diff(self, other: Signature) -> list[str]:
        """One line per leaf or setting in which `other` differs from this signature."""
        mine, theirs = self.leaves(), other.leaves()
        lines = [
            f"{name}: {mine.get(name, 'absent')} → {theirs.get(name, 'absent')}"
            for name in [*mine, *(n for n in theirs if n not in mine)]
            if mine.get(name) != theirs.get(name)
        ]
        specs = zip(self.tensors, other.tensors, strict=False)
        if not lines and any(a.stride != b.stride for a, b in specs):
            lines.append("tensor strides differ")
        if not lines and self.tensors != other.tensors:
            lines.append("tensor devices, alignments, shared memory or requires_grad differ")
        if self.ambient != other.ambient:
            lines.append(f"settings: {changed_settings(self.ambient, other.ambient)}")
        if self.extra != other.extra:
            lines.append("module state (adapters, scales, processors or flags) differs")
        if not lines and self != other:
            lines.append("containers or None arguments differ")
        return lines

    def leaves(self) -> dict[str, str]:
        """Each leaf that has a name, in words."""
        found: dict[str, str] = {}
        _name_leaves(self.structure, "", iter(self.tensors), found)
        return found


def _mask(node: Hashable) -> Hashable:
    if isinstance(node, tuple):
        if len(node) == 2 and node[0] in _NUMBERS:
            kind: type = node[0]
            return kind
        return tuple(_mask(item) for item in node)
    return node


def _collect_numbers(node: Hashable, found: list[object]) -> None:
    if isinstance(node, tuple):
        if len(node) == 2 and node[0] in _NUMBERS:
            found.append(node[1])
            return
        for item in node:
            _collect_numbers(item, found)


def _name_leaves(
    node: Hashable, path: str, specs: Iterator[TensorSpec], found: dict[str, str]
) -> None:
    if node is Tensor:
        found[path] = str(next(specs))
        return
    if not (isinstance(node, tuple) and len(node) == 2 and isinstance(node[0], type)):
        return
    kind, value = node
    if kind in _leaf_keys:
        found[path] = str(untyped(value))
    elif has_named_parts(kind) and isinstance(value, tuple):
        for key, child in value:
            name = str(key[1] if isinstance(key, tuple) else key)
            _name_leaves(child, f"{path}.{name}" if path else name, specs, found)
    elif issubclass(kind, (tuple, list)) and kind is not torch.Size:
        for index, child in enumerate(value):
            _name_leaves(child, f"{path}[{index}]", specs, found)
    elif value is not None:
        found[path] = str(float.fromhex(value) if kind is float else value)


class CallForm:
    """The parameters of one forward; turns a call in any style into one canonical mapping."""

    __slots__ = ("_defaults", "_free_form", "_ignore", "_names")

    def __init__(self, fn: Callable[..., object], ignore: tuple[str, ...] = ()) -> None:
        try:
            parameters = tuple(inspect.signature(fn).parameters.values())
        except (TypeError, ValueError):  # a built-in one keeps them to itself
            parameters = (inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),)
        kinds = {p.kind for p in parameters}
        self._names = tuple(
            p.name
            for p in parameters
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY, p.POSITIONAL_ONLY)
        )
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)
        self._free_form = any(kind in kinds for kind in variadic)
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self._ignore = frozenset(ignore)

    def normalise(
        self, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """The call as (positional, named); named in parameter order, plain defaults left out."""
        if self._free_form or len(args) > len(self._names):
            return args, dict(kwargs)
        given = dict(zip(self._names, args, strict=False))
        if given and not given.keys().isdisjoint(kwargs):
            return args, dict(kwargs)  # a duplicate: the forward itself raises
        given.update(kwargs)
        named: dict[str, object] = {}
        for name in self._names:
            if name in given:
                value = given.pop(name)
                if not (name in self._defaults and self._is_default(name, value)):
                    named[name] = value
        named.update(given)
        return (), named

    def keyed(self, named: dict[str, object]) -> dict[str, object]:
        """The named arguments that can change the result."""
        if not self._ignore:
            return named
        return {name: value for name, value in named.items() if name not in self._ignore}

    def _is_default(self, name: str, value: object) -> bool:
        default = self._defaults[name]
        if value is None or type(value) is not type(default):
            return value is default
        if isinstance(value, float):  # 0.0 equals -0.0
            return value.hex() == float(default).hex()  # type: ignore[arg-type]
        return isinstance(value, (bool, int, str)) and value == default


def sign(
    call: object,
    ambient: Hashable,
    extra: Hashable,
    tensors: list[Tensor],
    *,
    names_generators: bool = True,
) -> Signature:
    """The signature of `call` (a tree); its tensors are appended to `tensors` in order.

    Without `names_generators` all generators of one device are the same argument: exact as long as
    nothing is drawn from them.

    Raises `tree.UnknownLeaf` for an argument without an exact key.
    """
    structure = freeze(call, tensors, _leaf_keys, names_generators=names_generators)
    try:
        specs = tuple(_specs(tensors))
    except RuntimeError:  # nested tensors have no size
        raise UnknownLeaf("tensor without a size") from None
    value = hash((structure, specs, ambient, extra))
    return Signature(structure, specs, ambient, extra, value)


@outside_modes
def _specs(tensors: list[Tensor]) -> list[TensorSpec]:
    storages: dict[int, list[int]] = {}
    specs: list[TensorSpec] = []
    for index, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided:
            raise UnknownLeaf(str(tensor.layout))
        if tensor.is_neg() or tensor.is_conj():  # its memory holds other values than it does
            raise UnknownLeaf("conjugate view (pass its resolve_conj() or resolve_neg())")
        spec = TensorSpec(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, index)
        pointer = tensor.untyped_storage().data_ptr()
        # nearly every tensor starts at an aligned address
        skew = skew_bytes(tensor) if tensor.data_ptr() & 255 else 0
        if skew:
            spec = spec._replace(skew=skew)
        if tensor.requires_grad:
            spec = spec._replace(tracked=True)
        if pointer:
            earlier = storages.setdefault(pointer, [])
            if earlier:
                spec = _related(spec, tensor, [(i, tensors[i]) for i in earlier])
            earlier.append(index)
        specs.append(spec)
    return specs


def names_of_different(signatures: list[Signature]) -> str:
    """The arguments that differ in each of these; the last call where none has a name."""
    leaves = [signature.leaves() for signature in signatures]
    names = [n for n in leaves[-1] if len({each.get(n) for each in leaves}) == len(leaves)]
    return ", ".join(names) or signatures[-1].describe()


def _related(spec: TensorSpec, tensor: Tensor, earlier: list[tuple[int, Tensor]]) -> TensorSpec:
    """`spec` with its ties to earlier leaves of the same storage."""
    overlaps: list[tuple[int, int]] = []
    for index, other in earlier:
        if same_view(tensor, other):
            return spec._replace(group=index)
        distance = tensor.data_ptr() - other.data_ptr()
        if -span_bytes(tensor) < distance < span_bytes(other):
            overlaps.append((index, distance))
    return spec._replace(overlaps=tuple(overlaps))
