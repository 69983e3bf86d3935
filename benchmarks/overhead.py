"""What the library's own code costs: python -m benchmarks.overhead --models z-image,sdxl-unet

Owns two measurements. Host milliseconds per replayed step, with 1, 10 and 100 graphs held, beside
the time the driver alone takes to launch the same graph, and its stages in a loop of replays and
right after an eager forward. And the wall time of a wrapped module that never replays, over the
plain module's. The surprising fact: the first replays after a capture cost up to half as much again
as later ones, so a measurement that starts too early blames the number of graphs held.

Prints a table, then one line of JSON. Exits 1 when a call did not run the way that is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

import dit_graphs
from benchmarks import forward, models, protocol, results, stages
from benchmarks.shapes import Size
from benchmarks.turns import Turns
from dit_graphs import GraphConfig
from dit_graphs.config import BackendName
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
    """One row per number of graphs held: host time of a replayed step, and of its launch alone."""
    current = [0]
    config = GraphConfig(backend=backend, capture="first_use", max_graphs=max(held) + 1)
    dit_graphs.wrap(module, config, key=lambda: current[0])
    call = _calls(module, name, size, device)
    first: float | None = None
    try:
        with torch.no_grad():
            for number in sorted(held):
                for key in range(number):  # captures those that are not held yet
                    current[0] = key
                    with turns.preparing(), dit_graphs.request():
                        for _ in range(3):
                            call()
                current[0] = 0
                with turns.measuring(), protocol.GpuClock.maybe(device) as clock:
                    row = _replayed(name, module, size, number, rounds, call)
                host = row["host_ms"]
                assert isinstance(host, float)
                first = host if first is None else first
                yield {**row, "over_first": host / first}, clock.summary()
    finally:
        dit_graphs.unwrap(module)


def _replayed(
    name: str, module: nn.Module, size: Size, number: int, rounds: int, call: Callable[[], object]
) -> Row:
    runner = runner_of(module)
    assert runner is not None
    entries = runner.cache.held()
    before = runner.report()["replays"]
    assert isinstance(before, int)
    with dit_graphs.request():
        host = protocol.interleaved(
            {"step": call}, rounds=rounds, warmups=WARMUPS, measure=protocol.host_ms
        )["step"]
        num_stages = min(rounds, MAX_STAGE_ROUNDS)
        in_a_loop = stages.profile(call, None, rounds=num_stages)
        after_eager = stages.profile(call, _eager(module, call), rounds=num_stages)
    after = runner.report()["replays"]
    recording = max(entries, key=lambda entry: entry.replays).recording
    assert recording is not None
    launch = protocol.interleaved(
        {"launch": recording.replay}, rounds=rounds, measure=protocol.host_ms
    )["launch"]
    expected = before + rounds + WARMUPS + 2 * num_stages
    problems = [] if after == expected else [f"{after} replays, expected {expected}"]
    if len(entries) != number:
        problems.append(f"{len(entries)} graphs held, expected {number}")
    return {
        "key": f"{name} {size} replayed, {number} held",
        "model": name,
        "size": str(size),
        "held": number,
        "host_ms": host.median_ms,
        "launch_ms": launch.median_ms,
        "own_ms": host.median_ms - launch.median_ms,
        "stages_ms": {"in_a_loop": in_a_loop, "after_eager": after_eager},
        "timings": {"host": host.as_dict(), "launch": launch.as_dict()},
        "problems": problems,
    }


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
                f"{row['own_ms']:.3f} ours; {row['over_first']:.3f} of the first"
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
