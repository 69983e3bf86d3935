"""What the library's own code costs: python -m benchmarks.overhead --models z-image,sdxl-unet

Owns two measurements. Host milliseconds per replayed step, with 1, 10 and 100 graphs held, beside
the time the driver alone takes to launch the same graph, and its stages in a loop of replays and
right after an eager forward; the same in a `request()` of one's own, where each call also looks at
the module while the device works. And the wall time of a wrapped module that never replays, over
the plain module's. The surprising fact: the same step costs the same host half as much again a
minute later, so numbers of graphs held that are measured one after the other compare minutes, not
graphs.

Prints a table, then one line of JSON. Exits 1 when a call did not run the way that is measured.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from torch import nn

import dit_graphs
from benchmarks import forward, models, protocol, results, stages
from benchmarks.shapes import Size
from benchmarks.turns import Turns
from dit_graphs import GraphConfig
from dit_graphs.config import BackendName
from dit_graphs.request_scope import begin_request, end_request
from dit_graphs.runner import GraphRunner
from dit_graphs.wrapping import runner_of

SCRIPT = "benchmarks/overhead.py"
NUM_STEPS = 8
WARMUPS = 30
MAX_STAGE_ROUNDS = 30
Row = dict[str, object]
Measured = tuple[Row, dict[str, object]]  # a row, and the GPU's clocks while it was measured


def _calls(module: nn.Module, name: str, size: Size, device: str) -> Callable[[], object]:
    """A call with the next step's latents and timestep, made before the clock starts."""
    inputs = models.inputs(name, size, device=device)
    trees = [models.change(inputs, seed, per_step=True) for seed in range(100, 100 + NUM_STEPS)]
    steps = itertools.cycle(trees)
    return lambda: module(**next(steps))


def replays(
    name: str,
    module: nn.Module,
    size: Size,
    held: list[int],
    rounds: int,
    *,
    device: str,
    backend: BackendName,
    turns: Turns,
) -> Iterator[Measured]:
    """One row per number of graphs held: host time of a replayed step, and of its launch alone.

    Each number is held by a copy of the module on the same weights, so that all are timed in turn.
    """
    copies = {number: _on_same_weights(module) for number in sorted(held)}
    calls = {number: _calls(copy_, name, size, device) for number, copy_ in copies.items()}
    try:
        with torch.no_grad():
            for number, copy_ in copies.items():
                _hold(number, copy_, calls[number], backend, turns)
            with turns.measuring(), protocol.GpuClock.maybe(device) as clock:
                rows = _replayed(f"{name} {size}", copies, calls, rounds)
        first = rows[0]["host_ms"]
        assert isinstance(first, float)
        for row in rows:
            over_first = cast(float, row["host_ms"]) / first
            yield (
                {**row, "model": name, "size": str(size), "over_first": over_first},
                clock.summary(),
            )
    finally:
        for copy_ in copies.values():
            dit_graphs.unwrap(copy_)


def _on_same_weights(module: nn.Module) -> nn.Module:
    """A module of its own whose tensors are those of the given one."""
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, shared)


def _hold(
    number: int,
    module: nn.Module,
    call: Callable[[], object],
    backend: BackendName,
    turns: Turns,
) -> None:
    """Wraps the module and captures that many graphs, the last one under key 0."""
    current = [0]
    config = GraphConfig(backend=backend, capture="first_use", max_graphs=number + 1)
    dit_graphs.wrap(module, config, key=lambda: current[0])
    for key in reversed(range(number)):
        current[0] = key
        with turns.preparing(), dit_graphs.request():
            for _ in range(3):
                call()


def _replayed(
    key: str,
    modules: Mapping[int, nn.Module],
    calls: Mapping[int, Callable[[], object]],
    rounds: int,
) -> list[Row]:
    runners = {number: _runner(module) for number, module in modules.items()}
    before = {number: runner.report()["replays"] for number, runner in runners.items()}
    num_stages = min(rounds, MAX_STAGE_ROUNDS)
    by_name = {str(number): call for number, call in calls.items()}
    with dit_graphs.request():
        by_hand = protocol.interleaved(
            by_name, rounds=rounds, warmups=WARMUPS, measure=protocol.host_ms
        )
    with _request_of_a_pipeline():
        hosts = protocol.interleaved(
            by_name, rounds=rounds, warmups=WARMUPS, measure=protocol.host_ms
        )
        stages_ms = {
            number: {
                "in_a_loop": stages.profile(call, None, rounds=num_stages),
                "after_eager": stages.profile(
                    call, _eager(modules[number], call), rounds=num_stages
                ),
            }
            for number, call in calls.items()
        }
    after = {number: runner.report()["replays"] for number, runner in runners.items()}
    launches = protocol.interleaved(
        {str(number): _launch(runner) for number, runner in runners.items()},
        rounds=rounds,
        warmups=WARMUPS,
        measure=protocol.host_ms,
    )
    rows = []
    for number, runner in runners.items():
        expected = cast(int, before[number]) + 2 * (rounds + WARMUPS + num_stages)
        problems = []
        if after[number] != expected:
            problems.append(f"{after[number]} replays, expected {expected}")
        if len(runner.cache.held()) != number:
            problems.append(f"{len(runner.cache.held())} graphs held, expected {number}")
        host, launch = hosts[str(number)], launches[str(number)]
        row: Row = {
            "key": f"{key} replayed, {number} held",
            "held": number,
            "host_ms": host.median_ms,
            "launch_ms": launch.median_ms,
            "own_ms": host.median_ms - launch.median_ms,
            "by_hand_ms": by_hand[str(number)].median_ms,
            "stages_ms": stages_ms[number],
            "timings": {
                "host": host.as_dict(),
                "launch": launch.as_dict(),
                "by_hand": by_hand[str(number)].as_dict(),
            },
            "problems": problems,
        }
        rows.append(row)
    return rows


@contextmanager
def _request_of_a_pipeline() -> Iterator[None]:
    """As an accelerated pipeline without callbacks opens one: nobody turns the module inside."""
    started = begin_request()
    try:
        yield
    finally:
        end_request(started)


def _runner(module: nn.Module) -> GraphRunner:
    runner = runner_of(module)
    assert runner is not None
    return runner


def _launch(runner: GraphRunner) -> Callable[[], object]:
    """Replays the graph that serves, and nothing else."""
    recording = max(runner.cache.held(), key=lambda entry: entry.replays).recording
    assert recording is not None
    return recording.replay


def _eager(module: nn.Module, call: Callable[[], object]) -> Callable[[], object]:
    def eager() -> object:
        with dit_graphs.disabled(module):
            return call()

    return eager


def never_replays(name: str, module: nn.Module, size: Size, rounds: int, *, device: str) -> Row:
    """Wrapped with captures switched off, over plain: wall time per call."""
    backend: BackendName = "full" if device == "cuda" else "recorded"
    dit_graphs.wrap(module, GraphConfig(backend=backend, capture="warmup_only"))
    inputs = models.inputs(name, size, device=device)
    try:
        with torch.no_grad(), dit_graphs.request():
            walls = protocol.interleaved(
                {
                    "plain": lambda: forward.eager(module, inputs),
                    "wrapped": _calls(module, name, size, device),
                },
                rounds=rounds,
            )
        runner = runner_of(module)
        assert runner is not None
        report = runner.report()
    finally:
        dit_graphs.unwrap(module)
    plain, wrapped = walls["plain"].median_ms, walls["wrapped"].median_ms
    problems = []
    if report["replays"] or report["eager_calls"] != rounds + 2:
        problems.append(f"{report['replays']} replays, {report['eager_calls']} eager calls")
    return {
        "key": f"{name} {size} never replays",
        "model": name,
        "size": str(size),
        "plain_ms": plain,
        "wrapped_ms": wrapped,
        "wrapped_over_plain": wrapped / plain,
        "timings": {variant: timing.as_dict() for variant, timing in walls.items()},
        "problems": problems,
    }


def table(rows: list[Row]) -> str:
    """The rows as aligned text."""
    lines = []
    for row in rows:
        if "held" in row:
            text = (
                f"{row['host_ms']:8.3f} ms host, {row['launch_ms']:.3f} of it the launch, "
                f"{row['own_ms']:.3f} ours; {row['over_first']:.3f} of the first; "
                f"{row['by_hand_ms']:.3f} with a look"
            )
        else:
            text = (
                f"{row['plain_ms']:8.2f} ms plain, {row['wrapped_ms']:.2f} wrapped: "
                f"{row['wrapped_over_plain']:.3f}"
            )
        lines.append(f"{row['key']!s:40} {text} {row['problems'] or ''}")
    return "\n".join(lines)


def _measured(
    name: str, module: nn.Module, given: argparse.Namespace, turns: Turns
) -> Iterator[Measured]:
    size, device = Size.parse(given.size), given.device
    with turns.measuring(), protocol.GpuClock.maybe(device) as clock:
        row = never_replays(name, module, size, given.rounds // 2, device=device)
    yield row, clock.summary()
    yield from replays(
        name,
        module,
        size,
        [int(number) for number in given.held.split(",")],
        given.rounds,
        device=device,
        backend="full" if device == "cuda" else "recorded",
        turns=turns,
    )


def main(arguments: list[str]) -> int:
    """Measures every model; the exit status says whether all calls ran as they should."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--models", default="z-image,sdxl-unet", help="comma-separated")
    parser.add_argument("--size", default="256")
    parser.add_argument("--held", default="1,10,100", help="numbers of graphs held")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="few narrow layers: no result")
    parser.add_argument("--turns", type=Path, help="a file: processes that share it take turns")
    results.add_arguments(parser)
    given = parser.parse_args(arguments)
    if given.small and given.output:
        parser.error("--small measures nothing that belongs into a result file")
    origin = results.provenance(commit=given.commit, allow_dirty=given.allow_dirty)
    turns = Turns(given.turns)
    rows: list[Row] = []
    for name in given.models.split(","):
        with turns.preparing():
            module = models.build(name, given.device, small=given.small)
        for row, clocks in _measured(name, module, given, turns):
            rows.append(row)
            print(table([row]), flush=True)
            if given.output:
                run = results.run_record(SCRIPT, [row], provenance=origin, clocks=clocks)
                results.write(Path(given.output), run)
        del module
        if given.device == "cuda":
            torch.cuda.empty_cache()  # the next model starts from an empty device
    is_right = not any(row["problems"] for row in rows)
    slim = [{key: value for key, value in row.items() if key != "timings"} for row in rows]
    print(json.dumps({"is_right": is_right, "output": given.output, "rows": slim}))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
