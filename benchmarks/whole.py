"""Whole pictures beside the plain pipeline's: python -m benchmarks.whole --models z-image,sdxl

Owns one row per pipeline and size: two pictures of other seeds and prompts compared bit for bit,
then plain and graphs timed in turn, to the picture tensor on the device. Knows graphs through the
public API. The surprising fact: the two are one pipeline, switched off and on, so that twenty
gigabytes of weights need not lie on the device twice.

Prints a table, then one line of JSON. Exits 1 where a picture differed or no graph served.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import diffusers
import torch

import dit_graphs
from benchmarks import equality, pipelines, protocol, results
from benchmarks.shapes import Size
from benchmarks.tables import table
from benchmarks.turns import Turns
from dit_graphs.config import BackendName, GraphConfig

Tree = dict[str, object]
Draw = Callable[[int], torch.Tensor]
SCRIPT = "benchmarks/whole.py"
SEEDS = (1, 2)  # the first request captures; the second must be served with other values
COLUMNS = (
    ("model", "pipeline", "{}"),
    ("size", "size", "{}"),
    ("steps", "steps", "{}"),
    ("plain_ms", "plain ms", "{:.1f}"),
    ("graphs_ms", "graphs ms", "{:.1f}"),
    ("speedup", "speed-up", "{:.2f}x"),
    ("busy_ms", "busy ms", "{:.1f}"),
    ("graph_bytes", "graph bytes", "{:,}"),
    ("capture_ms", "capture ms", "{:.0f}"),
    ("replays", "replays", "{}"),
    ("is_equal", "equal", "{}"),
    ("problems", "problems", "{}"),
)


def measure(
    name: str,
    pipe: diffusers.DiffusionPipeline,
    size: Size,
    steps: int | None,
    rounds: int,
    turns: Turns,
) -> tuple[Tree, dict[str, object]]:
    """One row, and the device's clocks while it was timed.

    The pipeline must be accelerated; it holds graphs of this size afterwards.
    """
    with turns.preparing():
        row, plain, draw = _compared(name, pipe, size, steps)
    with turns.measuring(), protocol.GpuClock.maybe(pipe.device.type) as clock:
        timed = {} if row["problems"] else _timed(plain, draw, rounds)
    return row | timed, clock.summary()


def _compared(
    name: str, pipe: diffusers.DiffusionPipeline, size: Size, steps: int | None
) -> tuple[Tree, Draw, Draw]:
    """The row without times, and the two that draw: plain and from graphs."""
    device = pipe.device

    def draw(seed: int) -> torch.Tensor:
        given = pipelines.call_kwargs(name, size, steps=steps, seed=seed, device=device)
        return pipelines.picture(pipe, given)

    def plain(seed: int) -> torch.Tensor:
        with dit_graphs.disabled(pipe):
            return draw(seed)

    before = _counts(pipe)
    expected = [plain(seed) for seed in SEEDS]
    problems = [defect for picture in expected for defect in equality.defects(picture)]
    if equality.changed_fraction(*expected) <= equality.MIN_CHANGED:
        problems.append("another seed and prompt leave most of the picture as it was")
    for seed, picture in zip((*SEEDS, *SEEDS), expected * 2, strict=True):
        if not torch.equal(draw(seed), picture):
            problems.append(f"the picture of seed {seed} differs")
    added = {name: count - before[name] for name, count in _counts(pipe).items()}
    if not added["replays"]:
        problems.append("no call was served by a graph")
    row: Tree = {
        "key": f"{name} {size}",
        "model": name,
        "size": str(size),
        "steps": pipelines.PIPELINES[name].steps if steps is None else steps,
        "device": str(device),
        "replays": added["replays"],
        "graph_bytes": added["nbytes"],
        "capture_ms": added["capture_ms"],
        "problems": problems,
        "is_equal": not problems,
    }
    return row, plain, draw


def _timed(plain: Draw, draw: Draw, rounds: int) -> Tree:
    walls = protocol.interleaved(
        {"plain": lambda: plain(1), "graphs": lambda: draw(1)}, rounds=rounds, warmups=1
    )
    plain_ms, graphs_ms = walls["plain"].median_ms, walls["graphs"].median_ms
    row: Tree = {
        "plain_ms": plain_ms,
        "graphs_ms": graphs_ms,
        "speedup": plain_ms / graphs_ms,
        "timings": {variant: timing.as_dict() for variant, timing in walls.items()},
    }
    if torch.cuda.is_available():
        row["busy_ms"] = protocol.busy(lambda: plain(1), calls=1).ms
    return row


def _counts(pipe: diffusers.DiffusionPipeline) -> dict[str, int]:
    """Replays of all parts, and the bytes and capture times of the graphs they hold."""
    parts = cast("dict[str, Tree]", dit_graphs.stats(pipe)["components"]).values()
    graphs = [graph for part in parts for graph in cast("list[dict[str, int]]", part["graphs"])]
    return {
        "replays": sum(cast(int, part["replays"]) for part in parts),
        "nbytes": sum(graph["nbytes"] for graph in graphs),
        "capture_ms": sum(graph["capture_ms"] for graph in graphs),
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line. Exits 2 on a wrong one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.whole", description=__doc__, allow_abbrev=False
    )
    names = parser.add_argument(
        "--models", type=lambda text: text.split(","), default=list(pipelines.PIPELINES)
    )
    parser.add_argument("--sizes", default="256,512,1024", help="256,512x768,256x448x17")
    parser.add_argument("--steps", type=int, help="default: the family's usual number")
    parser.add_argument("--backend", default="full", choices=("full", "breakable", "recorded"))
    parser.add_argument("--rounds", type=int, default=protocol.MIN_ROUNDS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--turns", type=Path, help="a file: processes that share it take turns")
    parser.add_argument("--small", action="store_true", help="few narrow layers: no result")
    results.add_arguments(parser)
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.models) - set(pipelines.PIPELINES))
    if unknown:
        known = list(pipelines.PIPELINES)
        parser.error(f"argument {names.option_strings[0]}: {unknown}; known: {known}")
    if given.small and given.output:
        parser.error("--small measures nothing that belongs into a result file")
    return given


def main(arguments: list[str]) -> int:
    """Measures every pipeline at every size; the exit status says whether all was equal."""
    given = parse(arguments)
    origin = results.provenance(commit=given.commit, allow_dirty=given.allow_dirty)
    config = GraphConfig(backend=cast(BackendName, given.backend))
    turns = Turns(given.turns)
    all_rows: list[Tree] = []
    for name in given.models:
        with turns.preparing():
            built = pipelines.build(name, given.device, small=given.small)
            pipe = dit_graphs.accelerate(built, config)
        for text in given.sizes.split(","):
            row, clocks = measure(name, pipe, Size.parse(text), given.steps, given.rounds, turns)
            all_rows.append(row)
            print(table([row], COLUMNS), flush=True)
            if given.output:
                run = results.run_record(SCRIPT, [row], provenance=origin, clocks=clocks)
                results.write(Path(given.output), run)
        dit_graphs.restore(pipe)
        del pipe, built
        if given.device == "cuda":
            torch.cuda.empty_cache()  # the next pipeline starts from an empty device
    is_equal = all(row["is_equal"] for row in all_rows)
    slim = [{k: v for k, v in row.items() if k != "timings"} for row in all_rows]
    print(json.dumps({"is_equal": is_equal, "output": given.output, "rows": slim}))
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
