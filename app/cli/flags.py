"""Owns the flags: every one is made from a field of `GraphConfig`, `ModelSpec` or
`GenerateRequest`.

Must never import torch or diffusers: `--help` is read more often than pictures are made. The
surprising fact: every flag is unset by default, so "given on the command line" is simply "not
None", and the defaults stay where they are defined.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, cast, get_origin, get_type_hints

import typer

from dit_graphs import config
from dit_graphs.config import GraphConfig
from dit_graphs.errors import ConfigError
from dit_graphs.pipelines.generate import (
    GenerateRequest,
    InputError,
    Json,
    ModelSpec,
    listed,
)

from .words import BYTES, MAPPING, allowed, alternatives, parse

__all__ = [
    "Flag",
    "Given",
    "graph_error",
    "graph_flags",
    "model_flags",
    "option_name",
    "request_flags",
]

# A size per LLM phase has one flag per phase.
PHASES = ("decode", "prefill")
_KINDS: dict[str, object] = {
    "str": str | None,
    "str | None": str | None,
    "int": int | None,
    "int | None": int | None,
    "float | None": float | None,
    "bool": bool | None,
    "Adapter | None": str | None,
    "tuple[str, ...]": list[str] | None,
    "tuple[Adapter, ...]": list[str] | None,
    "Mapping[str, Json]": list[str] | None,
}


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: `name` is the Python word, `field` the dataclass field it fills.

    `has_opposite`: a switch has a `--no-` form, which undoes what a record says.
    """

    name: str
    field: str
    kind: object
    help: str
    panel: str
    metavar: str | None = None
    is_hidden: bool = False
    has_opposite: bool = True

    def parameter(self) -> inspect.Parameter:
        """The typer option, unset unless given."""
        declared = option_name(self.name)
        if self.kind == bool | None and self.has_opposite:
            declared += f"/--no-{declared[2:]}"
        option = typer.Option(
            declared,
            help=self.help,
            metavar=self.metavar,
            hidden=self.is_hidden,
            rich_help_panel=self.panel,
            show_default=False,
        )
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[self.kind, option],
        )


def option_name(word: str) -> str:
    """`num_frames` as it is typed: `--num-frames`; DIT_GRAPHS, which is no flag, stays as it is."""
    if word.isupper():
        return word
    return "--" + word.strip("_").replace("_", "-")


def _dataclass_flags(owner: type, panel: str, without: tuple[str, ...] = ()) -> list[Flag]:
    return [
        Flag(
            name=item.name,
            field=item.name,
            kind=_KINDS[str(item.type)],
            help=item.metadata["help"],
            panel=panel,
            metavar="KEY=JSON" if item.name == "set" else item.metadata.get("metavar"),
        )
        for item in fields(owner)
        if item.name not in without
    ]


def request_flags() -> list[Flag]:
    """What is drawn: every field of a request but the prompt, which is the argument."""
    return _dataclass_flags(GenerateRequest, "Picture", without=("prompt",))


def model_flags() -> list[Flag]:
    """What draws it."""
    return _dataclass_flags(ModelSpec, "Model")


def graph_flags() -> list[Flag]:
    """One flag per field of `GraphConfig` (one per LLM phase where a field is a phase's), and a
    hidden one per former name."""
    hints = get_type_hints(GraphConfig)
    flags: list[Flag] = []
    for item in fields(GraphConfig):
        hint, text = hints[item.name], item.metadata["help"]
        if _is_per_phase(hint):
            flags += [
                Flag(f"{phase}_{item.name}", item.name, int | None, _of(phase, text), "Graphs")
                for phase in PHASES
            ]
        elif hint is bool:
            flags.append(Flag(item.name, item.name, bool | None, text, "Graphs"))
        elif hint is int:
            flags.append(Flag(item.name, item.name, int | None, text, "Graphs"))
        else:
            metavar = "PATH" if str in alternatives(hint) else _metavar(hint)
            flags.append(
                Flag(item.name, item.name, str | None, _naming(text, hint), "Graphs", metavar)
            )
    for old, new in config.RENAMED.items():
        flags += [
            Flag(old, f.field, f.kind, f"now called {option_name(new)}", "Graphs", is_hidden=True)
            for f in flags
            if f.name == new
        ]
    return flags


def _of(phase: str, text: str) -> str:
    """A mapping's help as that of one of its keys; the example is a mapping's."""
    return text.partition(", for example")[0].replace("per phase", f"of the {phase} phase")


def _metavar(hint: object) -> str:
    return f"VALUE|{MAPPING}" if MAPPING in allowed(hint) else "VALUE"


def _naming(text: str, hint: object) -> str:
    """Help that names every allowed value, as it is typed."""
    words = [word for word in allowed(hint) if word not in (MAPPING, BYTES)]
    if str in alternatives(hint) or all(word in text for word in words):
        return text
    return f"{text}: {listed(words)}"


def _is_per_phase(hint: object) -> bool:
    parts = [part for part in alternatives(hint) if part is not types.NoneType]
    return all(get_origin(part) is not None and _is_mapping(part) for part in parts)


def _is_mapping(part: object) -> bool:
    origin = get_origin(part)
    return isinstance(origin, type) and issubclass(origin, Mapping)


class Given:
    """What was given on the command line, as the values it stands for."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = {n: v for n, v in values.items() if v is not None and v != []}

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def value(self, name: str) -> object:
        """The raw value of one flag, None where it was not given."""
        return self._values.get(name)

    def names(self, flags: Iterable[Flag]) -> list[str]:
        """The flags among `flags` that were given."""
        return [flag.name for flag in flags if flag.name in self]

    def folder(self, name: str) -> Path | None:
        """The folder one flag names, None where it was not given."""
        text = self.value(name)
        if text == "":  # most likely a shell variable that was not set
            raise InputError(name, "expected a folder, got ''")
        return None if text is None else Path(str(text))

    def request(self, prompt: str | None, base: GenerateRequest | None = None) -> GenerateRequest:
        """The request the flags describe, on top of `base`. Raises `InputError`."""
        values: dict[str, object] = {} if base is None else dict(base.to_mapping())
        for name in self.names(request_flags()):
            values[name] = self._values[name]
        if "set" in self:
            before = {} if base is None else dict(base.set)
            values["set"] = {**before, **_settings(cast(list[str], self._values["set"]))}
        if prompt is not None:
            values["prompt"] = prompt
        return GenerateRequest.from_mapping(values)

    def model(self, base: Mapping[str, Json]) -> ModelSpec:
        """The model the flags describe, on top of `base`. Raises `InputError`."""
        values: dict[str, object] = dict(base)
        values.update({name: self._values[name] for name in self.names(model_flags())})
        return ModelSpec.from_mapping(values)

    def graphs(self, base: Mapping[str, Json] | None = None) -> GraphConfig:
        """The graph configuration the flags describe. Raises `InputError`."""
        hints = get_type_hints(GraphConfig)
        values: dict[str, object] = dict(base or {})
        for name in values:
            if name not in hints:
                raise InputError("from", f"its record says {name}, which GraphConfig has not here")
        for flag in graph_flags():
            if flag.name not in self:
                continue
            value = self._values[flag.name]
            if flag.is_hidden:
                print(f"warning: {option_name(flag.name)} is {flag.help}", file=sys.stderr)
            if _is_per_phase(hints[flag.field]):
                phase = flag.name.partition("_")[0]
                sizes = cast(Mapping[str, object], values.get(flag.field) or {})
                values[flag.field] = {**sizes, phase: value}
            elif isinstance(value, str):
                values[flag.field] = parse(flag.name, hints[flag.field], value)
            else:
                values[flag.field] = value
        try:
            return GraphConfig(**values)  # type: ignore[arg-type]
        except ConfigError as error:
            raise graph_error(error) from error

    def check(self) -> None:
        """Raise `InputError` for what is wrong whatever the model: no library is needed to know."""
        try:
            self.graphs().check_available()
        except ConfigError as error:
            raise graph_error(error) from error
        self.model({"model": "bundled/model"})


def graph_error(error: ConfigError) -> InputError:
    """A field's error in the flag's word: `max_size['decode']` is `--decode-max-size`."""
    known = {item.name for item in fields(GraphConfig)}
    match = re.match(r"(\w+)(?:\['(\w+)'\])?: (.*)", str(error), re.DOTALL)
    if match is not None and match[1].isupper():
        known.add(match[1])  # a variable of the environment
    if match is None or match[1] not in known:
        # a value this version does not honour begins with the field; else the model is what failed
        name = re.split(r"\W", str(error), maxsplit=1)[0]
        return InputError(name if name in known else "model", str(error))
    name, key, problem = match.groups()
    problem = re.sub(r"one of \[([^]]*)\]", _alternatives, problem)
    return InputError(f"{key}_{name}" if key in PHASES else name, problem)


def _alternatives(match: re.Match[str]) -> str:
    """`one of ['a', 'b']` in the words of every other sentence: `a or b`."""
    return listed(word.strip(" '") for word in match[1].split(","))


def _settings(texts: list[str]) -> dict[str, Json]:
    values: dict[str, Json] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InputError("set", f"expected KEY=JSON, got {text!r}")
        try:
            values[key.strip()] = json.loads(value)
        except ValueError as error:
            raise InputError(
                "set", f'expected JSON after {key}= (text needs quotes: "…"), got {value!r}'
            ) from error
    return values
