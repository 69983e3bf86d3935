"""Owns the fingerprint of a module tree: its weights' addresses and its plain Python state.

Must never know what a hook or processor means. The surprising fact: IP-Adapter scales, FreeU
factors and attention processors live in ordinary Python attributes that no argument shows, so
every number, string and container of them in the tree belongs to a graph's key.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from .ambient import outside_modes
from .class_facts import ClassFacts, class_name
from .op_traits import storage_key
from .parts import CONTAINERS, LEAF_LIMIT, STRUCTURE, behind, callable_only, parts, raw
from .tree import PLAIN, SIMPLE, Identity, UnknownLeaf, freeze

__all__ = [
    "HIDDEN_DEPTH",
    "HOOK_TABLES",
    "OBJECT_DEPTH",
    "Exchange",
    "ModuleState",
    "derived_names",
    "is_ours",
    "sweep",
    "tensor_key",
    "weight_keys",
]

_INTERNAL = frozenset(torch.nn.Module().__dict__) - {"training"} | {"_compiled_call_impl"}
HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks")
HIDDEN_DEPTH = 1  # a layer in a list, or whose method stands in for a forward
OBJECT_DEPTH = 3  # processor.options.limits.scale is looked at, one more is not


@dataclass(frozen=True, slots=True)
class Exchange:
    """Which tensors outside weights and buffers a module holds no longer, or in addition.

    `lost` and `gained`: the storage of each such tensor, with the place of one of them. A tensor
    counts as another where address, dtype, shape or strides differ, so that a storage may be both.
    `moved`: places whose tensor is gone or another one now.
    """

    lost: Mapping[int, str] = field(default_factory=dict)
    gained: Mapping[int, str] = field(default_factory=dict)
    moved: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ModuleState:
    """`weights`: what a graph's baked addresses point at. `python`: what picks its kernels."""

    weights: tuple[Hashable, ...]
    caches: tuple[tuple[Hashable, int], ...]
    python: tuple[tuple[str, ...], tuple[type | None, ...], tuple[Hashable, ...]]
    hooked: tuple[str, ...]
    compiled: tuple[str, ...]
    devices: frozenset[torch.device]
    cache_tensors: tuple[Tensor, ...] = field(compare=False)  # `==` of tensors is a tensor
    cache_places: tuple[str, ...] = field(compare=False)

    def changed_attributes(self, other: ModuleState) -> frozenset[str]:
        """Names of the attributes that differ between two sweeps, in value or in where a tensor of
        theirs lies.
        """
        mine, theirs = self.by_name(), other.by_name()
        names = mine.keys() | theirs.keys()
        return frozenset(n for n in names if mine.get(n) != theirs.get(n))

    def exchanged(self, now: ModuleState) -> Exchange:
        """What stood in caches here and does not now, and the other way round."""
        mine, theirs = self._by_place(), now._by_place()
        moved = frozenset(place for place, key in mine.items() if theirs.get(place) != key)
        return Exchange(self._beside(now), now._beside(self), moved)

    def _beside(self, other: ModuleState) -> dict[int, str]:
        theirs = {key for key, _ in other.caches}
        mine = zip(self.caches, self.cache_tensors, self.cache_places, strict=True)
        return {storage_key(each): place for (key, _), each, place in mine if key not in theirs}

    def _by_place(self) -> dict[str, Hashable]:
        return {place: key for place, (key, _) in zip(self.cache_places, self.caches, strict=True)}

    def placeless(self) -> str | None:
        """The layout of a tensor that lies at no one place, where the module holds any."""
        keys = (*self.weights, *(key for key, _ in self.caches))
        return next((key.layout for key in keys if isinstance(key, Placeless)), None)

    def by_name(self) -> dict[str, object]:
        """The attributes, each with its kind and where its tensors lie."""
        tensors: dict[str, list[Hashable]] = {}
        for place, key in self._by_place().items():
            tensors.setdefault(place.rpartition(" ")[0], []).append(key)
        plain = {
            name: (kind, value, *tensors.pop(name, ()))
            for name, kind, value in zip(*self.python, strict=True)
        }
        return {**plain, **tensors}


class Placeless(NamedTuple):
    """The key of a tensor that lies at no one place: a sparse or nested one, one of MKL-DNN's."""

    layout: str
    tensor: Identity


def tensor_key(tensor: Tensor) -> Hashable:
    """Address, dtype and layout of a tensor; subclasses by their inner tensors."""
    if type(tensor) in (Tensor, nn.Parameter):
        try:
            return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        except RuntimeError:
            return Placeless(str(tensor.layout), Identity(tensor))
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return (type(tensor), tensor.data_ptr(), tensor.dtype, tensor.shape)
    names, context = flatten()
    inner = tuple(tensor_key(getattr(tensor, name)) for name in names)
    return (type(tensor), inner, repr(context))


def _host_version(tensor: Tensor, devices: set[torch.device]) -> int:
    """Counts writes to a host tensor of a module on a device: graphs hold its values baked."""
    on_host = tensor.device.type == "cpu" and any(device.type != "cpu" for device in devices)
    return tensor._version if on_host and not tensor.is_inference() else 0


def _own_weights(module: nn.Module) -> Iterator[Tensor]:
    for table in (module._parameters, module._buffers):
        yield from (tensor for tensor in table.values() if tensor is not None)


@outside_modes
def weight_keys(module: nn.Module) -> tuple[Hashable, ...]:
    """Where the weights of the whole tree lie now, as in `ModuleState.weights`."""
    return tuple(tensor_key(t) for child in module.modules() for t in _own_weights(child))


def derived_names(module: nn.Module) -> frozenset[str]:
    """Attributes that a hook computes from weights before every forward: normalised weights."""
    hooks = module._forward_pre_hooks.values()
    return frozenset(hook.name for hook in hooks if type(hook) is WeightNorm)


class _Sweep:
    def __init__(self, volatile: frozenset[str]) -> None:
        self.volatile = volatile
        self.weights: list[Hashable] = []
        self.caches: list[Tensor] = []
        self.places: list[str] = []
        # three flat lists: a tuple per attribute would set off the garbage collector, whose passes
        # over torch's heap take longer than the whole sweep
        self.names: list[str] = []
        self.kinds: list[type | None] = []
        self.values: list[Hashable] = []
        self.hooked: list[str] = []
        self.compiled: list[str] = []
        self.devices: set[torch.device] = set()
        self.seen: set[int] = set()
        self.paths: dict[int, str] = {}
        self.hidden: list[tuple[str, nn.Module]] = []  # held by an attribute, not registered
        # by identity, which holds while the value is kept here
        self.frozen: dict[int, tuple[object, tuple[Hashable, list[Tensor]] | None]] = {}
        self.classes: dict[type, None] = {}

    def tree(self, path: str, module: nn.Module, *, is_hidden: bool = False) -> None:
        """Visits a module and those registered below it, each once."""
        found: list[tuple[str, nn.Module | str]] = []
        self.collect(path, module, found)
        for where, child in found:
            if isinstance(child, str):
                self.note(f"{where}.is", child)
            else:
                self.visit(where, child, is_hidden)

    def collect(
        self, path: str, module: nn.Module, found: list[tuple[str, nn.Module | str]]
    ) -> None:
        if id(module) in self.paths:  # one layer at two places
            found.append((path, self.paths[id(module)]))
            return
        self.paths[id(module)] = path
        found.append((path, module))
        for name, child in module._modules.items():
            if child is not None:
                self.collect(f"{path}.{name}" if path else name, child, found)

    def visit(self, path: str, module: nn.Module, is_hidden: bool) -> None:
        attributes = module.__dict__
        impl = attributes.get("_compiled_call_impl")
        if "_orig_mod" in module._modules or not getattr(impl, "keeps_eager", impl is None):
            self.compiled.append(path or "the module itself")
        # of a module without weights only its identity tells Tanh from Sigmoid
        bare = not (module._parameters or module._buffers or module._modules)
        self.note(f"{path}.type", Identity(module if bare else type(module)))
        self.classes[type(module)] = None
        self.note(
            f"{path}.weights", " ".join([*module._parameters.keys(), *module._buffers.keys()])
        )
        own = list(_own_weights(module))
        if is_hidden:  # whose device is its own business
            self.keep(f"{path}.weights", own)
        else:
            self.weights.extend(map(tensor_key, own))
            self.devices.update(tensor.device for tensor in own)
        for table in filter(attributes.get, HOOK_TABLES):
            hooks = tuple(Identity(hook) for hook in attributes[table].values())
            if any(type(hook.value) is not WeightNorm for hook in hooks):
                self.hooked.append(path or "the module itself")
            self.note(f"{path}.{table}", hooks)
        derived = derived_names(module) if module._forward_pre_hooks else ()
        for name, value in attributes.items():
            if name in _INTERNAL or name in derived:
                continue
            full = f"{path}.{name}"
            kind = _plain_kind(value)
            if kind is None:
                self.attribute(full, value)
            elif full not in self.volatile:
                self.note(full, value, kind)

    def note(self, name: str, value: Hashable, kind: type | None = None) -> None:
        """One plain fact. `kind` tells apart values that are equal and of different types."""
        self.names.append(name)
        self.kinds.append(kind)
        self.values.append(value)

    def attribute(self, name: str, value: object, depth: int = 0) -> None:
        if name in self.volatile or is_ours(value):
            return
        if isinstance(value, nn.Module):
            if depth <= HIDDEN_DEPTH:
                self.hidden.append((name, value))
            return
        value = behind(value)
        if isinstance(value, Mapping) and not isinstance(value, dict):
            self.opaque(name, value, depth)  # it may read its values from a disk, or raise
            return
        frozen = self.frozen_once(value)
        if frozen is None:
            self.opaque(name, value, depth)
            return
        key, found = frozen
        self.keep(name, found)
        self.note(name, key)

    def keep(self, name: str, found: list[Tensor]) -> None:
        """Tensors that stand at one place, in their order there."""
        self.caches.extend(found)
        self.places.extend([f"{name} {index}" for index in range(len(found))])

    def frozen_once(self, value: object) -> tuple[Hashable, list[Tensor]] | None:
        """The key of `value` and its tensors, or None; every layer holds the model's one config."""
        known = self.frozen.get(id(value))
        if known is None:
            found: list[Tensor] = []
            try:
                known = value, (freeze(value, found, limit=LEAF_LIMIT, is_exact=True), found)
            except UnknownLeaf:
                known = value, None
            self.frozen[id(value)] = known
        return known[1]

    def opaque(self, name: str, value: object, depth: int) -> None:
        """An object without a key: what it is, and its parts."""
        kind, size = type(value), len(value) if isinstance(value, CONTAINERS) else 0
        is_structure = isinstance(value, STRUCTURE) and size <= LEAF_LIMIT
        if not is_structure:
            self.note(name, Identity(value))
        elif isinstance(value, (set, frozenset)):
            plain = (repr(item) for item in value if isinstance(item, PLAIN))
            self.note(name, (kind, size, tuple(sorted(plain))))
        else:
            self.note(name, (kind, size))
        content = raw(value)
        if content is not None:
            self.note(f"{name}.bytes", content)
        elif id(value) not in self.seen and (
            is_structure or (depth < OBJECT_DEPTH and not callable_only(value))
        ):
            self.seen.add(id(value))
            if not is_structure:
                self.classes[kind] = None
                depth += 1
            for way, item in parts(value):
                self.attribute(f"{name}{way}", item, depth)


def _plain_kind(value: object) -> type | None:
    """What tells apart values of the commonest types that are equal (1 and True); else None."""
    kind = type(value)
    if kind in SIMPLE:
        return kind
    if isinstance(value, tuple) and kind is tuple:
        for item in value:
            if type(item) is not int:
                return None
        return _Ints
    return None


class _Ints:
    """The kind of a tuple that holds nothing but int."""


def is_ours(value: object) -> bool:
    """Whether the object was put there by this package: its counters are not the module's state."""
    return type(value).__module__.partition(".")[0] == __name__.partition(".")[0]


@outside_modes
def sweep(module: nn.Module, volatile: frozenset[str] = frozenset()) -> ModuleState:
    """The state of the whole tree now, without the attributes named in `volatile`."""
    state = _Sweep(volatile)
    state.tree("", module)
    while state.hidden:
        state.tree(*state.hidden.pop(0), is_hidden=True)
    for kind in state.classes:
        if (name := class_name(kind)) not in volatile:
            state.note(name, tuple(ClassFacts.of(kind)))
    return ModuleState(
        weights=tuple(state.weights),
        caches=tuple((tensor_key(t), _host_version(t, state.devices)) for t in state.caches),
        python=(tuple(state.names), tuple(state.kinds), tuple(state.values)),
        hooked=tuple(state.hooked),
        compiled=tuple(state.compiled),
        devices=frozenset(state.devices),
        cache_tensors=tuple(state.caches),
        cache_places=tuple(state.places),
    )
