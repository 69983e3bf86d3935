"""Trains the autoencoder on pictures composed inside the training step.

Owns its loss and its checkpoint `vae.safetensors`. Knows nothing of captions. Surprise: scale and
shift of the latents are measured afterwards and travel in the checkpoint as two single numbers.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from safetensors.torch import save_file

from dit_graphs.app.demo_model.training.captions import SpecSampler
from dit_graphs.app.demo_model.training.compose import Composer
from dit_graphs.app.demo_model.training.stepping import (
    Average,
    Log,
    Step,
    build_optimizer,
    first_that_works,
    mean_of,
    rate_at,
    set_rate,
    wait,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class VaeSettings:
    """How long and how to train; `seconds` is wall-clock time."""

    seconds: float
    batch: int = 64
    rate: float = 1.5e-3
    kl_weight: float = 1e-4
    compiled: bool = True
    capture: bool = True
    autocast: bool = True


def loss_terms(
    vae: AutoencoderKL, picture: torch.Tensor, noise: torch.Tensor, kl_weight: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (loss, squared error). picture: [B, 3, 128, 128]; noise: [B, 16, 16, 16]."""
    mean, logvar = vae.encoder(picture).float().chunk(2, 1)
    logvar = logvar.clamp(-12, 4)
    latent = mean + (0.5 * logvar).exp() * noise
    made = vae.decoder(latent).float()
    error = made - picture
    squared = error.square().mean()
    # Differences of neighbours weigh edges, which plain errors leave soft.
    edges = error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    return error.abs().mean() + 2 * squared + 0.5 * edges + kl_weight * kl, squared


def train_vae(
    vae: AutoencoderKL, composer: Composer, sampler: SpecSampler, settings: VaeSettings, log: Log
) -> AutoencoderKL:
    """Trains `vae` in place and returns the moving average of its weights (a second model)."""
    device = composer.device
    vae.to(device, memory_format=torch.channels_last)
    averaged = copy.deepcopy(vae).requires_grad_(False)
    parameters = list(vae.parameters())
    optimizer = build_optimizer(parameters, (0.9, 0.99), 1e-4)
    average = Average(parameters, list(averaged.parameters()), 0.999)
    total = torch.zeros(2, device=device)

    def function(terms: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        picture = composer(sampler.sample(settings.batch))
        picture = picture.contiguous(memory_format=torch.channels_last)
        noise = torch.randn(settings.batch, 16, 16, 16, device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.autocast):
            loss, squared = terms(vae, picture, noise, settings.kl_weight)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        average.update()
        total.add_(torch.stack((loss.detach(), squared.detach())))

    start = time.monotonic()

    def build(compiled: bool, capture: bool) -> Step:
        terms = torch.compile(loss_terms, dynamic=False) if compiled else loss_terms
        return Step(lambda: function(terms), optimizer, capture)

    step = first_that_works(
        build, settings.compiled, settings.capture, log,
        trial=lambda step: mean_of(step, total, optimizer),
    )  # fmt: skip
    wait(device)
    log("vae", event="step ready", took=time.monotonic() - start)
    _loop(step, optimizer, settings, total, start, log)
    return averaged


def _loop(
    step: Step,
    optimizer: torch.optim.Optimizer,
    settings: VaeSettings,
    total: torch.Tensor,
    start: float,
    log: Log,
) -> None:
    """Repeats the step until the time is over."""
    num, since, logged = 0, 0, time.monotonic()
    total.zero_()
    while (progress := (time.monotonic() - start) / settings.seconds) < 1:
        set_rate(optimizer, rate_at(num, progress, settings.rate))
        step()
        num, since = num + 1, since + 1
        if num % 20 == 0:
            wait(total.device)  # keeps the host from running ahead of the clock
        if time.monotonic() - logged > 10:
            loss, squared = (total / since).tolist()
            spent = (time.monotonic() - logged) * 1000 / since
            psnr = 10 * torch.tensor(4 / squared).log10().item()
            log("vae", step=num, loss=loss, train_psnr=psnr, ms=spent)
            total.zero_()
            since, logged = 0, time.monotonic()
    wait(total.device)
    log("vae", event="done", step=num, batch=settings.batch)


@torch.no_grad()
def encode(vae: AutoencoderKL, picture: torch.Tensor, autocast: bool) -> torch.Tensor:
    """Returns raw latents (the posterior's mean) as float32 [B, 16, 16, 16]."""
    picture = picture.contiguous(memory_format=torch.channels_last)
    with torch.autocast(picture.device.type, torch.bfloat16, enabled=autocast):
        return vae.encoder(picture).float()[:, :16]


@torch.no_grad()
def psnr(
    vae: AutoencoderKL, composer: Composer, sampler: SpecSampler, num: int
) -> tuple[float, float]:
    """Returns PSNR in dB (mean of it, of the mean error) on `num` pictures not trained on."""
    torch.manual_seed(987_654)
    errors = []
    for _ in range(0, num, 64):
        picture = composer(sampler.sample(min(64, num)))
        made = vae.decode(vae.encode(picture).latent_dist.mode()).sample.clamp(-1, 1)
        errors.append(((made - picture) / 2).square().mean((1, 2, 3)))
    error = torch.cat(errors)
    return (-10 * error.log10()).mean().item(), -10 * error.mean().log10().item()


def measure_latents(vae: AutoencoderKL, composer: Composer, sampler: SpecSampler, num: int) -> None:
    """Sets scaling_factor and shift_factor so that the latents have mean 0 and deviation 1."""
    latents = torch.cat(
        [encode(vae, composer(sampler.sample(64)), False) for _ in range(0, num, 64)]
    )
    vae.register_to_config(
        scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item()
    )


def save_vae(vae: AutoencoderKL, file: Path) -> None:
    """Writes the weights as fp16 with scale and shift."""
    tensors = {k: v.detach().half().cpu().contiguous() for k, v in vae.state_dict().items()}
    tensors["scaling_factor"] = torch.tensor(vae.config.scaling_factor)
    tensors["shift_factor"] = torch.tensor(vae.config.shift_factor)
    part = file.with_suffix(".part")
    save_file(tensors, part)
    part.rename(file)


def to_latents(vae: AutoencoderKL, raw: torch.Tensor) -> torch.Tensor:
    """Raw latents to those the transformer sees."""
    return (raw - vae.config.shift_factor) * vae.config.scaling_factor


@torch.no_grad()
def decode(vae: AutoencoderKL, latents: torch.Tensor) -> torch.Tensor:
    """Latents of the transformer to pictures in 0..1: [B, 3, 128, 128]."""
    raw = latents / vae.config.scaling_factor + vae.config.shift_factor
    made = torch.cat([vae.decoder(part) for part in raw.split(64)])
    return F.hardtanh(made) / 2 + 0.5
