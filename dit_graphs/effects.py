"""Owns Python effects: what a capture, a compare or an eager break does to modules' attributes.

Must never know graphs. The surprising fact: capturing runs the forward's Python once more, so a
step counter would be one too high afterwards and a remembered tensor would lie in a graph's memory.
A settled forward changes nothing; one that does cannot be replayed. A break's Python does run on
every replay, and a flag that it sets for code behind it is baked there: it must leave what it left
when it was observed.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from copy import copy
from operator import is_
from types import MethodType, ModuleType
from typing import TypeAlias

import torch
from torch import Tensor, nn

from .module_state import derived_names, is_ours
from .parts import callable_only, members
from .watch import storage_key

__all__ = ["HostRandom", "PythonState", "Reach", "storages_in"]

_OURS = "_compiled_call_impl"
_TABLES = ("_parameters", "_buffers", "_modules")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_FIXED = frozenset((*_PLAIN, torch.dtype, torch.device))
_TORCHS_OWN = frozenset(nn.Module().__dict__)
_DEPTH = 3
_BREAK_DEPTH = 6  # a break is small

_KeptDict: TypeAlias = "tuple[str, dict[str, object], dict[str, object]]"


class _Attributes:
    """The attributes of module trees as they are now, and of the objects that these hold."""

    def __init__(self, modules: Iterable[nn.Module], depth: int, *, follows: bool) -> None:
        self._follows = follows
        self._dicts: list[_KeptDict] = []
        self._empty: list[tuple[str, str, dict[str, object]]] = []  # most tables of most modules
        self._lists: list[tuple[str, list[object] | deque[object], list[object]]] = []
        self._sets: list[tuple[str, set[object], set[object]]] = []
        self._slots: list[tuple[str, object, dict[str, object]]] = []
        self._seen: set[int] = set()
        self._listed: list[Tensor] = []  # in lists and tuples
        self._derived: set[str] = set()
        for path, child in (pair for module in modules for pair in module.named_modules()):
            self._derived.update(f"{path}.{name}".lstrip(".") for name in derived_names(child))
            self._keep_dict(path, vars(child), depth)
            for table in _TABLES:
                self._keep_dict(path, getattr(child, table), 0)

    def changed(self) -> list[str]:
        """The names that stand for something else now."""
        found: list[str] = []
        for path, held, before in self._kept():
            if _is_same(held, before):
                continue
            names = (name for name in {**before, **held} if _differs(name, held, before))
            found.extend(f"{path}.{name}".lstrip(".") for name in names)
        for path, owner, slots in self._slots:
            found.extend(f"{path}.{name}".lstrip(".") for name in _turned_slots(owner, slots))
        for path, items, was in self._lists:
            if len(items) != len(was) or any(map(_is_other, items, was)):
                found.append(path)
        found.extend(path for path, items, were in self._sets if items != were)
        return [name for name in found if name not in self._derived]

    def restore(self) -> list[str]:
        """Everything is as it was at the start; returns the names that had changed."""
        changed: list[str] = []
        for path, held, before in self._kept():
            if _is_same(held, before):
                continue
            names = [name for name in {**before, **held} if _differs(name, held, before)]
            for name in names:
                if name in before:
                    held[name] = before[name]
                else:
                    del held[name]
            found = (f"{path}.{name}".lstrip(".") for name in names)
            changed.extend(name for name in found if name not in self._derived)
        for path, items, was in self._lists:
            if len(items) != len(was) or any(map(_is_other, items, was)):
                items.clear()
                items.extend(was)
                changed.append(path)
        for path, each, were in self._sets:
            if each != were:
                each.clear()
                each.update(were)
                changed.append(path)
        for path, owner, slots in self._slots:
            for name in _turned_slots(owner, slots):
                _put_back(owner, name, slots)
                changed.append(f"{path}.{name}".lstrip("."))
        return changed

    def storage_keys(self) -> set[int]:
        """The storages of all tensors that stood somewhere in here when this was made."""
        return set(map(storage_key, self.tensors()))

    def tensors(self) -> list[Tensor]:
        """All tensors that stood somewhere in here when this was made."""
        named = (value for _, _, was in (*self._dicts, *self._slots) for value in was.values())
        return [value for value in (*self._listed, *named) if isinstance(value, Tensor)]

    def _keep_dict(self, path: str, held: dict[str, object], depth: int) -> None:
        if id(held) in self._seen:
            return
        self._seen.add(id(held))
        self._dicts.append((path, held, dict(held)))
        if depth:
            for name, value in held.items():
                if type(value) in _FIXED or (self._follows and name in _TORCHS_OWN):
                    continue
                if isinstance(value, dict) and not value:
                    self._empty.append((path, name, value))
                else:
                    self._keep(f"{path}.{name}", value, depth - 1)

    def _kept(self) -> list[_KeptDict]:
        """The dicts, each with what it held; those that were empty where they no longer are."""
        kept = list(self._dicts)
        kept.extend((f"{path}.{name}", held, {}) for path, name, held in self._empty if held)
        return kept

    def _keep(self, path: str, value: object, depth: int) -> None:
        if isinstance(value, (*_PLAIN, Tensor, type, ModuleType)):
            return
        if isinstance(value, nn.Module):
            if self._follows:  # its owner, say, which is no submodule of it
                self._keep_dict(path, vars(value), 0)
            return
        if isinstance(value, dict):
            self._keep_dict(path, value, depth)
        elif isinstance(value, (list, tuple, deque)):
            self._listed.extend(item for item in value if isinstance(item, Tensor))
            if isinstance(value, (list, deque)):
                self._lists.append((path, value, list(value)))
            for index, item in enumerate(value if depth else ()):
                self._keep(f"{path}[{index}]", item, depth - 1)
        elif isinstance(value, set):
            self._sets.append((path, value, set(value)))
        elif not (callable_only(value) or isinstance(value, MethodType) or is_ours(value)):
            own = getattr(value, "__dict__", None)
            if isinstance(own, dict):
                self._keep_dict(path, own, depth)
            if id(value) not in self._seen and (slots := _slots_of(value)):
                self._seen.add(id(value))
                self._slots.append((path, value, slots))
                for name, item in slots.items() if depth else ():
                    self._keep(f"{path}.{name}", item, depth - 1)


def storages_in(values: Iterable[object]) -> set[int]:
    """The storages of tensors in these values, in containers and objects among them too."""
    reached = _Attributes([], _BREAK_DEPTH, follows=True)
    reached._keep("", tuple(values), _BREAK_DEPTH)
    return reached.storage_keys()


class HostRandom:
    """Where the random streams of Python and numpy stand, which any forward may draw from."""

    def __init__(self) -> None:
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random if numpy is not None else None
        # pickled: what a state is made of depends on the generator that is in use
        self._state = pickle.dumps(self._numpy.get_state()) if self._numpy is not None else b""

    def moved(self) -> list[str]:
        """The names of the streams that something was drawn from since."""
        names = ["random's stream"] if random.getstate() != self._python else []
        if self._numpy is not None and pickle.dumps(self._numpy.get_state()) != self._state:
            names.append("numpy.random's stream")
        return names

    def restore(self) -> list[str]:
        """Both go on as they would have then; returns the names of those that had moved."""
        names = self.moved()
        if names:
            random.setstate(self._python)
            if self._numpy is not None:
                self._numpy.set_state(pickle.loads(self._state))
        return names


class PythonState(_Attributes):
    """The attributes of a module tree as they are now, and the host's random generators."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__([module], _DEPTH, follows=False)
        self._random = HostRandom()

    def restore(self) -> list[str]:
        """Everything is as it was at the start; returns the names that had changed."""
        return [*super().restore(), *self._random.restore()]


class Reach(_Attributes):
    """The Python values that an eager break can reach through its modules, as they are now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__(modules, _BREAK_DEPTH, follows=True)

    def again(self) -> Reach:
        """The same reach at this moment; what was made since is not in it."""
        now = copy(self)
        now._dicts = [(path, held, dict(held)) for path, held, _ in self._kept()]
        now._empty = [empty for empty in self._empty if not empty[2]]
        now._lists = [(path, items, list(items)) for path, items, _ in self._lists]
        now._sets = [(path, items, set(items)) for path, items, _ in self._sets]
        now._slots = [(path, owner, _slots_of(owner)) for path, owner, _ in self._slots]
        return now


def _slots_of(value: object) -> dict[str, object]:
    """What the object holds beside its dict, where anything is there."""
    return {name: getattr(value, name) for name in members(value) if hasattr(value, name)}


def _turned_slots(value: object, before: dict[str, object]) -> list[str]:
    now = _slots_of(value)
    return [name for name in {**before, **now} if _differs(name, now, before)]


def _put_back(owner: object, name: str, before: dict[str, object]) -> None:
    with suppress(AttributeError, TypeError):  # one that only the object itself may set
        if name in before:
            object.__setattr__(owner, name, before[name])
        else:
            object.__delattr__(owner, name)


def _is_same(held: dict[str, object], before: dict[str, object]) -> bool:
    """Whether a dict holds the very same objects (never `==`: tensors compare on the device)."""
    return len(held) == len(before) and all(map(is_, held.values(), before.values()))


def _differs(name: str, held: dict[str, object], before: dict[str, object]) -> bool:
    if name == _OURS:
        return False
    if name not in held or name not in before:
        return True
    return _is_other(held[name], before[name])


def _is_other(now: object, before: object, depth: int = _DEPTH) -> bool:
    """Whether a replay, which leaves `before` in place, would leave something else than `now`."""
    if now is before:
        return False
    if type(now) is not type(before) or not depth:
        return True
    if isinstance(now, dict) and isinstance(before, dict):
        pairs = [(now[key], before.get(key)) for key in now]
        return list(now) != list(before) or any(_is_other(*pair, depth - 1) for pair in pairs)
    if isinstance(now, (list, tuple)) and isinstance(before, (list, tuple)):
        pairs = list(zip(now, before, strict=False))
        return len(now) != len(before) or any(_is_other(*pair, depth - 1) for pair in pairs)
    return not (isinstance(now, _PLAIN) and now == before)
