"""Owns the way from a flag's text to a field's value, by the field's own type.

Must never know which fields exist. The surprising fact: one rule serves them all. A value is one of
the words a `Literal` names, a number, a comma list for a tuple, or `key=value,key=value` for a
mapping; what fits nothing is refused with exactly these alternatives.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from typing import Literal, Union, get_args, get_origin

from dit_graphs.pipelines.generate import InputError, listed

__all__ = ["BYTES", "MAPPING", "allowed", "alternatives", "parse"]

MAPPING = "KEY=VALUE,…"
BYTES = "BYTES"
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*(KiB|MiB|GiB|)")


def alternatives(hint: object) -> list[object]:
    """The members of a union, or the type alone."""
    if get_origin(hint) in (Union, types.UnionType):
        return [part for member in get_args(hint) for part in alternatives(member)]
    return [hint]


def allowed(hint: object) -> list[str]:
    """The values a flag of this type takes, as they are typed."""
    words: list[str] = []
    for part in alternatives(hint):
        origin = get_origin(part)
        if origin is Literal:
            words += [str(word) for word in get_args(part)]
        elif part is bool:
            words += ["true", "false"]
        elif part is int:
            words.append("N" if len(alternatives(hint)) == 1 else BYTES)
        elif part is types.NoneType:
            words.append("none")
        elif origin is tuple:
            inner = allowed(get_args(part)[0])
            words.append("N,N,…" if inner == ["N"] else f"a comma list of {listed(inner)}")
        elif isinstance(origin, type) and issubclass(origin, Mapping):
            words.append(MAPPING)
        else:
            words.append("text")
    return words


def parse(option: str, hint: object, text: str) -> object:
    """The value `text` stands for. Raises `InputError` with the allowed values."""
    for part in alternatives(hint):
        found, value = _parse_one(option, part, text.strip())
        if found:
            return value
    words = allowed(hint)
    units = f" (bytes: a number, or one ending in {listed(u for u in _UNITS if u)})"
    raise InputError(
        option, f"expected {listed(words)}{units if BYTES in words else ''}, got {text!r}"
    )


def _parse_one(option: str, part: object, text: str) -> tuple[bool, object]:
    origin = get_origin(part)
    if origin is Literal:
        return text in get_args(part), text
    if part is bool:
        return text in ("true", "false"), text == "true"
    if part is int:
        return _parse_number(text)
    if part is types.NoneType:
        return text == "none", None
    if origin is tuple:
        inner = get_args(part)[0]
        items = [_parse_one(option, inner, item.strip()) for item in text.split(",")]
        return all(ok for ok, _ in items), tuple(value for _, value in items)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if "=" not in text:
            return False, None
        pairs = [item.split("=", 1) for item in text.split(",")]
        if any(len(pair) != 2 for pair in pairs):
            return False, None
        value_hint = get_args(part)[1]
        return True, {key.strip(): parse(option, value_hint, value) for key, value in pairs}
    return part is str, text


def _parse_number(text: str) -> tuple[bool, object]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        return False, None
    value = float(match[1]) * _UNITS[match[2]]
    return value.is_integer(), int(value)
