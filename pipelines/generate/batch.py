"""Owns many requests in a row: resuming, going on after a failure, and the account at the end.

Must never make again what already lies complete in the folder. The surprising fact: what is done
is known from the sidecars alone, by a key of the request as it was written, so a resumed batch
needs no state file and random seeds do not matter.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from diffusers import DiffusionPipeline

from dit_graphs import GraphConfig

from .errors import InputError
from .load import LoadedPipeline
from .request import GenerateRequest, Json, json_key
from .run import Item, Naming, as_loaded, generate_items
from .save import check_output
from .serving import keeping_partners, serving

__all__ = ["BatchReport", "Failure", "generate_batch", "read_lines"]

Line = GenerateRequest | InputError


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that gave no item: its number, counted from 1, and the error."""

    number: int
    error: Exception


@dataclass(slots=True)
class BatchReport:
    """What came of a batch: items made now, items found complete, and failed requests."""

    items: list[Item] = field(default_factory=list)
    num_skipped: int = 0
    failures: list[Failure] = field(default_factory=list)


def generate_batch(
    pipe: DiffusionPipeline | LoadedPipeline,
    requests: Sequence[Line | str | Mapping[str, Json]] | Mapping[int, Line],
    *,
    output: Path | str,
    graphs: GraphConfig | None = None,
    name: str | None = None,
    on_item: Callable[[int, Item], None] | None = None,
    on_failure: Callable[[Failure], None] | None = None,
    report: BatchReport | None = None,
) -> BatchReport:
    """Every request drawn and saved in the folder `output`, except what already lies there.

    A request that fails is noted and the next one begins. A request may be a prompt, a dict of a
    request's fields, or the `InputError` met when it was read; anything else in a sequence is a
    `TypeError`. A mapping gives the requests numbers of their own, a sequence counts from 1;
    files are named by number, prompt and seed. `report` is filled as the work
    goes on, so that an interrupted caller still knows what was finished.
    """
    loaded, folder = as_loaded(pipe), Path(output)
    report = BatchReport() if report is None else report
    check_output(folder)
    done = _keys_in(folder)
    seen: Counter[str] = Counter()
    if not isinstance(requests, Mapping):
        requests = {number: _line(line) for number, line in enumerate(requests, start=1)}
    with keeping_partners(loaded, beyond=loaded is pipe):
        for number, request in requests.items():
            try:
                if isinstance(request, InputError):
                    raise request
                base = _key(serving(loaded, request), request, name)
                seen[base] += 1
                keys = [f"{base}-{seen[base]}-{index}" for index in range(request.num_images)]
                skip = frozenset(index for index, key in enumerate(keys) if key in done)
                report.num_skipped += len(skip)
                if len(skip) == request.num_images:
                    continue
                notes: dict[str, Json] = {"batch_keys": cast(list[Json], keys)}
                naming = Naming(folder=folder, prefix=f"{number:04d}-", notes=notes)
                for item in generate_items(
                    loaded, request, naming=naming, graphs=graphs, name=name, skip=skip
                ):
                    report.items.append(item)
                    if on_item is not None:
                        on_item(number, item)
            except Exception as error:
                failure = Failure(number, error)
                report.failures.append(failure)
                if on_failure is not None:
                    on_failure(failure)
    return report


def read_lines(lines: Iterable[str], defaults: GenerateRequest) -> dict[int, Line]:
    """One request or one error per line of JSON, by line number; blank lines are left out.

    What a line leaves open is taken from `defaults`.
    """
    return {
        number: _read_line(line, defaults)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    }


def _line(line: Line | str | Mapping[str, Json]) -> Line:
    if isinstance(line, (GenerateRequest, InputError)):
        return line
    if not isinstance(line, (str, Mapping)):
        raise TypeError(f"expected a GenerateRequest, a prompt or a dict, got {line!r}")
    try:
        return GenerateRequest.from_mapping({"prompt": line} if isinstance(line, str) else line)
    except InputError as error:
        return error


def _read_line(line: str, defaults: GenerateRequest) -> Line:
    try:
        values = json.loads(line)
    except ValueError as error:
        return InputError("line", f"not JSON: {error}")
    if not isinstance(values, dict):
        return InputError("line", f"expected a JSON object, got {line.strip()[:60]!r}")
    try:
        given = defaults.to_mapping()
        if isinstance(values.get("set"), dict):
            values["set"] = {**defaults.set, **values["set"]}
        return GenerateRequest.from_mapping({**given, **values})
    except InputError as error:
        return error


def _key(loaded: LoadedPipeline, request: GenerateRequest, name: str | None) -> str:
    # Where it runs does not make it another picture to ask for.
    places = ("device", "offload", "vae_tiling", "vae_slicing")
    model = {key: value for key, value in loaded.spec.to_mapping().items() if key not in places}
    if name is not None:
        model["model"] = name
    text = json_key([type(loaded.pipe).__name__, model, request.to_mapping()])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _keys_in(folder: Path) -> set[str]:
    """The keys of every complete item in `folder`."""
    keys: set[str] = set()
    for path in folder.glob("*.json"):
        try:
            sidecar = json.loads(path.read_text(encoding="utf-8"))
            files = [folder / entry["name"] for entry in sidecar["files"]]
            key = sidecar["batch_keys"][sidecar["item"]["index"]]
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            continue  # someone else's JSON
        if all(path.is_file() for path in files):
            keys.add(key)
    return keys
