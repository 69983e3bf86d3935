"""Owns the quick look between two calls of one request: is everything in its place still?

Must never know graphs, nor what a value means: where something changed, the sweep tells what. The
surprising fact: a look takes a tenth of a sweep, because Python compares two dicts that hold
the same objects without asking one of them.
"""

from __future__ import annotations

from operator import is_

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .module_state import LEAF_LIMIT, OBJECT_DEPTH, callable_only, is_ours, tensor_key

__all__ = ["Glance", "hooks_ever"]

_TABLES = ("_parameters", "_buffers", "_modules")  # a new hook shows in the count
_TORCHS_OWN = frozenset(nn.Module().__dict__)


def hooks_ever() -> int:
    """How many hooks this process has registered: while it stands, no module has a new one."""
    return RemovableHandle.next_id


class Glance:
    """The containers and tensors of a module tree as they were when this was made."""

    def __init__(self, module: nn.Module) -> None:
        self._dicts: list[tuple[dict[str, object], dict[str, object]]] = []
        self._with_tensors: list[tuple[dict[str, object], list[object]]] = []
        self._lists: list[tuple[list[object], list[object]]] = []
        self._seen: set[int] = set()
        self._plain: list[Tensor] = []
        self._odd: list[Tensor] = []  # subclasses: what they wrap may move below them
        for child in module.modules():
            attributes = vars(child)
            self._keep_dict(attributes)
            for name in _TABLES:
                self._keep_dict(attributes[name])
            for name, value in attributes.items():
                if name not in _TORCHS_OWN:
                    self._keep_below(value, OBJECT_DEPTH)
        self._addresses = [tensor.data_ptr() for tensor in self._plain]
        self._keys = [tensor_key(tensor) for tensor in self._odd]

    def is_same(self) -> bool:
        """Whether nothing was put, taken away, exchanged or moved since."""
        try:
            if any(held != before for held, before in self._dicts):
                return False
        except Exception:  # values that cannot say whether they are equal are other objects
            return False
        for named, values in self._with_tensors:  # never `==`: tensors compare on the device
            if len(named) != len(values) or not all(map(is_, named.values(), values)):
                return False
        for held, values in self._lists:
            if len(held) != len(values) or not all(map(is_, held, values)):
                return False
        return self._addresses == [tensor.data_ptr() for tensor in self._plain] and self._keys == [
            tensor_key(tensor) for tensor in self._odd
        ]

    def _keep_dict(self, held: dict[str, object]) -> None:
        self._seen.add(id(held))
        values = list(held.values())
        tensors = [value for value in values if isinstance(value, Tensor)]
        self._keep_tensors(tensors)
        if tensors:
            self._with_tensors.append((held, values))
        else:
            self._dicts.append((held, dict(held)))

    def _keep_tensors(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            is_plain = type(tensor) in (Tensor, nn.Parameter)
            (self._plain if is_plain else self._odd).append(tensor)

    def _keep_below(self, value: object, depth: int) -> None:
        """The containers that `value` is or holds."""
        if not depth or isinstance(value, (nn.Module, Tensor)) or id(value) in self._seen:
            return
        if isinstance(value, dict):
            items = list(value.values())
            if len(items) <= LEAF_LIMIT:
                self._keep_dict(value)
        elif isinstance(value, (list, tuple)):
            items = list(value)
            if isinstance(value, list) and len(items) <= LEAF_LIMIT:
                self._lists.append((value, items))
            self._keep_tensors([item for item in items if isinstance(item, Tensor)])
        else:
            own = getattr(value, "__dict__", None)
            if not isinstance(own, dict) or is_ours(value) or callable_only(value):
                return
            items = list(own.values())
            self._keep_dict(own)
        self._seen.add(id(value))
        for item in items[:LEAF_LIMIT]:
            self._keep_below(item, depth - 1)
