"""Every model class of diffusers, plain against wrapped: python -m benchmarks.sweep --device cpu

Owns the run of one case: outputs worth comparing first, then calls of two sizes and of batched and
sequential guidance, each with inputs the capture did not see, each compared bit for bit. Knows
graphs only through the public API. The surprising fact: plain and wrapped are two models built
from one seed, not one model called two ways: what a call leaves behind in a model is compared too.

    python -m benchmarks.sweep --device cpu --output sweep-cpu.json
    python -m benchmarks.sweep --device cuda --workers 8 --commit HASH --output sweep-h200.json
    python -m benchmarks.sweep --write-docs

Prints one line per case, then one line of JSON. Exits 1 when an output was unequal, proved nothing,
or a case raised.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

# Before diffusers, which asks for CUDA when imported: the driver's answer would forbid it to forks.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import dit_graphs
from benchmarks import (
    equality,
    results,
    sweep_controlnets,
    sweep_docs,
    sweep_table,
    sweep_transformers,
    sweep_unets,
    sweep_vaes,
    sweep_workers,
)
from benchmarks.sweep_cases import Case, Skipped, Tree

__all__ = ["CASES", "SKIPPED", "Options", "Side", "measure", "not_worth_comparing"]

SCRIPT = "benchmarks/sweep.py"
# Plain, observed (up to four times, where breaks are found), compared, replayed: eight calls.
NUM_STEPS = {"sequential": 4, "batched": 8}
MIN_REPLAYS = 2

CASES: dict[str, Case] = {
    case.key: case
    for module in (sweep_table, sweep_transformers, sweep_unets, sweep_controlnets, sweep_vaes)
    for case in module.CASES
}
SKIPPED: tuple[Skipped, ...] = (*sweep_transformers.SKIPPED, *sweep_vaes.SKIPPED)


@dataclass(frozen=True, slots=True)
class Options:
    """Where and how the cases run."""

    device: str
    backend: str


class Side:
    """One of the two models, with the method under test and a generator of its own."""

    def __init__(self, case: Case, device: str) -> None:
        self.case = case
        self.device = torch.device(device)
        self.module: nn.Module = case.build().to(self.device)
        self.generator = torch.Generator(self.device).manual_seed(3)

    def arguments(self, seed: int, batch: int, width: int) -> Tree:
        """Drawn arguments on the device; a generator is this side's own."""
        drawn = self._placed(self.case.draw(seed, batch, width))
        assert isinstance(drawn, dict)
        return drawn

    def _placed(self, value: object) -> object:
        if isinstance(value, Tensor):
            return value.to(self.device)
        if isinstance(value, torch.Generator):
            return self.generator
        if type(value).__module__.startswith("diffusers."):  # a key-value cache, drawn anew
            for name, held in vars(value).items():
                setattr(value, name, self._placed(held))
            return value
        if isinstance(value, list | tuple):
            return type(value)(self._placed(item) for item in value)
        if isinstance(value, dict):
            return {key: self._placed(item) for key, item in value.items()}
        return value

    def __call__(self, arguments: Tree) -> object:
        call: Callable[..., object] = getattr(self.module, self.case.method)
        if self.case.method == "forward":
            call = self.module
        with torch.no_grad():
            return comparable(call(**arguments))


def comparable(output: object) -> object:
    """The output with objects that are no containers (distributions) opened to their tensors."""
    if isinstance(output, Mapping):
        return {key: comparable(value) for key, value in output.items()}
    if isinstance(output, list | tuple):
        return [comparable(value) for value in output]
    if isinstance(output, Tensor) or not hasattr(output, "__dict__"):
        return output
    return {key: comparable(value) for key, value in sorted(vars(output).items())}


def _main_tensors(output: object) -> object:
    """What must be worth comparing: nothing that only follows from it, no single number."""
    if isinstance(output, dict):
        if "parameters" in output:
            return output["parameters"]
        if "mean" in output and "std" in output:
            return output["mean"]
        return {key: _main_tensors(value) for key, value in output.items()}
    if isinstance(output, list):
        return [_main_tensors(value) for value in output]
    return None if isinstance(output, Tensor) and output.numel() == 1 else output


def variants(case: Case) -> list[tuple[str, int, int]]:
    """(name, batch, width): two sizes with sequential guidance, then batched guidance."""
    found = [("sequential", 1, width) for width in case.widths]
    return [*found, *(("batched", batch, 1) for batch in case.batches if batch > 1)]


def measure(case: Case, options: Options) -> Tree:
    """One row. `outcome` is full, breakable or eager; `problems` is empty when all was equal."""
    started = time.perf_counter()
    plain, wrapped = Side(case, options.device), Side(case, options.device)
    row: Tree = {"key": case.key, "kind": case.kind, "class": case.name, "method": case.method}
    problems = not_worth_comparing(case, plain)
    config = {"method": case.method, "backend": options.backend}
    dit_graphs.wrap(wrapped.module, **config)  # type: ignore[arg-type]
    try:
        for name, batch, width in variants(case):
            with dit_graphs.request():
                problems += _serve(plain, wrapped, name, batch, width)
        row |= _how(case, wrapped.module)
    finally:
        dit_graphs.unwrap(wrapped.module, method=case.method)
    seconds = round(time.perf_counter() - started, 2)
    return {**row, "is_equal": not problems, "problems": problems, "seconds": seconds}


def measure_key(key: str, *, options: Options) -> Tree:
    """The row of the case of that name."""
    return measure(CASES[key], options)


def not_worth_comparing(case: Case, plain: Side) -> list[str]:
    """Why equal outputs of this model would prove nothing; empty where they would."""
    arguments, changed = plain.arguments(0, 1, 1), plain.arguments(1, 1, 1)
    state = plain.generator.get_state()

    def call(tree: Tree) -> object:
        plain.generator.set_state(state)
        return plain({name: _own(value) for name, value in tree.items()})

    output = call(arguments)
    problems = equality.defects(_main_tensors(output))
    if not equality.equal(output, call(arguments)):
        problems.append("eager differs from itself")
    weak = equality.insensitive(lambda tree: _main_tensors(call(tree)), arguments, changed)
    plain.generator.set_state(state)
    return problems + [
        f"input{path} changes {share:.0%} of the output"
        for path, share in weak.items()
        if path not in (case.why_weak or {})
    ]


def _own(value: object) -> object:
    """Containers and caches of its own for every call: a forward may fill or empty what it gets."""
    if type(value).__module__.startswith("diffusers."):
        return copy.deepcopy(value)
    return tree_map(lambda leaf: leaf, value)


def _serve(plain: Side, wrapped: Side, name: str, batch: int, width: int) -> list[str]:
    """Steps of a loop; sequential guidance makes two calls and then uses both results."""
    problems = []
    for step in range(NUM_STEPS[name]):
        calls = (0, 1) if name == "sequential" else (0,)
        seeds = [10_000 * batch + 1_000 * width + 2 * step + call for call in calls]
        outputs = [wrapped(wrapped.arguments(seed, batch, width)) for seed in seeds]
        expected = [plain(plain.arguments(seed, batch, width)) for seed in seeds]
        if not equality.equal(outputs, expected):
            share = equality.changed_fraction(outputs, expected)
            problems.append(f"{name} {batch}x{width} step {step}: {share:.1%} differ")
    return problems


def _how(case: Case, module: nn.Module) -> Tree:
    """How the calls were served, from the library's own counters."""
    report = _component(module, case.method)
    graphs, fallbacks = report["graphs"], report["fallbacks"]
    assert isinstance(graphs, list) and isinstance(fallbacks, dict)
    served = [graph for graph in graphs if graph["replays"] >= MIN_REPLAYS]
    wanted = len(variants(case))
    found: Tree = {
        "graphs": len(served),
        "replays": report["replays"],
        "captures": report["captures"],
        "fallbacks": fallbacks,
    }
    if len(served) < wanted:
        reasons = [reason for reason in fallbacks if reason != "warming_up"] or ["warming_up"]
        details = report.get("details", {})
        assert isinstance(details, dict)
        return {
            **found,
            "outcome": "eager",
            "captured_fraction": 0.0,
            "reason": reasons[0],
            "detail": _without_folders(str(details.get(reasons[0], ""))),
        }
    breaks = max(graph["breaks"] for graph in served)
    return {
        **found,
        "outcome": "breakable" if breaks else "full",
        "captured_fraction": min(graph["captured_fraction"] for graph in served),
        "breaks": breaks,
        "segments": max(graph["segments"] for graph in served),
        "where": _collected(served, "break_sites"),
        "why": [_without_folders(text) for text in _collected(served, "break_reasons")],
    }


def _collected(graphs: list[dict[str, list[str]]], key: str) -> list[str]:
    return list(dict.fromkeys(text for graph in graphs for text in graph[key]))


def _component(module: nn.Module, method: str) -> Tree:
    from dit_graphs.wrapping import runner_of

    runner = runner_of(module, method)
    assert runner is not None
    details = {reason.value: text for reason, text in runner.stats.details.items()}
    return {**runner.report(), "details": details}


def _without_folders(text: str) -> str:
    """Source lines as `diffusers/models/…:12`, without this machine's folders and addresses."""
    words = []
    for word in re.sub(r" at 0x[0-9a-f]+", "", text).split(" "):
        _, found, rest = word.partition("site-packages/")
        words.append(rest if found else word)
    return " ".join(words)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line. Exits 2 on a wrong one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--backend",
        choices=("recorded", "full", "breakable", "auto"),
        help="default: recorded on the CPU, breakable on CUDA (full where nothing breaks)",
    )
    only = parser.add_argument("--only", action="append", help="cases whose name contains this")
    parser.add_argument("--workers", type=int, default=1, help="cases that run at once")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one case")
    parser.add_argument("--write-docs", action="store_true", help="docs/models.md from the results")
    results.add_arguments(parser)
    given = parser.parse_args(arguments)
    given.backend = given.backend or ("recorded" if given.device == "cpu" else "breakable")
    if (given.backend == "recorded") != (given.device == "cpu"):
        parser.error("--backend recorded is the CPU's only one, and the CPU's alone")
    given.cases = [
        key for key in CASES if not given.only or any(word in key for word in given.only)
    ]
    if not given.cases:
        parser.error(f"argument {only.option_strings[0]}: no case is called {given.only}")
    return given


def main(arguments: list[str]) -> int:
    """Runs the cases, each in a process of its own; the exit status says whether all was equal."""
    given = parse(arguments)
    if given.write_docs:
        sweep_docs.write()
        return 0
    origin = results.provenance(commit=given.commit, allow_dirty=given.allow_dirty)
    options = Options(given.device, given.backend)
    rows: list[Tree] = []

    def done(row: Tree) -> None:
        rows.append({**row, "device": given.device, "backend": given.backend})
        text = "; ".join(cast(list[str], row["problems"])) or row.get("detail") or ""
        print(f"{row['outcome']:9} {row['key']:60} {row.get('reason', '')} {text}", flush=True)

    # a sweep that is stopped keeps its rows; not before, for a record asks the GPU for its name
    # and no worker can be forked after that
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sweep_workers.run(
            given.cases,
            partial(measure_key, options=options),
            done,
            workers=given.workers,
            timeout=given.timeout,
            start=sweep_workers.start_for(given.device),
        )
    finally:
        rows.sort(key=lambda row: given.cases.index(row["key"]))
        if given.output:
            run = results.run_record(SCRIPT, rows, provenance=origin)
            results.write(Path(given.output), run)
    is_equal = all(row["is_equal"] for row in rows)
    outcomes = Counter(str(row["outcome"]) for row in rows)
    print(json.dumps({"is_equal": is_equal, "outcomes": outcomes, "output": given.output}))
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
