"""Owns `dit-graphs inspect`: what graphs do for one pipeline at one size, measured by running it.

Must never estimate what a run can show. The surprising fact: four runs are needed: what is called
once per picture (the VAE) is seen in the first, captured in the second or third, and replayed from
the fourth.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from .flags import Flag, Given, graph_flags, model_flags, request_flags

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from dit_graphs.pipelines.generate import Item

__all__ = ["ARGUMENTS", "flags", "run"]

RUNS = 4
_JSON = Flag(
    "json",
    "json",
    bool | None,
    "print the numbers as one JSON object",
    "Files",
    has_opposite=False,
)
ARGUMENTS = [
    inspect.Parameter(
        "prompt",
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=None,
        annotation=Annotated[str | None, typer.Argument(metavar="PROMPT", show_default=False)],
    )
]


def flags() -> list[Flag]:
    """The flags of this command."""
    return [_JSON, *request_flags(), *model_flags(), *graph_flags()]


def run(given: Given) -> int:
    """Run the pipeline four times and say what came from graphs, what did not, and why.

    Per component: signatures, segments, breaks, captured fraction, eager and replay time, bytes.
    """
    since = time.perf_counter()
    given.check()
    import dit_graphs
    from dit_graphs.pipelines.generate import generate_items

    from .session import completed, open_session

    prompt = given.value("prompt")
    request = given.request(str(prompt) if prompt is not None else "a picture")
    out = (lambda text: print(text, file=sys.stderr)) if given.value("json") else print
    session = open_session(given, [request], since=since, say=out)
    request = completed(session, request)
    pipe = session.loaded.pipe
    pipe.set_progress_bar_config(disable=not sys.stderr.isatty(), leave=False)
    items: list[Item] = []
    for _ in range(RUNS):
        items += generate_items(session.loaded, request.single(0), graphs=session.graphs)
    numbers = cast("dict[str, Any]", dit_graphs.stats(pipe))
    guidance = _guidance(pipe, numbers["components"], sum(item.num_steps for item in items))
    if given.value("json"):
        runs = [_run_numbers(item) for item in items]
        about = {"pipeline": type(pipe).__name__, "guidance": guidance}
        print(json.dumps({**about, "runs": runs, "stats": numbers}))
        return 0
    print(f"{type(pipe).__name__}: {_asked(items[0])}, {guidance}")
    for number, item in enumerate(items, start=1):
        line = item.graph_use.line(session.loaded.device)
        print(f"run {number}   {item.total_seconds:8.2f} s  {line}")
    for line in _components(pipe, numbers):
        print(line)
    return 0


def _run_numbers(item: Item) -> dict[str, object]:
    return {"seconds": item.seconds, **item.graph_use.to_mapping(), **_sizes(item)}


def _sizes(item: Item) -> dict[str, int]:
    return item.media[0].describe()


def _asked(item: Item) -> str:
    """The real size of what came out, and the steps it took."""
    from .report import counted

    size = _sizes(item)
    words = [f"{size['width']}x{size['height']}"] if "width" in size else []
    words += [counted(size["num_frames"], "frame")] if "num_frames" in size else []
    return ", ".join([*words, counted(item.num_steps, "step")])


def _guidance(
    pipe: DiffusionPipeline, components: Mapping[str, Mapping[str, Any]], num_steps: int
) -> str:
    """How the prompt steered: by the calls that were counted, and by what the pipeline says."""
    denoisers = [numbers for name, numbers in components.items() if name.startswith("denoiser")]
    calls = sum(numbers["replays"] + numbers["eager_calls"] for numbers in denoisers)
    per_step = round(calls / num_steps) if num_steps else 0
    if per_step > 1:
        return f"CFG in {per_step} calls a step"
    if getattr(pipe, "do_classifier_free_guidance", False):
        return "CFG batched"
    config = getattr(getattr(pipe, "transformer", None), "config", None)
    return "guidance embedded" if getattr(config, "guidance_embeds", False) else "no CFG"


def _components(pipe: DiffusionPipeline, numbers: Mapping[str, Any]) -> Iterator[str]:
    """Every component that was called; then those that were not, and those that cannot be."""
    from dit_graphs.pipelines.acceleration import acceleration_of
    from dit_graphs.pipelines.reports import misses, not_called

    acceleration = acceleration_of(pipe)
    assert acceleration is not None
    idle: list[str] = []
    for name, component in numbers["components"].items():
        if not component["replays"] + component["eager_calls"]:
            idle.append(name)
            continue
        yield from _component(name, component)
        yield from misses(acceleration.runners[name])
    if idle:
        yield not_called(idle)
    for name, why in numbers["refused"].items():
        yield f"{name}: eager. {why}"


def _component(name: str, numbers: Mapping[str, Any]) -> Iterator[str]:
    held = sum(graph["nbytes"] or 0 for graph in numbers["graphs"])  # the pool is the device's
    outputs = numbers.get("output_bytes")
    of_it = f", {_bytes(outputs)} of it outputs" if outputs else ""
    yield (
        f"{name}: {numbers['captures']} captured, {numbers['replays']} replayed, "
        f"{numbers['eager_calls']} eager, {_bytes(held)}{of_it}"
    )
    if numbers.get("expected_speedup") is not None:
        yield f"  expect {numbers['expected_speedup']:.2f}x, by calls that were measured both ways"
    for graph in numbers["graphs"]:
        yield f"  {graph['signature']}"
        yield f"    {_graph(graph)}"
    for reason, number in sorted(numbers["fallbacks"].items()):
        yield f"  {number} eager: {reason}: {_told(reason, numbers['details'].get(reason, ''))}"


def _graph(graph: Mapping[str, Any]) -> str:
    from dit_graphs.pipelines.reports import verified

    from .report import counted

    words = [
        str(graph["backend"]),
        counted(graph["segments"], "segment"),
        counted(_number(graph["breaks"]), "break"),
        f"captured {_percent(graph['captured_fraction'])}",
        _bytes(graph["nbytes"]),
        verified(graph),
    ]
    eager, replay = graph["eager_ms"], graph["replay_ms"]
    if eager and replay:
        words.append(f"eager {eager:.2f} ms, replay {replay:.2f} ms: {eager / replay:.2f}x")
    return ", ".join(words)


def _number(breaks: object) -> int:
    return len(breaks) if isinstance(breaks, (list, tuple)) else int(str(breaks))


def _percent(fraction: float | None) -> str:
    return "not measured" if fraction is None else f"{100 * fraction:.1f} %"


def _bytes(number: int | None) -> str:
    if number is None:
        return "bytes not measured"
    return f"{number / (1 << 20):.1f} MiB"


def _told(reason: str, detail: str) -> str:
    from dit_graphs.errors import Reason

    return Reason(reason).told(detail)
