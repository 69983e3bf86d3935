"""Runs every phase of the training in order, within a given time, and can be run again to go on.

Owns the order of phases and what is written when. Surprise: captions are written by other processes while the
autoencoder trains, and each phase leaves its checkpoint before the next one starts.

    python -m dit_graphs.app.demo_model.training.run --data DIR --out DIR --seconds 500 --vae-seconds 165 [--resume DIR]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
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
from dit_graphs.app.demo_model.training.stepping import Log
from dit_graphs.app.demo_model.training.train_flow import (
    FlowSettings, Networks, encode_pool, save_flow,
)  # fmt: skip
from dit_graphs.app.demo_model.training.train_vae import VaeSettings


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--data", type=Path, required=True, help="folder of sprites.webp")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="folder of an earlier run's checkpoints")
    parser.add_argument("--seconds", type=float, required=True, help="until training ends")
    parser.add_argument("--vae-seconds", type=float, required=True, help="0 keeps the resumed one")
    parser.add_argument("--pool", type=int, default=320_000)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--vae-batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1.5e-3)
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
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        self.composer = Composer(args.data, len(self.concepts), self.device)
        self.sampler = SpecSampler(len(self.concepts), self.device)
        on_gpu = self.device.type == "cuda"
        self.options = {
            "compiled": on_gpu and not args.no_compile,
            "capture": on_gpu and not args.no_capture,
            "autocast": on_gpu,
        }
        self.log(
            "start", device=torch.cuda.get_device_name() if on_gpu else "cpu", torch=torch.__version__,
            resume=str(bool(args.resume)), pool=args.pool, budget=args.seconds,
        )  # fmt: skip

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
            train_vae.measure_latents(vae, self.composer, self.sampler, 64 if args.tiny else 4096)
        vae.to(self.device, memory_format=torch.channels_last).requires_grad_(False)
        train_vae.save_vae(vae, args.out / "vae.safetensors")
        each, pooled = train_vae.psnr(vae, self.composer, self.sampler, 64 if args.tiny else 1024)
        self.log(
            "vae", psnr=each, psnr_of_mean_error=pooled, scaling_factor=vae.config.scaling_factor
        )
        return vae

    def networks(self) -> Networks:
        """Returns transformer and language model, fresh or resumed, checked against the stock forwards."""
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
            transformer=models.num_parameters(transformer), text=models.num_parameters(text_encoder),
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
            self.log("flow", event="kernels compiled ahead", exit_code=ahead.wait())
        left = max(10.0, self.args.seconds - (time.monotonic() - self.start))
        settings = FlowSettings(left, batch=self.args.batch, rate=self.args.rate, **self.options)

        def checkpoint(averaged: Networks) -> None:
            save_flow(averaged, self.args.out / "flow.safetensors")
            model = BatchedModel(averaged.transformer, averaged.text_encoder, compiled=False)
            made = sample(model, pool.Encoder(), list(GRID_PROMPTS), 8, 2.0, seed=7)
            save_grid(train_vae.decode(vae, made), self.args.out / "grid.png")

        averaged = train_flow.train_flow(
            networks, latents, captions, settings, self.log, checkpoint
        )
        checkpoint(averaged)
        return averaged

    def evaluate(self, vae: AutoencoderKL, networks: Networks) -> None:
        """Logs retrieval at several step counts and on pairs."""
        model = BatchedModel(networks.transformer, networks.text_encoder, compiled=False)
        concepts = self.concepts[:8] if self.args.tiny else self.concepts
        for num_steps in (1, 8) if self.args.tiny else (1, 2, 4, 8, 20):
            scores = retrieval(model, vae, self.composer, concepts, num_steps)
            self.log("evaluate", steps=num_steps, **scores)
        num = 4 if self.args.tiny else 256
        self.log("evaluate", steps=8, **pairs(model, vae, self.composer, concepts, 8, num))


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        pool_file = Path(folder) / "pool.pt"
        command = [sys.executable, "-m", pool.__name__, "--out", str(pool_file)]
        writer = subprocess.Popen(
            [*command, "--num", str(args.pool), "--processes", str(args.processes)],
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""},
        )
        ahead = None
        try:
            run = Run(args)
            if run.options["compiled"]:
                ahead = subprocess.Popen(
                    [sys.executable, "-m", train_flow.__name__, "--batch", str(args.batch)]
                )
            vae = run.vae()
            if writer.wait() != 0:
                raise SystemExit("the captions could not be written")
            networks = run.flow(vae, pool_file, ahead)
        finally:
            writer.kill()
            if ahead:
                ahead.kill()
        run.evaluate(vae, networks)
        run.log("end")


if __name__ == "__main__":
    main()
