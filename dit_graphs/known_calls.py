"""Owns the forms of the calls served last: the look-up of a step that differs in values only.

Must never know graphs. The surprising fact: with cold caches Python costs three to five times what
a profile of a hot loop says, and between two steps the caches are always cold. So a step that
looks like an earlier one is compared with it leaf by leaf instead of being signed anew. A form
admits a call exactly where its signature would be equal; what it cannot express it never admits.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .buffers import skew_bytes, span_bytes
from .cache import Entry, State
from .signature import Signature, registered_leaves

__all__ = ["KnownCalls"]

_KEPT = 4  # forms of one runner: both halves of guidance, with and without an optional argument
_ALIGNED = 255
_PLAIN = (type(None), bool, int, str)
_Form = tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    form: _Form
    signature: Signature
    entry: Entry
    registered: int  # leaf types: one more may give the same objects another key


class KnownCalls:
    """The last few forms of one runner whose graphs serve."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: tuple[_Known, ...] = ()

    def find(
        self, named: Mapping[str, object], ambient: Hashable, extra: Hashable
    ) -> tuple[Entry, list[Tensor]] | None:
        """The entry that the call's signature would find, and its tensors in freeze order."""
        for known in self._known:
            entry, signature = known.entry, known.signature
            if entry.state is not State.READY or entry.signature is not signature:
                continue
            if signature.ambient != ambient or signature.extra != extra:
                continue
            tensors: list[Tensor] = []
            if _admits(known.form, named, tensors) and _are_apart(tensors):
                if known.registered != len(registered_leaves()):
                    continue
                return entry, tensors
        return None

    def learn(self, entry: Entry, named: Mapping[str, object]) -> None:
        """The next call that differs from this one in values only is found here."""
        specs = entry.signature.tensors
        if any(s.group != i or s.overlaps or s.skew or 0 in s.shape for i, s in enumerate(specs)):
            return
        form = _form_of(named)
        if form is None:
            return
        found = _Known(form, entry.signature, entry, len(registered_leaves()))
        others = [known for known in self._known if known.entry is not entry]
        self._known = (found, *others[: _KEPT - 1])


def _form_of(value: object) -> _Form | None:
    """What another value must be to be signed alike; None for what only a signature can tell."""
    kind = type(value)
    if kind in registered_leaves():
        return None
    if isinstance(value, Tensor):
        if kind not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
            return None
        return (Tensor, value.shape, value.stride(), value.dtype, value.device)
    if kind in _PLAIN:
        return (kind, value)
    if isinstance(value, float) and kind is float:
        return (kind, value.hex())
    if isinstance(value, dict) and kind is dict:
        if any(type(key) is not str for key in value):
            return None
        keys, parts = tuple(value), [_form_of(part) for part in value.values()]
    elif isinstance(value, (list, tuple)) and kind in (list, tuple):
        keys, parts = (), [_form_of(part) for part in value]
    else:
        return None
    return None if None in parts else (kind, keys, tuple(parts))


def _admits(form: _Form, value: object, tensors: list[Tensor]) -> bool:
    """Whether `value` has this form; its tensors are appended in order."""
    kind = form[0]
    if kind is Tensor:
        if type(value) is not Tensor and type(value) is not nn.Parameter:
            return False
        if (
            value.shape != form[1]
            or value.dtype is not form[3]
            or value.layout is not torch.strided
            or value.stride() != form[2]
            or value.device != form[4]
        ):
            return False
        tensors.append(value)
        return True
    if type(value) is not kind:
        return False
    if kind in _PLAIN:
        return value == form[1]
    if kind is float:
        assert isinstance(value, float)
        return value.hex() == form[1]
    parts = form[2]
    assert isinstance(parts, tuple)
    if isinstance(value, dict):
        if tuple(value) != form[1]:
            return False
        items = value.values()
    else:
        assert isinstance(value, (list, tuple))
        if len(value) != len(parts):
            return False
        items = value  # type: ignore[assignment]
    return all(_admits(part, item, tensors) for part, item in zip(parts, items, strict=True))


def _are_apart(tensors: list[Tensor]) -> bool:
    """Whether all tensors are aligned and none shares memory with another."""
    ends: list[tuple[int, int]] = []
    for tensor in tensors:
        start = tensor.data_ptr()
        if start & _ALIGNED and skew_bytes(tensor):
            return False
        ends.append((start, start + span_bytes(tensor)))
    ends.sort()
    return all(ends[i][1] <= ends[i + 1][0] for i in range(len(ends) - 1))
