"""Runs every phase of the training in order, within a given time, and can be run again to go on.

Owns the order of phases, the time each may take and what is written when. Surprise: a flow phase
that fails is run once more by a second process, from the last checkpoint, without compilation or
capture and at half the rate.

    python -m dit_graphs.app.demo_model.training.run \\
        --data DIR --out DIR --seconds 500 --vae-seconds 165 [--resume DIR]

With `--vae-seconds 0` the resumed folder needs `vae.safetensors` only; the networks start from its
`flow.safetensors` where there is one.

The shipped weights come from three runs: one for the autoencoder; one that started fresh networks
on it (`--resume` with a folder that holds `vae.safetensors` alone, `--vae-seconds 0`); and one that
went on from there with long captions among the prompts (`--rate 2e-4 --pool 160000`). The second
run still had a separate step for long captions, whose gradients were wrong once it was captured:
that is why `first_that_works` now compares a step's trial with a plain one's. What to watch in the
log:

- `flow` and `long`: 0.6 after 660 steps of fresh networks, 0.30 after 3,300, 0.16 at the end.
- `norm`, of gradients before clipping: under 1. Norms of tens are wrong gradients.
- a `rewound` event means too high a rate. A learned time embedding runs away here: see
  `fix_time_embedding` in `models`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from transformers import AutoTokenizer

from dit_graphs.app.demo_model.training import models, pool, train_flow, train_vae
from dit_graphs.app.demo_model.training.batched import BatchedModel, check_against_stock
from dit_graphs.app.demo_model.training.captions import SpecSampler
from dit_graphs.app.demo_model.training.compose import Composer
from dit_graphs.app.demo_model.training.concepts import load_concepts
from dit_graphs.app.demo_model.training.evaluate import (
    GRID_PROMPTS,
    pairs,
    retrieval,
    sample,
    save_grid,
)
from dit_graphs.app.demo_model.training.export import TOKENIZER, load_weights
from dit_graphs.app.demo_model.training.stepping import Log, set_up_backends
from dit_graphs.app.demo_model.training.train_flow import (
    FlowSettings,
    Networks,
    encode_pool,
    save_flow,
)  # fmt: skip
from dit_graphs.app.demo_model.training.train_vae import VaeSettings

EVALUATION_SECONDS = 30.0  # kept back from training; evaluation stops where the time is over
RETRY_SECONDS = 90.0  # a second process needs most of a minute before its first step


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--data", type=Path, required=True, help="folder of sprites.webp")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="folder of an earlier run's checkpoints")
    parser.add_argument(
        "--seconds", type=float, required=True, help="for everything, evaluation too"
    )
    parser.add_argument("--vae-seconds", type=float, required=True, help="0 keeps the resumed one")
    parser.add_argument("--compile-seconds", type=float, default=150.0, help="else uncompiled")
    parser.add_argument("--pool", type=int, default=320_000)
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--vae-batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--vae-rate", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-capture", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="small networks, for a test on a CPU")
    return parser.parse_args()


class Run:
    """What the phases share."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.start = args, time.monotonic()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        args.out.mkdir(parents=True, exist_ok=True)
        self.log = Log(args.out / "log.jsonl")
        self.sizes = models.TINY if args.tiny else models.Sizes()
        self.concepts = load_concepts()
        models.seed_everything(args.seed)
        set_up_backends()
        self.composer = Composer(args.data, len(self.concepts), self.device)
        self.sampler = SpecSampler(len(self.concepts), self.device)
        on_gpu = self.device.type == "cuda"
        self.is_quick = args.tiny or not on_gpu  # measures little
        self.options = {
            "compiled": on_gpu and not args.no_compile,
            "capture": on_gpu and not args.no_capture,
            "autocast": on_gpu,
        }
        self.log(
            "start", device=torch.cuda.get_device_name() if on_gpu else "cpu",
            torch=torch.__version__,
            resume=str(bool(args.resume)), pool=args.pool, budget=args.seconds,
        )  # fmt: skip

    def left(self) -> float:
        """Returns the seconds until everything must be done."""
        return self.args.seconds - (time.monotonic() - self.start)

    def attempt(self, name: str, function: Callable[[], None]) -> None:
        """Runs something whose failure must not end the run, and logs the failure."""
        try:
            function()
        except Exception as error:
            traceback.print_exc()
            self.log(name, event="failed", error=repr(error)[:400])

    def vae(self) -> AutoencoderKL:
        """Returns the trained autoencoder, from this run or the resumed one."""
        args = self.args
        vae = models.build_vae(self.sizes)
        if args.resume:
            numbers = load_weights(vae, args.resume / "vae.safetensors")
            vae.register_to_config(
                scaling_factor=numbers["scaling_factor"], shift_factor=numbers["shift_factor"]
            )
        self.log("vae", parameters=models.num_parameters(vae))
        if args.vae_seconds:
            settings = VaeSettings(
                args.vae_seconds, batch=args.vae_batch, rate=args.vae_rate, **self.options
            )
            vae = train_vae.train_vae(vae, self.composer, self.sampler, settings, self.log)
            train_vae.measure_latents(
                vae, self.composer, self.sampler, 64 if self.is_quick else 4096
            )
        vae.to(self.device, memory_format=torch.channels_last).requires_grad_(False)
        train_vae.save_vae(vae, args.out / "vae.safetensors")
        each, pooled = train_vae.psnr(
            vae, self.composer, self.sampler, 64 if self.is_quick else 1024
        )
        self.log(
            "vae", psnr=each, psnr_of_mean_error=pooled, scaling_factor=vae.config.scaling_factor
        )
        return vae

    def networks(self) -> Networks:
        """Returns transformer and language model, fresh or resumed, checked against stock."""
        vocabulary = len(AutoTokenizer.from_pretrained(TOKENIZER))
        transformer = models.build_transformer(self.sizes)
        text_encoder = models.build_text_encoder(self.sizes, vocabulary)
        file = self.args.resume and self.args.resume / "flow.safetensors"
        if file and file.exists():
            load_weights(transformer, file, "transformer.")
            load_weights(text_encoder, file, "text_encoder.")
        error = check_against_stock(BatchedModel(transformer, text_encoder, compiled=False))
        self.log(
            "flow", event="equal to the stock forward", worst=error,
            resumed=str(file is not None and file.exists()),
            transformer=models.num_parameters(transformer),
            text=models.num_parameters(text_encoder),
        )  # fmt: skip
        return Networks(transformer.to(self.device), text_encoder.to(self.device))

    def flow(
        self, vae: AutoencoderKL, pool_file: Path, ahead: subprocess.Popen[bytes] | None
    ) -> Networks:
        """Encodes the pool and trains; writes a checkpoint and a grid every minute."""
        networks = self.networks()
        spec, captions = pool.load(pool_file, self.device)
        latents = encode_pool(vae, self.composer, spec, self.options["autocast"])
        self.log(
            "pool",
            samples=len(latents),
            mean=latents.float().mean().item(),
            std=latents.float().std().item(),
        )
        if ahead:
            self.options["compiled"] = self.compiled_ahead(ahead)
        settings = FlowSettings(
            max(1.0, self.left() - EVALUATION_SECONDS),
            batch=self.args.batch, rate=self.args.rate, **self.options,
        )  # fmt: skip

        def checkpoint(averaged: Networks) -> None:
            save_flow(averaged, self.args.out / "flow.safetensors")
            self.attempt("grid", lambda: self.grid(vae, averaged, 8))

        averaged = train_flow.train_flow(
            networks, latents, captions, settings, self.log, checkpoint
        )
        checkpoint(averaged)
        self.log("flow", event="saved")
        return averaged

    def compiled_ahead(self, ahead: subprocess.Popen[bytes]) -> bool:
        """Returns whether the other process compiled every kernel in time; ends it otherwise."""
        left = self.args.compile_seconds - (time.monotonic() - self.start)
        try:
            code = ahead.wait(max(1.0, left))
        except subprocess.TimeoutExpired:
            ahead.kill()
            code = ahead.wait()
        self.log("flow", event="kernels compiled ahead", exit_code=code)
        return code == 0

    def grid(self, vae: AutoencoderKL, networks: Networks, num_steps: int) -> None:
        """Writes the pictures of GRID_PROMPTS as `grid-STEPS.png`."""
        model = BatchedModel(networks.transformer, networks.text_encoder, compiled=False)
        made = sample(model, pool.Encoder(), list(GRID_PROMPTS), num_steps, 2.0, seed=7)
        save_grid(train_vae.decode(vae, made), self.args.out / f"grid-{num_steps}.png")

    def evaluate(self, vae: AutoencoderKL, networks: Networks) -> None:
        """Logs retrieval at several step counts and on pairs, as far as the time allows."""
        model = BatchedModel(networks.transformer, networks.text_encoder, compiled=False)
        concepts = self.concepts[:8] if self.is_quick else self.concepts
        num = 4 if self.is_quick else 256

        def single(num_steps: int) -> None:
            scores = retrieval(model, vae, self.composer, concepts, num_steps)
            self.log("evaluate", steps=num_steps, concepts=len(concepts), **scores)

        def double() -> None:
            scores = pairs(model, vae, self.composer, concepts, 8, num)
            self.log("evaluate", steps=8, pairs=num, **scores)

        parts: list[Callable[[], None]] = [
            lambda: single(8), lambda: self.grid(vae, networks, 20), double,
            lambda: single(1), lambda: single(4), lambda: single(20), lambda: single(2),
        ]  # fmt: skip
        for index, part in enumerate(parts):
            if self.left() < 3:
                self.log("evaluate", event="the time is over", skipped=len(parts) - index)
                break
            self.attempt("evaluate", part)


def again(run: Run) -> int:
    """Runs the flow phase in a new process, the plainest way; returns its exit code.

    A new process, because an error inside a capture or on the device can leave this one's context
    unusable. It gets the time that is left.
    """
    args = run.args
    options = {
        "data": args.data, "out": args.out, "resume": args.out, "seconds": run.left() - 10,
        "vae-seconds": 0, "pool": args.pool, "processes": args.processes, "batch": args.batch,
        "rate": args.rate / 2, "seed": args.seed + 1,
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    flags = ["--no-compile", "--no-capture", *(["--tiny"] if args.tiny else [])]
    return subprocess.call([sys.executable, "-m", f"{__package__}.run", *words, *flags])


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        pool_file = Path(folder) / "pool.pt"
        command = [sys.executable, "-m", pool.__name__, "--out", str(pool_file)]
        writer = subprocess.Popen(
            [*command, "--num", str(args.pool), "--processes", str(args.processes)],
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""},
        )
        ahead, networks = None, None
        try:
            run = Run(args)
            if run.options["compiled"]:
                ahead = subprocess.Popen(
                    [sys.executable, "-m", train_flow.__name__, "--batch", str(args.batch)]
                )
            vae = run.vae()
            try:
                if writer.wait(max(1.0, run.left())) != 0:
                    raise SystemExit("the captions could not be written")
                networks = run.flow(vae, pool_file, ahead)
            except Exception as error:
                traceback.print_exc()
                run.log("flow", event="failed", error=repr(error)[:400])
                if (args.no_compile and args.no_capture) or run.left() < RETRY_SECONDS:
                    raise
                networks = None
        finally:
            for child in (writer, ahead):
                if child:
                    child.kill()
    if networks is None:
        raise SystemExit(again(run))
    run.evaluate(vae, networks)
    run.log("end")


if __name__ == "__main__":
    main()
