"""What graphs cost in memory: python -m benchmarks.memory --model z-image --ceilings 512,768,1024

Owns the scenarios: no graphs; graphs up to each ceiling; a ladder of sizes captured largest first,
in rising order, and the largest alone. After each, one picture at the largest size is made and the
reserved bytes above the weights are read. Knows graphs through the public API. The surprising fact:
every scenario needs a process of its own, since an allocator never forgets what it once reserved.

Prints a table, then one line of JSON. Exits 1 when a picture differs from the plain pipeline's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import torch

import dit_graphs
from benchmarks import equality, pipelines, protocol, results
from benchmarks.shapes import Size
from dit_graphs.config import BackendName, GraphConfig

SCRIPT = "benchmarks/memory.py"
LADDER = ("1024", "768", "512", "384", "256")
STEPS = 3
MIB = 2**20


def scenarios(ceilings: list[str], picture: str) -> dict[str, list[list[str]]]:
    """Name -> the sizes of each warm-up call, which captures its own largest first."""
    ladder = [size for size in LADDER if Size.parse(size) <= Size.parse(picture)]
    by_ceiling = {
        f"ceiling {ceiling}": [[s for s in ladder if Size.parse(s) <= Size.parse(ceiling)]]
        for ceiling in ceilings
    }
    return {
        "plain": [],
        **by_ceiling,
        "largest alone": [[ladder[0]]],
        "ladder, largest first": [ladder],
        "ladder, rising": [[size] for size in reversed(ladder)],
    }


def run_scenario(
    model: str, warmups: list[list[str]], picture: str, device: str
) -> dict[str, object]:
    """One scenario in this process: its memory, counters and the digest of its picture."""
    pipe = pipelines.build(model, device, small=device == "cpu")
    weights = sum(_nbytes(part) for part in pipe.components.values())
    size = Size.parse(picture)
    if warmups:
        backend: BackendName = "full" if device == "cuda" else "recorded"
        dit_graphs.accelerate(pipe, GraphConfig(backend=backend, capture="warmup_only"))
        for sizes in warmups:
            calls = [
                pipelines.call_kwargs(model, Size.parse(text), steps=STEPS, device=device)
                for text in sizes
            ]
            dit_graphs.warmup(pipe, calls)
    output = pipelines.picture(
        pipe, pipelines.call_kwargs(model, size, steps=STEPS, seed=7, device=device)
    )
    protocol.synchronize()
    row: dict[str, object] = {
        "weight_bytes": weights,
        "defects": equality.defects([output]),
        "digest": hashlib.sha256(output.float().cpu().numpy().tobytes()).hexdigest(),
    }
    if device == "cuda":
        row["reserved_bytes"] = torch.cuda.memory_reserved() - weights
        row["peak_reserved_bytes"] = torch.cuda.max_memory_reserved() - weights
    return row | (_counters(pipe) if warmups else {})


def _nbytes(part: object) -> int:
    if not isinstance(part, torch.nn.Module):
        return 0
    tensors = [*part.parameters(), *part.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _counters(pipe: object) -> dict[str, object]:
    components = dit_graphs.stats(pipe)["components"]
    assert isinstance(components, dict)
    graphs = [graph for component in components.values() for graph in component["graphs"]]
    return {
        "graphs": len(graphs),
        "graph_bytes": sum(graph["nbytes"] for graph in graphs),
        "pool_bytes": max(component["pool_bytes"] for component in components.values()),
        "output_bytes": max(part.get("output_bytes", 0) for part in components.values()),
        "replays": sum(component["replays"] for component in components.values()),
    }


def in_new_process(arguments: dict[str, object]) -> dict[str, object]:
    """The row of one scenario; raises when the process fails."""
    command = [sys.executable, "-m", "benchmarks.memory", "--scenario", json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=results.ROOT)
    row = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(row, dict)
    return row


def measure(model: str, ceilings: list[str], picture: str, device: str) -> list[dict[str, object]]:
    """A row per scenario, the plain pipeline first, with its ratio to the row it answers to."""
    rows: dict[str, dict[str, object]] = {}
    for name, warmups in scenarios(ceilings, picture).items():
        arguments: dict[str, object] = {
            "model": model,
            "warmups": warmups,
            "picture": picture,
            "device": device,
        }
        row = {"key": f"{model} {picture} {name}", "scenario": name, **in_new_process(arguments)}
        row["is_equal"] = not row["defects"] and row["digest"] == rows.get("plain", row)["digest"]
        rows[name] = row
        reference = rows["largest alone"] if name.startswith("ladder") else rows["plain"]
        if device == "cuda" and name != "plain":
            row["reserved_over_reference"] = _number(row) / _number(reference)
            row["reference"] = reference["scenario"]
    return list(rows.values())


def _number(row: dict[str, object]) -> int:
    value = row["reserved_bytes"]
    assert isinstance(value, int)
    return value


def table(rows: list[dict[str, object]]) -> str:
    """The rows as aligned text."""
    lines = [f"{'scenario':24}{'reserved MiB':>14}{'ratio':>8}{'graphs':>8}{'replays':>9}  equal"]
    for row in rows:
        reserved, ratio = row.get("reserved_bytes"), row.get("reserved_over_reference")
        lines.append(
            f"{row['scenario']!s:24}"
            + (f"{reserved / MIB:14,.0f}" if isinstance(reserved, int) else f"{'-':>14}")
            + (f"{ratio:8.3f}" if isinstance(ratio, float) else f"{'-':>8}")
            + f"{row.get('graphs', 0):>8}{row.get('replays', 0):>9}  {row['is_equal']}"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Runs all scenarios; the exit status says whether every picture equalled the plain one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--model", choices=list(pipelines.PIPELINES), default="z-image")
    parser.add_argument("--ceilings", default="512,768,1024", help="largest sizes captured")
    parser.add_argument("--picture", default="1024", help="the size of the picture made at the end")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--scenario", help=argparse.SUPPRESS)
    results.add_arguments(parser)
    given = parser.parse_args(arguments)
    if given.scenario:
        print(json.dumps(run_scenario(**json.loads(given.scenario))))
        return 0
    origin = results.provenance(commit=given.commit, allow_dirty=given.allow_dirty)
    with protocol.GpuClock.maybe(given.device) as clock:
        rows = measure(given.model, given.ceilings.split(","), given.picture, given.device)
    print(table(rows))
    if given.output:
        run = results.run_record(SCRIPT, rows, provenance=origin, clocks=clock.summary())
        results.write(Path(given.output), run)
    is_equal = all(row["is_equal"] for row in rows)
    print(json.dumps({"is_equal": is_equal, "output": given.output, "rows": rows}))
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
