"""Owns many requests in a row: resuming, going on after a failure, and the account at the end.

Must never make again what already lies complete in the folder. The surprising fact: what is done
is known from the sidecars alone, by a key of the request as it was written, so a resumed batch
needs no state file and random seeds do not matter.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from diffusers import DiffusionPipeline

from dit_graphs import GraphConfig

from .errors import InputError
from .load import LoadedPipeline
from .request import GenerateRequest, Json, json_key
from .run import Item, Naming, as_loaded, generate_items
from .save import check_output
from .serving import keeping_partners, serving

__all__ = ["BatchReport", "Failure", "generate_batch", "read_lines"]

Line: TypeAlias = GenerateRequest | InputError
Asked: TypeAlias = "Line | str | Mapping[str, Json]"


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
    requests: Iterable[Asked] | Mapping[int, Asked],
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
    request's fields, or the `InputError` met when it was read; others are a `TypeError` before
    anything is drawn. A mapping gives the requests numbers of their own, else they count from 1;
    files are named by number, prompt and seed. `report` is filled as the work goes on, so that an
    interrupted caller still knows what was finished.
    """
    lines = _numbered(requests)
    loaded, folder = as_loaded(pipe), Path(output)
    report = BatchReport() if report is None else report
    check_output(folder)
    done = _complete_in(folder)
    seen: Counter[str] = Counter()
    with keeping_partners(loaded, beyond=loaded is pipe):
        for number, request in lines.items():
            try:
                if isinstance(request, InputError):
                    raise request
                base = _key(serving(loaded, request), request, name)
                seen[base] += 1
                key = f"{base}-{seen[base]}"
                skip = frozenset(done.get(key, ()))
                report.num_skipped += len(skip)
                if len(skip) == request.num_images:
                    continue
                naming = Naming(folder=folder, prefix=f"{number:04d}-", notes={"batch_key": key})
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


def _numbered(requests: Iterable[Asked] | Mapping[int, Asked]) -> dict[int, Line]:
    if isinstance(requests, str):
        raise TypeError(f"expected several requests, got one prompt: {requests!r}")
    if not isinstance(requests, Mapping):
        requests = dict(enumerate(requests, start=1))
    for number in requests:
        if not isinstance(number, int):
            raise TypeError(f"expected a number for each request, got {number!r}")
    return {number: _line(line) for number, line in requests.items()}


def _line(line: Asked) -> Line:
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
        values = json.loads(line, object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as error:
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


def _once_each(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """Python's reader would take the last of two values without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, number in Counter(key for key, _ in pairs).items() if number > 1)
        raise ValueError(f"{twice!r} stands in it twice")
    return found


def _key(loaded: LoadedPipeline, request: GenerateRequest, name: str | None) -> str:
    # Where it runs does not make it another picture to ask for.
    places = ("device", "offload", "vae_tiling", "vae_slicing")
    model = {key: value for key, value in loaded.spec.to_mapping().items() if key not in places}
    if name is not None:
        model["model"] = name
    text = json_key([type(loaded.pipe).__name__, model, request.to_mapping()])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _complete_in(folder: Path) -> dict[str, set[int]]:
    """The keys of the requests in `folder`, and which of their items are complete."""
    found: dict[str, set[int]] = {}
    for path in folder.glob("*.json"):
        if path.name.startswith("."):
            continue  # left by a process that was killed before its files had names
        try:
            sidecar = json.loads(path.read_text(encoding="utf-8"))
            files = [folder / entry["name"] for entry in sidecar["files"]]
            key, index = str(sidecar["batch_key"]), int(sidecar["item"]["index"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue  # someone else's JSON
        if files and all(path.is_file() for path in files):
            found.setdefault(key, set()).add(index)
    return found
