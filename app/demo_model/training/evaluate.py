"""Samples with the batched model and measures what it draws.

Owns retrieval and the picture grid. Knows nothing of training. Surprise: the reference of a concept
is composed over the background colour that the generated picture itself has, so the score is about
the thing, not the wall.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from PIL import Image

from dit_graphs.app.demo_model.training.batched import BatchedModel
from dit_graphs.app.demo_model.training.captions import COLOURS, LAYOUTS, Spec
from dit_graphs.app.demo_model.training.compose import Composer
from dit_graphs.app.demo_model.training.concepts import Concept
from dit_graphs.app.demo_model.training.models import build_scheduler
from dit_graphs.app.demo_model.training.pool import Encoder
from dit_graphs.app.demo_model.training.train_vae import decode

GRID_PROMPTS = (
    "a cat", "a fox", "a pizza", "a camel", "an octopus", "a robot",
    "a red heart", "a guitar", "a bicycle", "a sunflower", "a crown", "a laughing face",
    "a rocket in space", "a castle at night", "a penguin in the snow",
    "a turtle under water", "a red apple on a table", "a sailboat at sunset",
    "two cats", "three penguins", "four strawberries",
    "a dog and a ball of yarn", "a rabbit next to a carrot", "an airplane above a car",
)  # fmt: skip


@torch.no_grad()
def sample(
    model: BatchedModel,
    encoder: Encoder,
    prompts: list[str],
    num_steps: int,
    guidance: float,
    seed: int,
) -> torch.Tensor:
    """Returns latents [B, 16, 16, 16], guided as in the pipeline: pos + guidance * (pos - neg)."""
    device = next(model.transformer.parameters()).device
    ids, lengths = encoder.prompts([*prompts, *[""] * len(prompts)])
    features, _ = model.encode(ids.to(device))
    lengths, num = lengths.to(device), len(prompts)
    scheduler = build_scheduler()
    scheduler.set_timesteps(
        sigmas=torch.linspace(1.0, 1 / num_steps, num_steps).tolist(), device=device
    )
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(num, 16, 16, 16, generator=generator).to(device)
    for timestep in scheduler.timesteps:
        t = ((1000 - timestep) / 1000).expand(2 * num).to(device)
        positive, negative = model.velocity(latents.repeat(2, 1, 1, 1), t, features, lengths).chunk(
            2
        )
        velocity = positive + guidance * (positive - negative)
        latents = scheduler.step(-velocity.float(), timestep, latents, return_dict=False)[0]
    return latents


def save_grid(pictures: torch.Tensor, file: Path, columns: int = 6) -> None:
    """Writes pictures (0..1, [B, 3, H, W]) as one PNG."""
    rows = -(-len(pictures) // columns)
    height, width = pictures.shape[2:]
    sheet = torch.ones(rows * columns, 3, height, width)
    sheet[: len(pictures)] = pictures.float().cpu()
    sheet = sheet.unflatten(0, (rows, columns)).permute(0, 3, 1, 4, 2).reshape(rows * height, -1, 3)
    Image.fromarray((sheet * 255).round().byte().numpy()).save(file)


@torch.no_grad()
def _references(composer: Composer, num: int, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns all concepts over black and over white, 8x8-averaged: [num, 3, 16, 16] in 0..1."""
    device = composer.device
    sides = []
    for shade in (0.0, 1.0):
        parts = []
        for ids in torch.arange(num, device=device).split(100):
            same = torch.zeros_like(ids)
            spec = Spec(same + LAYOUTS.index(layout), ids, ids, same + COLOURS.index("white"), same)
            kept = composer.backgrounds
            composer.backgrounds = torch.full_like(kept, shade)
            parts.append(F.avg_pool2d(composer(spec, jitter=0) / 2 + 0.5, 8))
            composer.backgrounds = kept
        sides.append(torch.cat(parts))
    return sides[0], sides[1]


@torch.no_grad()
def rank_of_own(
    pictures: torch.Tensor, own: torch.Tensor, composer: Composer, layout: str, columns: slice
) -> torch.Tensor:
    """Returns per picture how many concepts look nearer than its own: int64 [B]; 0 is best."""
    num = len(composer.sprites)
    black, white = (r[..., columns] for r in _references(composer, num, layout))
    small = F.avg_pool2d(pictures.to(composer.device).float(), 8)
    border = torch.cat((small[:, :, 0], small[:, :, -1], small[:, :, :, 0], small[:, :, :, -1]), 2)
    ranks = []
    for picture, colour, index in zip(
        small[..., columns], border.median(2).values, own.to(composer.device), strict=True
    ):
        reference = black + (white - black) * colour[None, :, None, None]
        distance = (reference - picture).square().mean((1, 2, 3))
        ranks.append((distance < distance[index]).sum())
    return torch.stack(ranks)


def retrieval(
    model: BatchedModel,
    vae: AutoencoderKL,
    composer: Composer,
    concepts: tuple[Concept, ...],
    num_steps: int,
    guidance: float = 2.0,
) -> dict[str, float]:
    """Returns top-1 and top-5 over "a NAME" for all concepts."""
    prompts = [f"{c.article} {c.name}".strip() for c in concepts]
    pictures = decode(vae, sample(model, Encoder(), prompts, num_steps, guidance, seed=1))
    rank = rank_of_own(pictures, torch.arange(len(concepts)), composer, "single", slice(None))
    return {"top1": (rank < 1).float().mean().item(), "top5": (rank < 5).float().mean().item()}


def pairs(
    model: BatchedModel,
    vae: AutoencoderKL,
    composer: Composer,
    concepts: tuple[Concept, ...],
    num_steps: int,
    num: int = 256,
) -> dict[str, float]:
    """Returns how often the halves of "A and B on a white background" show A and B (top-1)."""
    chooser = torch.Generator().manual_seed(5)
    left = torch.randint(len(concepts), (num,), generator=chooser)
    right = (left + torch.randint(1, len(concepts), (num,), generator=chooser)) % len(concepts)
    named = [f"{c.article} {c.name}".strip() for c in concepts]
    prompts = [
        f"{named[a]} and {named[b]} on a white background"
        for a, b in zip(left.tolist(), right.tolist(), strict=True)
    ]
    pictures = decode(vae, sample(model, Encoder(), prompts, num_steps, 2.0, seed=2))
    a = rank_of_own(pictures, left, composer, "beside", slice(0, 8)) < 1
    b = rank_of_own(pictures, right, composer, "beside", slice(8, 16)) < 1
    return {
        "pair_each": (a.float().mean() + b.float().mean()).item() / 2,
        "pair_both": (a & b).float().mean().item(),
    }
