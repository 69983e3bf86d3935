"""Hours of use in minutes: python -m benchmarks.soak --model bundled --calls 2000

Owns a seeded sequence of what users do: pictures of other sizes, prompts and numbers of steps,
swapped adapters and turned strengths, runs that are stopped half-way and runs that fail. Every
tenth finished picture is drawn by a plain pipeline too, in the same state, and compared bit for
bit. Knows graphs through the public API. The surprising fact: the plain pipeline does not follow
every change; before a comparison it gets the present adapter and strength and nothing else, so a
trace that some earlier call left behind shows up as a difference.

Prints what happened, then one line of JSON. Exits 1 on a mismatch, on an error that was not asked
for, and where memory grew.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import diffusers
import torch
from torch import Tensor

import dit_graphs
from benchmarks import equality, pipelines, protocol, results
from benchmarks.adapters import lora
from benchmarks.shapes import Size
from dit_graphs.app import demo_model
from dit_graphs.config import BackendName, GraphConfig

SCRIPT = "benchmarks/soak.py"
MIB = 1 << 20
MAX_GROWTH = 32 * MIB  # of the second half over the first, after the first captures
NUM_SAMPLES = 40
ADAPTER, RANK, SEEDS, STRENGTHS = "swapped", 8, (1, 2, 3), (1.0, 0.5, 0.0)
PROMPTS = (
    "a red heart",
    "a cat",
    "two penguins on snow",
    "a rocket in space, soft light",
    "a burger next to an apple on a plain blue background",
    "an octopus under water, a castle behind it, seen from far away, in the evening sun",
)


class Planned(Exception):
    """The failure that was asked for."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture as a user asks for it."""

    size: Size
    prompt: int
    steps: int
    seed: int


@dataclass(frozen=True, slots=True)
class Subject:
    """A pipeline to wear out: how two equal ones are built and called."""

    build: Callable[[str], diffusers.DiffusionPipeline]
    arguments: Callable[[Picture, str], dict[str, object]]
    sizes: tuple[Size, ...]
    small_sizes: tuple[Size, ...]  # for a CPU
    steps: tuple[int, ...]
    denoiser: str


def _bundled(device: str) -> diffusers.DiffusionPipeline:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    pipe = diffusers.DiffusionPipeline.from_pretrained(demo_model.path(), torch_dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


def _bundled_arguments(picture: Picture, device: str) -> dict[str, object]:
    return {
        "prompt": PROMPTS[picture.prompt],
        "height": picture.size.height,
        "width": picture.size.width,
        "num_inference_steps": picture.steps,
        "guidance_scale": 2.0 if picture.prompt % 2 else 0.0,
        "max_sequence_length": 64,
        "generator": torch.Generator(device).manual_seed(picture.seed),
        "output_type": "pt",
    }


def _turbo_arguments(picture: Picture, device: str) -> dict[str, object]:
    """SDXL at the size and in the few steps of its turbo form, without guidance."""
    given = pipelines.call_kwargs(
        "sdxl", picture.size, steps=picture.steps, seed=picture.prompt, device=device
    )
    generator = torch.Generator(device).manual_seed(picture.seed)
    return {**given, "guidance_scale": 0.0, "generator": generator}


SUBJECTS: dict[str, Subject] = {
    "bundled": Subject(
        _bundled,
        _bundled_arguments,
        tuple(map(Size.parse, ("128", "96", "128x96", "96x128", "160", "64"))),
        tuple(map(Size.parse, ("64", "96", "64x96"))),
        (1, 2, 4, 8),
        "transformer",
    ),
    "sdxl": Subject(
        lambda device: pipelines.build("sdxl", device, small=device == "cpu"),
        _turbo_arguments,
        tuple(map(Size.parse, ("512", "384", "512x384", "256"))),
        tuple(map(Size.parse, ("64", "96"))),
        (1, 2, 4),
        "unet",
    ),
}


@dataclass(slots=True)
class Tally:
    """What happened."""

    calls: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    mismatches: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    curve: list[dict[str, int]] = field(default_factory=list)


class Soak:
    """One accelerated pipeline, one plain one and a seeded user."""

    def __init__(
        self, subject: Subject, device: str, *, seed: int, compare_every: int, max_graphs: int
    ) -> None:
        self.subject, self.device, self.compare_every = subject, device, compare_every
        self.chance, self.order = random.Random(seed), random.Random(seed)
        self.tally = Tally()
        self.sizes = subject.sizes if device == "cuda" else subject.small_sizes
        self.fast, self.plain = subject.build(device), subject.build(device)
        self.adapter, self.strength = SEEDS[0], STRENGTHS[0]
        self._plain_has = self.adapter
        for pipe in (self.fast, self.plain):
            pipe.enable_lora_hotswap(target_rank=RANK)
            self._load(pipe, self.adapter, hotswap=False)
        backend: BackendName = "auto" if device == "cuda" else "recorded"
        dit_graphs.accelerate(self.fast, GraphConfig(backend=backend, max_graphs=max_graphs))

    def _load(self, pipe: diffusers.DiffusionPipeline, seed: int, *, hotswap: bool = True) -> None:
        name = self.subject.denoiser
        weights = lora(getattr(pipe, name), seed, RANK, prefix=name, scale=0.05)
        pipe.load_lora_weights(weights, adapter_name=ADAPTER, hotswap=hotswap)

    def picture(self) -> Picture:
        """The next picture somebody asks for."""
        return Picture(
            size=self.chance.choice(self.sizes),
            prompt=self.chance.randrange(len(PROMPTS)),
            steps=self.chance.choice(self.subject.steps),
            seed=self.chance.randrange(1000),
        )

    def run(self, calls: int) -> Tally:
        """That many calls; the tally of them."""
        actions = {
            self._draw: 70,
            self._stop: 8,
            self._fail: 6,
            self._refuse: 2,
            self._swap: 8,
            self._turn: 6,
        }
        names, weights = list(actions), list(actions.values())
        for number in range(calls):
            (action,) = self.order.choices(names, weights)
            try:
                action()
            except Exception as error:
                self.tally.errors.append(f"call {number}: {type(error).__name__}: {error}")
                if "CUDA error" in str(error):
                    break  # nothing after it means anything
            self.tally.calls[action.__name__.strip("_")] += 1
            if number % max(calls // NUM_SAMPLES, 1) == 0 or number == calls - 1:
                self.tally.curve.append({"call": number, **self._memory()})
        return self.tally

    def _draw(self) -> None:
        picture = self.picture()
        result = self._call(self.fast, picture)
        if self.tally.calls["draw"] % self.compare_every == 0:
            self._compare(picture, result)

    def _call(self, pipe: diffusers.DiffusionPipeline, picture: Picture, **more: object) -> Tensor:
        arguments = {**self.subject.arguments(picture, self.device), **more}
        return pipelines.picture(pipe, arguments)

    def _compare(self, picture: Picture, result: Tensor) -> None:
        if self._plain_has != self.adapter:
            self._load(self.plain, self.adapter)
            self._plain_has = self.adapter
        self.plain.set_adapters([ADAPTER], [self.strength])
        expected = self._call(self.plain, picture)
        self.tally.compared += 1
        problems = equality.defects([expected])
        if problems or not torch.equal(result, expected):
            state = f"adapter {self.adapter} at {self.strength}"
            self.tally.mismatches.append(f"{picture}, {state} {problems}")

    def _stop(self) -> None:
        picture, last = self.picture(), self.chance.randrange(3)

        def stop(pipe: object, step: int, timestep: object, kept: dict[str, object]) -> object:
            if step >= last:
                pipe._interrupt = True  # type: ignore[attr-defined]
            return kept

        self._call(self.fast, picture, callback_on_step_end=stop)

    def _fail(self) -> None:
        picture, last = self.picture(), self.chance.randrange(3)

        def fail(pipe: object, step: int, timestep: object, kept: dict[str, object]) -> object:
            if step >= min(last, picture.steps - 1):
                raise Planned
            return kept

        try:
            self._call(self.fast, picture, callback_on_step_end=fail)
        except Planned:
            return
        raise AssertionError("the planned failure did not arrive")

    def _refuse(self) -> None:
        """A size the pipeline refuses."""
        try:
            self._call(self.fast, self.picture(), height=129)
        except ValueError:
            return
        raise AssertionError("a height of 129 was accepted")

    def _swap(self) -> None:
        """Another adapter, at full strength, as peft leaves it."""
        self.adapter, self.strength = self.chance.choice(SEEDS), 1.0
        self._load(self.fast, self.adapter)

    def _turn(self) -> None:
        self.strength = self.chance.choice(STRENGTHS)
        self.fast.set_adapters([ADAPTER], [self.strength])

    def _memory(self) -> dict[str, int]:
        gc.collect()
        parts = self.counters()
        found = {"graphs": sum(len(part["graphs"]) for part in parts)}
        if self.device != "cuda":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            return {**found, "peak_resident_bytes": peak}
        torch.cuda.synchronize()  # sync: pending frees are part of what is measured
        return {
            **found,
            "allocated_bytes": torch.cuda.memory_allocated(),
            "reserved_bytes": torch.cuda.memory_reserved(),
            "pool_bytes": max(part["pool_bytes"] for part in parts),
        }

    def counters(self) -> list[dict[str, object]]:
        """What `stats` says of each part."""
        parts = dit_graphs.stats(self.fast)["components"]
        assert isinstance(parts, dict)
        return list(parts.values())


def growth(curve: list[dict[str, int]], name: str) -> int:
    """Bytes by which the last half's highest sample lies above the quarter before it."""
    values = [sample[name] for sample in curve if name in sample]
    if len(values) < 4:
        return 0
    before, after = values[len(values) // 4 : len(values) // 2], values[len(values) // 2 :]
    return max(after) - max(before)


def row_of(name: str, soak: Soak, seconds: float) -> dict[str, object]:
    """The result as it stands in a file."""
    tally, parts = soak.tally, soak.counters()
    reasons: Counter[str] = Counter()
    for part in parts:
        reasons.update(part["fallbacks"])  # type: ignore[call-overload]
    growths = {
        key: growth(tally.curve, key)
        for key in ("allocated_bytes", "reserved_bytes", "pool_bytes")
        if tally.curve and key in tally.curve[0]
    }
    return {
        "key": f"soak {name} {sum(tally.calls.values())} {soak.device}",
        "calls": dict(tally.calls),
        "compared": tally.compared,
        "num_mismatches": len(tally.mismatches),
        "mismatches": tally.mismatches[:20],
        "num_errors": len(tally.errors),
        "errors": tally.errors[:20],
        "captures": sum(part["captures"] for part in parts),  # type: ignore[misc]
        "replays": sum(part["replays"] for part in parts),  # type: ignore[misc]
        "evictions": sum(part["evictions"] for part in parts),  # type: ignore[misc]
        "fallbacks": dict(reasons),
        "growth_bytes": growths,
        "is_flat": all(value <= MAX_GROWTH for value in growths.values()),
        "seconds": seconds,
        "curve": tally.curve,
    }


def main(arguments: list[str]) -> int:
    """Runs the sequence; the exit status says whether it left no trace."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--model", choices=list(SUBJECTS), default="bundled")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--compare-every", type=int, default=10, help="of the finished pictures")
    parser.add_argument("--max-graphs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    results.add_arguments(parser)
    given = parser.parse_args(arguments)
    if given.calls < 1 or given.compare_every < 1:
        parser.error("--calls and --compare-every: expected at least 1")
    origin = results.provenance(commit=given.commit, allow_dirty=given.allow_dirty)
    soak = Soak(
        SUBJECTS[given.model],
        given.device,
        seed=given.seed,
        compare_every=given.compare_every,
        max_graphs=given.max_graphs,
    )
    start = time.perf_counter()
    with protocol.GpuClock.maybe(given.device) as clock:
        soak.run(given.calls)
    row = row_of(given.model, soak, time.perf_counter() - start)
    for problem in (*soak.tally.mismatches, *soak.tally.errors):
        print(problem)
    for name in ("calls", "compared", "captures", "replays", "fallbacks", "growth_bytes"):
        print(f"{name}: {row[name]}")
    if given.output:
        run = results.run_record(SCRIPT, [row], provenance=origin, clocks=clock.summary())
        results.write(Path(given.output), run)
    is_clean = not (row["num_mismatches"] or row["num_errors"]) and bool(row["is_flat"])
    print(json.dumps({"is_clean": is_clean, "output": given.output, "rows": [row]}))
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
