"""Owns the quick look at a module tree: is everything as it was when this was made?

Must never know graphs, nor what a value means: where something changed, the sweep tells what. The
surprising fact: a look takes a tenth of a sweep or less, because Python hands out what a thousand
dicts hold and compares it object by object, without a line of Python for each.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, compress, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .ambient import outside_modes
from .class_facts import ClassFacts
from .module_state import (
    HIDDEN_DEPTH,
    HOOK_TABLES,
    OBJECT_DEPTH,
    derived_names,
    is_ours,
    tensor_key,
)
from .parts import (
    CONTAINERS,
    LEAF_LIMIT,
    STRUCTURE,
    behind,
    callable_only,
    members,
    own_dict,
    parts,
    raw,
)

__all__ = ["Glance", "hooks_ever"]

_Table: TypeAlias = "dict[str, object]"
_Held: TypeAlias = "_Table | list[object] | set[object] | deque[object]"

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
_ORDINARY = frozenset({Tensor, nn.Parameter})
_WEIGHTS = ("_parameters", "_buffers")
_TORCHS_OWN = frozenset(nn.Module().__dict__) - {"training"}
_TWO = ("_buffers", "_buffers")  # a getter of two names or more returns a tuple
_TABLES = (*_WEIGHTS, "_modules", *HOOK_TABLES)  # somebody may put others in their place
_END = (object(),)  # one value more or fewer in front of it, and nothing stands where it stood
_TOO_MUCH = 1 << 15


def hooks_ever() -> int:
    """How many hooks this process has registered: while it stands, no module has a new one."""
    return RemovableHandle.next_id


class Glance:
    """What a module tree held when this was made, its attributes named in `volatile` left out.

    Of layers and weights it keeps identities and addresses only, and nothing at all once a layer
    is gone: who exchanges them frees the old ones.
    """

    @outside_modes
    def __init__(self, module: nn.Module, volatile: frozenset[str] = frozenset()) -> None:
        tree = _Tree(volatile)
        modules = tree.visit_all(module)
        self._tree = tree
        self._kinds = list(map(type, _in(tree.weights)))
        self._is_weight = [kind is not type(None) for kind in self._kinds]
        self._root = weakref.ref(module)
        self._layers = self._in_place()
        self._values = list(tree.values())
        self._sizes = tree.sizes()
        self._places, self._odd_keys = self._where(), list(map(tensor_key, tree.odd()))
        self._exact, self._bytes = self._exactly(), list(map(raw, tree.arrays))
        self._classes = ClassFacts(tree.classes)
        forget = partial(_forget, tree, self._values)  # nothing that leads back to this object
        self._deaths = [weakref.ref(child, forget) for child in modules]

    @property
    def is_blind(self) -> bool:
        """Whether it will never find the tree the same again."""
        return self._tree.is_lost

    @outside_modes
    def is_same(self) -> bool:
        """Whether nothing was put, taken away, exchanged or moved since.

        Not looked at: what classes hold, names of layers and weights, the layout of weights that
        lie where they lay, and whether the dicts that hold all this were exchanged as a whole.
        """
        tree = self._tree
        try:
            same = (
                not any(tree.empty)
                and self._in_place() == self._layers
                and self._where() == self._places
                and tree.sizes() == self._sizes
                and self._has_values()
                and list(map(tensor_key, tree.odd())) == self._odd_keys
                and list(map(raw, tree.arrays)) == self._bytes
            )
        except (LookupError, TypeError, AttributeError, RuntimeError):  # what was there is gone
            return False
        return same and not tree.is_lost

    @outside_modes
    def is_exactly_same(self) -> bool:
        """Whether a sweep would find what one found then."""
        return self.is_same() and self._exactly() == self._exact and self.has_classes()

    def has_classes(self) -> bool:
        """Whether the classes hold what they held, in functions, plain values and containers."""
        return self._classes.is_same()

    def _has_values(self) -> bool:
        """Never `==`: tensors compare on the device."""
        if all(map(is_, self._tree.values(), self._values)):
            return True
        values = list(self._tree.values())
        if len(values) != len(self._values) or any(map(_is_other, values, self._values)):
            return False
        self._values[:] = values  # the same numbers and strings, made anew
        return True

    def _owners(self) -> list[object]:
        return [self._root(), *_in(self._tree.layers), *self._tree.objects]

    def _in_place(self) -> list[object]:
        """What every layer and object is: itself, and its class."""
        owners = self._owners()
        return [*map(type, owners), *map(id, owners)]

    def _where(self) -> list[int]:
        """Where each weight and tensor lies, and how often those on the host were written."""
        tree, weights = self._tree, _in(self._tree.weights)
        if list(map(type, weights)) != self._kinds:
            return []
        tensors = chain(compress(weights, self._is_weight), tree.tensors)
        places = list(map(Tensor.data_ptr, tensors))  # type: ignore[arg-type]
        places.extend(tensor._version for tensor in tree.on_host if not tensor.is_inference())
        return places

    def _exactly(self) -> tuple[list[object], ...]:
        tree = self._tree
        names = itemgetter(*_TABLES)
        weights = list(chain(compress(_in(tree.weights), self._is_weight), tree.tensors))
        return (
            list(map(id, map(getattr, self._owners(), repeat("__dict__"), repeat(None)))),
            list(map(id, chain.from_iterable(map(names, tree.attributes)))),
            list(chain.from_iterable(tree.layers)),
            list(chain.from_iterable(tree.weights)),
            list(map(attrgetter("dtype", "shape"), weights)),
            list(map(Tensor.stride, weights)),  # type: ignore[arg-type]
        )


def _in(held: Iterable[_Held]) -> list[object]:
    """What the containers hold now, in order."""
    return gc.get_referents(*held)


def _is_other(value: object, before: object) -> bool:
    if value is before:
        return False
    if type(value) is not type(before):
        return True
    if isinstance(value, tuple) and isinstance(before, tuple):
        return len(value) != len(before) or any(map(_is_other, value, before))
    return type(value) not in _PLAIN or repr(value) != repr(before)


def _is_placeless(tensor: Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.is_nested


def _members_of(record: tuple[object, tuple[str, ...]]) -> list[object]:
    value, names = record
    return [getattr(value, name, None) for name in names]


def _forget(tree: _Tree, values: list[object], _: object) -> None:
    tree.forget()
    values.clear()


class _Tree:
    """The containers of a module tree, by what is compared of them."""

    def __init__(self, volatile: frozenset[str]) -> None:
        self.is_lost = False
        self.empty: list[_Held] = []  # tables of a module; most stay empty for ever
        self.weights: list[_Held] = []
        self.odd_weights: list[_Held] = []  # subclasses: what they wrap may move below them
        self.layers: list[_Held] = []
        self.attributes: list[_Table] = []
        self.by_names: dict[tuple[str, ...], list[_Table]] = {}
        self.held: list[_Held] = []
        self.partly: list[tuple[Any, tuple[Any, ...]]] = []  # the rest changes by itself
        self.dicts: list[_Table] = []  # those of `held` whose keys count
        self.objects: list[object] = []
        self.records: list[tuple[object, tuple[str, ...]]] = []
        self.arrays: list[object] = []
        self.hidden: list[tuple[str, nn.Module]] = []
        self.tensors: list[Tensor] = []
        self.odd_tensors: list[Tensor] = []
        self.on_host: list[Tensor] = []
        self.classes: dict[type, None] = {}
        self._volatile = volatile
        self._seen: set[int] = set()

    def forget(self) -> None:
        """Lets go of everything: it is not the tree any longer."""
        self.is_lost = True
        for kept in vars(self).values():
            if isinstance(kept, (list, dict)):
                kept.clear()

    def values(self) -> Iterator[object]:
        """What stands at every place now, in order."""
        pairs = self.by_names.items()
        parts = [chain.from_iterable(map(itemgetter(*names), tables)) for names, tables in pairs]
        some = (map(held.__getitem__, keys) for held, keys in self.partly)
        records = map(_members_of, self.records)
        return chain(*parts, _in(self.held), *self.dicts, *some, *records, _END)

    def sizes(self) -> list[int]:
        """How many places there are."""
        return [*map(len, self.attributes), *(len(held) for held, _ in self.partly)]

    def odd(self) -> Iterator[Tensor]:
        """Tensors of subclasses, those among the weights as they stand there now."""
        weights = _in(self.odd_weights)
        yield from (weight for weight in weights if isinstance(weight, Tensor))
        yield from self.odd_tensors

    def visit_all(self, module: nn.Module) -> list[nn.Module]:
        """Visits a module, those registered below it and those that their attributes hold."""
        found = dict(module.named_modules())
        known = {id(child) for child in found.values()}
        for path, child in found.items():
            self.visit(path, child)
        while self.hidden:
            prefix, hidden = self.hidden.pop(0)
            for path, child in hidden.named_modules(prefix=prefix):
                if id(child) not in known:
                    known.add(id(child))
                    found[path] = child
                    self.objects.append(child)
                    self.visit(path, child)
        return list(found.values())

    def visit(self, path: str, module: nn.Module) -> None:
        attributes = vars(module)
        if not all(isinstance(attributes.get(name), dict) for name in _TABLES):
            return self.forget()  # a module of TorchScript, say, which keeps them out of sight
        self.classes[type(module)] = None
        for name in _WEIGHTS:
            self._keep_weights(attributes[name])
        (self.layers if attributes["_modules"] else self.empty).append(attributes["_modules"])
        for name in HOOK_TABLES:
            (self.held if attributes[name] else self.empty).append(attributes[name])
        names = [name for name in attributes if name not in _TORCHS_OWN]
        if attributes["_forward_pre_hooks"]:
            derived = derived_names(module)
            names = [name for name in names if name not in derived]
        if self._volatile:
            names = [name for name in names if f"{path}.{name}" not in self._volatile]
        self.attributes.append(attributes)
        self.by_names.setdefault((*_TWO, *names), []).append(attributes)
        for name in names:
            value = attributes[name]
            if type(value) not in _PLAIN:
                self._keep(f"{path}.{name}", value, OBJECT_DEPTH)

    def _keep_weights(self, table: _Table) -> None:
        if any(isinstance(value, Tensor) and _is_placeless(value) for value in table.values()):
            self.forget()
        elif not table:
            self.empty.append(table)
        elif all(value is None or type(value) in _ORDINARY for value in table.values()):
            self.weights.append(table)
        else:
            self.odd_weights.append(table)

    def _keep(self, path: str, value: object, depth: int) -> None:
        if isinstance(value, Tensor):
            if _is_placeless(value):
                return self.forget()
            (self.tensors if type(value) in _ORDINARY else self.odd_tensors).append(value)
            if value.device.type == "cpu":
                self.on_host.append(value)
            return
        if isinstance(value, nn.Module):
            if depth >= OBJECT_DEPTH - HIDDEN_DEPTH:
                self.hidden.append((path, value))
            return
        value = behind(value)
        if id(value) in self._seen or is_ours(value):
            return
        self._seen.add(id(value))
        if len(self._seen) > _TOO_MUCH:
            self.forget()
        elif raw(value) is not None:
            self.arrays.append(value)
        elif isinstance(value, STRUCTURE):
            if not isinstance(value, CONTAINERS) or len(value) <= LEAF_LIMIT:
                self._keep_parts(path, value, depth)
        elif depth and not callable_only(value):
            self.classes[type(value)] = None
            self._keep_parts(path, value, depth - 1)

    def _keep_parts(self, path: str, value: object, depth: int) -> None:
        own, names = own_dict(value), members(value)
        if isinstance(value, dict):
            self._hold(value, {key: f"{path}[{key!r}]" for key in value})
        elif isinstance(value, (list, set, deque)):
            self._hold(value, {index: f"{path}[{index}]" for index in range(len(value))})
        if own is not None:
            self._hold(own, {name: f"{path}.{name}" for name in own})
            self.objects.append(value)
        if names:
            stay = tuple(name for name in names if f"{path}.{name}" not in self._volatile)
            self.records.append((value, stay))
        for way, item in parts(value):
            if type(item) not in _PLAIN and f"{path}{way}" not in self._volatile:
                self._keep(f"{path}{way}", item, depth)

    def _hold(self, held: _Held, paths: dict[Any, str]) -> None:
        if self._volatile.isdisjoint(paths.values()):
            self.held.append(held)
            if isinstance(held, dict):
                self.dicts.append(held)
        elif not isinstance(held, set):
            stay = (key for key, path in paths.items() if path not in self._volatile)
            self.partly.append((held, tuple(stay)))
