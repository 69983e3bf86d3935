"""One denoiser forward, plain and replayed: python -m benchmarks.forward --models z-image,wan-1.3b

Owns the order of things: outputs worth comparing first, equality second, timing last. Knows graphs
only through the public API. The surprising fact: the call that captures and the calls that verify
return *eager* results, so equality is read from later calls alone, and the counters must show that
each of those was a replay.

Prints a table, then one line of JSON. Exits 1 when an output was unequal, proved nothing, or did
not come from a graph.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

import torch
from torch import nn

import dit_graphs
from benchmarks import equality, models, protocol, results
from benchmarks.shapes import Size
from benchmarks.tables import table
from dit_graphs.config import AttentionPolicy, BackendName, GraphConfig

Tree = dict[str, object]
SCRIPT = "benchmarks/forward.py"
NUM_PROOFS = 3
NUM_STEPS = 4
# P1: a replay costs at most 1 % more than its kernels, half a microsecond for each of them, and
# fifteen for each break.
P1_BUSY, P1_MS_PER_KERNEL, P1_MS_PER_BREAK = 1.01, 0.5e-3, 15e-3
COLUMNS = (
    ("model", "model", "{}"),
    ("size", "size", "{}"),
    ("eager_ms", "eager ms", "{:.1f}"),
    ("busy_ms", "busy ms", "{:.1f}"),
    ("replay_ms", "replay ms", "{:.1f}"),
    ("replay_over_busy", "replay/busy", "{:.3f}"),
    ("speedup", "speed-up", "{:.2f}x"),
    ("host_ms", "host ms", "{:.2f}"),
    ("segments", "segments", "{}"),
    ("breaks", "breaks", "{}"),
    ("captured_fraction", "captured", "{:.2f}"),
    ("capture_ms", "capture ms", "{:.0f}"),
    ("graph_bytes", "graph bytes", "{:,}"),
    ("is_equal", "equal", "{}"),
    ("problems", "problems", "{}"),
)


@dataclass(frozen=True, slots=True)
class Options:
    """How every row of this run is measured."""

    device: str
    backend: BackendName
    attention: AttentionPolicy
    rounds: int


def measure(name: str, module: nn.Module, size: Size, options: Options) -> Tree:
    """One row. The module is unwrapped again at the end; `problems` is empty when all is proven."""
    inputs = models.inputs(name, size, device=options.device)
    row: Tree = {
        "key": f"{name} {size} {options.backend} {options.attention}",
        "model": name,
        "size": str(size),
        "device": options.device,
        "backend": options.backend,
        "attention": options.attention,
    }
    problems = eager_problems(module, inputs)
    if not problems:
        row |= _eager_cost(module, inputs, options)
        config = GraphConfig(
            backend=options.backend, attention=options.attention, capture="first_use"
        )
        dit_graphs.wrap(module, config)
        try:
            first, problems = _first_use_and_equality(module, inputs)
            row |= first
            if not problems:
                timing, problems = _timing(module, inputs, options)
                row |= timing
            row |= _graph_record(module)
        finally:
            dit_graphs.unwrap(module)
        row |= _derived(row)
    return {**row, "is_equal": not problems, "problems": problems}


def eager(module: nn.Module, inputs: Tree) -> object:
    """The plain forward with its hooks, past anything `wrap` installed: the baseline."""
    with torch.no_grad():
        return cast(Callable[..., object], module._call_impl)(**inputs)


def eager_problems(module: nn.Module, inputs: Tree) -> list[str]:
    """Why equality with this eager forward would mean nothing; empty when it means something."""
    reference = eager(module, inputs)
    problems = equality.defects(reference)
    if not equality.equal(reference, eager(module, inputs)):
        problems.append("eager differs from itself")
    weak = equality.insensitive(
        lambda tree: eager(module, tree), inputs, models.change(inputs, seed=1)
    )
    problems += [f"input{path} changes {share:.0%} of the output" for path, share in weak.items()]
    return problems


def _eager_cost(module: nn.Module, inputs: Tree, options: Options) -> Tree:
    if options.device != "cuda":
        return {}
    torch.cuda.synchronize()  # sync: the peak below is of this forward alone
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    eager(module, inputs)
    torch.cuda.synchronize()  # sync: as above
    peak = torch.cuda.max_memory_allocated() - before
    cost = protocol.busy(lambda: eager(module, inputs))
    return {"busy_ms": cost.ms, "kernels": cost.kernels, "eager_peak_bytes": peak}


def _first_use_and_equality(module: nn.Module, inputs: Tree) -> tuple[Tree, list[str]]:
    """The first call (which captures), then replays of inputs that the capture did not see."""
    start = time.perf_counter()
    with torch.no_grad(), dit_graphs.request():
        module(**inputs)
    protocol.synchronize()
    first_ms = (time.perf_counter() - start) * 1e3
    trees = [models.change(inputs, seed) for seed in range(2, 2 + 2 * NUM_PROOFS)]
    proving, replaying = trees[:NUM_PROOFS], trees[NUM_PROOFS:]
    with torch.no_grad():
        for tree in proving:  # every leaf is compared with eager by the library itself
            with dit_graphs.request():
                module(**tree)
        before = _num_replays(module)
        problems = []
        for number, tree in enumerate(replaying):
            with dit_graphs.request():
                output = module(**tree)
            expected = eager(module, tree)
            if not equality.equal(output, expected):
                share = equality.changed_fraction(output, expected)
                problems.append(f"replay {number} differs from eager in {share:.1%}")
    return {"first_use_ms": first_ms}, [
        *problems,
        *_not_replayed(module, before, len(replaying)),
    ]


def _timing(module: nn.Module, inputs: Tree, options: Options) -> tuple[Tree, list[str]]:
    """Eager and replay in turn, each call with the next step's latents and timestep."""
    trees = [models.change(inputs, seed, per_step=True) for seed in range(100, 100 + NUM_STEPS)]
    before = _num_replays(module)
    num_calls = 0

    def calling(call: Callable[[Tree], object]) -> Callable[[], object]:
        steps = itertools.cycle(trees)
        return lambda: call(next(steps))

    def replay(tree: Tree) -> object:
        nonlocal num_calls
        num_calls += 1
        return module(**tree)

    variants = {"eager": calling(lambda tree: eager(module, tree)), "replay": calling(replay)}
    with torch.no_grad(), dit_graphs.request():
        walls = protocol.interleaved(variants, rounds=options.rounds)
        hosts = protocol.interleaved(
            {"replay": variants["replay"]}, rounds=options.rounds, measure=protocol.host_ms
        )
    row: Tree = {
        "eager_ms": walls["eager"].median_ms,
        "replay_ms": walls["replay"].median_ms,
        "host_ms": hosts["replay"].median_ms,
        "timings": {name: timing.as_dict() for name, timing in walls.items()},
        "host_timing": hosts["replay"].as_dict(),
    }
    return row, _not_replayed(module, before, num_calls)


def _component(module: nn.Module) -> Tree:
    components = dit_graphs.stats(module)["components"]
    assert isinstance(components, dict)
    (component,) = components.values()
    assert isinstance(component, dict)
    return component


def _num_replays(module: nn.Module) -> int:
    replays = _component(module)["replays"]
    assert isinstance(replays, int)
    return replays


def _not_replayed(module: nn.Module, before: int, expected: int) -> list[str]:
    got = _num_replays(module) - before
    if got == expected:
        return []
    return [f"{got} of {expected} calls replayed: {_component(module)['fallbacks']}"]


def _graph_record(module: nn.Module) -> Tree:
    graphs = _component(module)["graphs"]
    assert isinstance(graphs, list)
    if not graphs:
        return {}
    graph = graphs[-1]
    return {
        "graph_backend": graph["backend"],
        "graph_bytes": graph["nbytes"],
        "verified": graph["verified"],
        **{key: graph[key] for key in ("segments", "breaks", "captured_fraction", "capture_ms")},
    }


def _derived(row: Tree) -> Tree:
    if "replay_ms" not in row or row["device"] != "cuda":
        return {}  # a CPU has no launches to save: no ratio is claimed there
    eager_ms, replay_ms = _number(row, "eager_ms"), _number(row, "replay_ms")
    derived: Tree = {"speedup": eager_ms / replay_ms}
    if "busy_ms" in row:
        busy_ms = _number(row, "busy_ms")
        limit_ms = (
            P1_BUSY * busy_ms
            + P1_MS_PER_KERNEL * _number(row, "kernels")
            + P1_MS_PER_BREAK * _number(row, "breaks")
        )
        derived |= {
            "replay_over_busy": replay_ms / busy_ms,
            "p1_limit_ms": limit_ms,
            "is_within_p1": replay_ms <= limit_ms,
        }
    return derived


def _number(row: Tree, key: str) -> float:
    value = row[key]
    assert isinstance(value, int | float)
    return value


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line. Exits 2 on a wrong one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.forward", description=__doc__, allow_abbrev=False
    )
    names = parser.add_argument(
        "--models", type=lambda text: text.split(","), default=["z-image"], help="comma-separated"
    )
    parser.add_argument(
        "--sizes", default="table", help="256,512x768,256x448x17; table: those of each model"
    )
    parser.add_argument("--attention", choices=get_args(AttentionPolicy), default="auto")
    parser.add_argument("--backend", choices=get_args(BackendName), default="full")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="few narrow layers: no result")
    results.add_arguments(parser)
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.models) - set(models.MODELS))
    if unknown:
        parser.error(f"argument {names.option_strings[0]}: {unknown}; known: {list(models.MODELS)}")
    if given.small and given.output:
        parser.error("--small measures nothing that belongs into a result file")
    return given


def _sizes(given: argparse.Namespace, model: str) -> list[Size]:
    texts = models.MODELS[model].sizes if given.sizes == "table" else given.sizes.split(",")
    return [Size.parse(text) for text in texts]


def main(arguments: list[str]) -> int:
    """Measures every model at every size; the exit status says whether all was equal."""
    given = parse(arguments)
    origin = results.provenance(commit=given.commit, allow_dirty=given.allow_dirty)
    options = Options(given.device, given.backend, given.attention, given.rounds)
    all_rows: list[Tree] = []
    for name in given.models:
        module = models.build(name, given.device, small=given.small)
        with protocol.GpuClock.maybe(given.device) as clock:
            rows = [measure(name, module, size, options) for size in _sizes(given, name)]
        del module
        if given.device == "cuda":
            torch.cuda.empty_cache()  # the next model starts from an empty device
        all_rows += rows
        print(table(rows, COLUMNS), flush=True)
        if given.output:
            run = results.run_record(SCRIPT, rows, provenance=origin, clocks=clock.summary())
            results.write(Path(given.output), run)
    is_equal = all(row["is_equal"] for row in all_rows)
    hidden = ("timings", "host_timing")
    slim = [{k: v for k, v in row.items() if k not in hidden} for row in all_rows]
    print(json.dumps({"is_equal": is_equal, "output": given.output, "rows": slim}))
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
