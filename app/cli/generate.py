"""Owns `dit-graphs generate`: prompts in, files out, or one file made again from its record.

Must never change what was asked. The surprising fact: `--from` judges itself: it compares the new
file's bytes with the old one's and says what differs between the two environments.
"""

from __future__ import annotations

import inspect
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from dit_graphs.pipelines.generate import GenerateRequest, InputError, Json

from .codes import FAILED
from .flags import Flag, Given, graph_flags, model_flags, request_flags

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

__all__ = ["ARGUMENTS", "OUTPUT", "OUTPUTS", "flags", "run"]

OUTPUTS = Path("outputs")
OUTPUT = Flag(
    "output", "output", str | None, f"folder the files go to (default: {OUTPUTS})", "Files", "DIR"
)
_FROM = Flag("from_", "from", str | None, "make this PNG or JSON sidecar again", "Files", "FILE")
_REWRITE = Flag(
    "rewrite_prompt",
    "rewrite_prompt",
    bool | None,
    "let the pipeline's own language model write the prompt out first",
    "Picture",
    has_opposite=False,
)
ARGUMENTS = [
    inspect.Parameter(
        "prompts",
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=None,
        annotation=Annotated[
            list[str] | None, typer.Argument(metavar="PROMPT...", show_default=False)
        ],
    )
]


def flags() -> list[Flag]:
    """The flags of this command."""
    return [OUTPUT, _FROM, _REWRITE, *request_flags(), *model_flags(), *graph_flags()]


def run(given: Given) -> int:
    """Make a picture or a video of each PROMPT.

    Image i of --num-images uses the seed --seed + i and can be made again alone. Every file carries
    its parameters (in the PNG, and in a JSON file beside it); --from FILE makes it again.
    """
    given.check()
    since = time.perf_counter()
    if "from_" in given:
        return _again(given, Path(str(given.value("from_"))), since)
    prompts = cast("list[str | None]", given.value("prompts") or [None])
    requests = [given.request(prompt) for prompt in prompts]
    _make(given, requests, since)
    return 0


def _make(
    given: Given,
    requests: list[GenerateRequest],
    since: float,
    *,
    model: dict[str, Json] | None = None,
    graphs: dict[str, Json] | None = None,
) -> list[tuple[Path, dict[str, Json]]]:
    """Every item of every request, saved; (file, record) of each."""
    from dit_graphs.pipelines.generate import Naming, check_output, generate_items, guidance_note

    from .report import announce, listing_finished, warn
    from .session import completed, open_session

    folder = given.folder("output") or OUTPUTS
    check_output(folder)
    session = open_session(given, requests, since=since, model=model, graphs=graphs)
    made: list[tuple[Path, dict[str, Json]]] = []
    finished: list[Path] = []
    pipe = session.loaded.pipe
    total = sum(request.num_images for request in requests)
    with listing_finished(finished):
        for request in (completed(session, request) for request in requests):
            note = guidance_note(pipe, request)
            if note is not None:
                warn(note)
            naming = Naming(folder=folder)
            if given.value("rewrite_prompt"):
                naming = Naming(
                    folder=folder, subject=request.prompt, notes={"rewritten_from": request.prompt}
                )
                request = _rewritten(pipe, request)
            pipe.set_progress_bar_config(
                disable=not sys.stderr.isatty(), leave=False, desc=f"{len(finished) + 1}/{total}"
            )
            for item in generate_items(
                session.loaded, request, naming=naming, graphs=session.graphs, name=session.name
            ):
                finished += item.files
                made += [(path, item.record) for path in item.files]
                announce(item, request, session.loaded.device)
    return made


def _rewritten(pipe: DiffusionPipeline, request: GenerateRequest) -> GenerateRequest:
    """`request` with its prompt written out; the record holds the new one, so it needs no model."""
    import dit_graphs

    if request.prompt is None:
        raise InputError("rewrite_prompt", "expected a PROMPT to rewrite")
    start = time.perf_counter()
    try:
        text = dit_graphs.rewrite_prompt(pipe, request.prompt, seed=request.seed or 0)
    except dit_graphs.ConfigError as error:
        raise InputError("rewrite_prompt", str(error)) from error
    print(f"rewrite  {time.perf_counter() - start:8.2f} s  {text}")
    return replace(request, prompt=text)


def _again(given: Given, source: Path, since: float) -> int:
    """Make the item of a record again; 0 where the bytes are the same or the user changed it."""
    if "prompts" in given:
        raise InputError("from", "expected no PROMPT beside it: the file has its own")
    if given.value("rewrite_prompt"):
        raise InputError("rewrite_prompt", "expected it left out beside --from: a prompt is kept")
    if not source.is_file():  # known without the seconds that importing a library takes
        raise InputError("from", f"no such file: {str(source)!r}")
    from dit_graphs.pipelines.generate import changes, read_source

    record, hashes = read_source(source)
    own = given.names([*request_flags(), *model_flags(), *graph_flags()])
    request = given.request(None, base=GenerateRequest.from_mapping(_mapping(record["request"])))
    _check_inputs(record, own)
    made = _make(
        given,
        [request],
        since,
        model=_mapping(record["model"]),
        graphs=_mapping(record.get("graphs") or {}),
    )
    if {_file_hash(path) for path, _ in made} & hashes:
        print(f"same bytes as {source}")
        return 0
    new = made[0][1]
    same_pixels = new["pixels_sha256"] == record["pixels_sha256"]
    print(f"{'same pixels, other bytes than' if same_pixels else 'not the same as'} {source}:")
    lines = [line for line in changes(record, new) if not line.startswith("pixels_sha256")]
    for line in lines or ["nothing that was recorded has changed"]:
        print(f"  {line}")
    return 0 if own or same_pixels else FAILED


def _check_inputs(record: dict[str, Json], own: list[str]) -> None:
    """Every input picture of the record is still there; the user hears of one that changed."""
    from .report import warn

    for entry in cast("list[dict[str, str]]", record.get("inputs") or []):
        if entry["option"] in own:
            continue
        path = Path(entry["path"])
        if not path.is_file():
            raise InputError(entry["option"], f"the input file is missing: {entry['path']!r}")
        if _file_hash(path) != entry["sha256"]:
            warn(f"{entry['path']} has changed since {entry['sha256'][:12]} was used")


def _file_hash(path: Path) -> str:
    from dit_graphs.pipelines.generate.inputs import file_sha256

    return file_sha256(path)


def _mapping(value: Json) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise InputError("from", f"expected a JSON object in the record, got {value!r}")
    return value
