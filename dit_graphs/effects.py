"""Owns the undoing of Python effects: what a capture or a compare does to a module's attributes.

Must never know graphs. The surprising fact: capturing runs the forward's Python once more, so a
step counter would be one too high afterwards and a remembered tensor would lie in a graph's memory.
A settled forward changes nothing; one that does cannot be replayed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import ModuleType

from torch import Tensor, nn

from .module_state import derived_names, is_ours

__all__ = ["PythonState"]

_OURS = "_compiled_call_impl"
_TABLES = ("_parameters", "_buffers", "_modules")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DEPTH = 3


class PythonState:
    """The attributes of a module tree as they are now, and the host's random generators."""

    def __init__(self, module: nn.Module) -> None:
        self._dicts: list[tuple[str, dict[str, object], dict[str, object]]] = []
        self._lists: list[tuple[str, list[object], list[object]]] = []
        self._sets: list[tuple[str, set[object], set[object]]] = []
        self._seen: set[int] = set()
        self._derived: set[str] = set()
        for path, child in module.named_modules():
            self._derived.update(f"{path}.{name}".lstrip(".") for name in derived_names(child))
            self._keep_dict(path, vars(child), _DEPTH)
            for table in _TABLES:
                self._keep_dict(path, vars(child)[table], 0)
        self._random = _random_states()

    def restore(self) -> list[str]:
        """Everything is as it was at the start; returns the names that had changed."""
        changed: list[str] = []
        for path, held, before in self._dicts:
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
                items[:] = was
                changed.append(path)
        for path, members, were in self._sets:
            if members != were:
                members.clear()
                members.update(were)
                changed.append(path)
        for put_back, state in self._random:
            put_back(state)
        return changed

    def _keep_dict(self, path: str, held: dict[str, object], depth: int) -> None:
        if id(held) in self._seen:
            return
        self._seen.add(id(held))
        self._dicts.append((path, held, dict(held)))
        if depth:
            for name, value in held.items():
                self._keep(f"{path}.{name}", value, depth - 1)

    def _keep(self, path: str, value: object, depth: int) -> None:
        if isinstance(value, (*_PLAIN, Tensor, nn.Module, type, ModuleType)):
            return
        if isinstance(value, dict):
            self._keep_dict(path, value, depth)
        elif isinstance(value, (list, tuple)):
            if isinstance(value, list):
                self._lists.append((path, value, list(value)))
            for index, item in enumerate(value if depth else ()):
                self._keep(f"{path}[{index}]", item, depth - 1)
        elif isinstance(value, set):
            self._sets.append((path, value, set(value)))
        elif not (hasattr(value, "__code__") or hasattr(value, "__func__") or is_ours(value)):
            own = getattr(value, "__dict__", None)
            if isinstance(own, dict):
                self._keep_dict(path, own, depth)


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


def _random_states() -> list[tuple[Callable[[object], object], object]]:
    states: list[tuple[Callable[[object], object], object]] = [
        (random.setstate, random.getstate())  # type: ignore[list-item]
    ]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states.append((numpy.random.set_state, numpy.random.get_state()))
    return states
