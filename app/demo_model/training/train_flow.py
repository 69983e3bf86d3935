"""Trains transformer and language model together on pre-encoded latents.

Owns the flow-matching loss, the language loss and `flow.safetensors`. Knows pictures only as
latents. Surprise: one pass of the language model over "prompt, long caption" serves both losses,
because a causal model's prompt part does not depend on what follows.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, ZImageTransformer2DModel
from safetensors.torch import save_file
from transformers import Qwen3ForCausalLM

from dit_graphs.app.demo_model.training.batched import BatchedModel
from dit_graphs.app.demo_model.training.captions import Spec
from dit_graphs.app.demo_model.training.compose import Composer
from dit_graphs.app.demo_model.training.models import (
    TINY,
    Sizes,
    build_text_encoder,
    build_transformer,
)  # fmt: skip
from dit_graphs.app.demo_model.training.pool import ASSISTANT, LONG, SHORT, USER, VARIANTS, Captions
from dit_graphs.app.demo_model.training.stepping import (
    Average,
    Log,
    Step,
    build_optimizer,
    first_that_works,
    forget,
    mean_of,
    rate_at,
    set_rate,
    set_up_backends,
    wait,
)  # fmt: skip
from dit_graphs.app.demo_model.training.tokenizer import VOCABULARY
from dit_graphs.app.demo_model.training.train_vae import encode, to_latents

WINDOW_SECONDS = 5.0  # of one mean in the log, by which a climbing loss is noticed
LONG_SHARE = 1 / 8  # of a batch whose prompts are long captions of more than SHORT tokens
LONG_IN_SHORT = 0.15  # of the others, where the long caption fits into SHORT tokens


@dataclass(frozen=True, slots=True)
class FlowSettings:
    """How long and how to train; `seconds` is wall-clock time."""

    seconds: float
    batch: int = 512
    rate: float = 3e-4  # losses climbed at the peak of 6e-4, and 1.5e-3 diverged
    empty: float = 0.1
    text_weight: float = 0.1
    shift: float = 2.0
    compiled: bool = True
    capture: bool = True
    autocast: bool = True


@torch.no_grad()
def encode_pool(vae: AutoencoderKL, composer: Composer, spec: Spec, autocast: bool) -> torch.Tensor:
    """Returns the latents of every specification: float16 [N, 16, 16, 16]."""
    num, size = len(spec.layout), 500
    latents = torch.empty(num, 16, 16, 16, dtype=torch.float16, device=composer.device)
    for at in range(0, num, size):
        raw = encode(vae, composer(spec[at : at + size]), autocast)
        latents[at : at + size] = to_latents(vae, raw)
    return latents


class FlowLoss:
    """Draws a batch from the pool on the device and computes its losses.

    Long captions are prompts too, since the pipeline may expand one before it draws: of more than
    SHORT tokens in a part of their own, because the pipeline pads those to 2 * SHORT.
    """

    def __init__(
        self, model: BatchedModel, latents: torch.Tensor, captions: Captions, settings: FlowSettings
    ) -> None:
        self.model, self.latents, self.captions, self.settings = model, latents, captions, settings
        device = latents.device
        self._at = torch.arange(SHORT + LONG, device=device)
        self._empty = torch.zeros(SHORT, dtype=torch.int16, device=device)
        self._empty[0], self._empty[1] = USER, ASSISTANT
        self._num_long = max(1, round(settings.batch * LONG_SHARE))
        lengths = captions.long_length.long() + 1  # USER and ASSISTANT more, END less
        self._long_rows = (lengths > SHORT).nonzero()[:, 0]

    def _flow(
        self, rows: torch.Tensor, features: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """Returns the flow-matching loss of the pool's rows under the captions' features."""
        clean = self.latents[rows].float()
        noise = torch.randn_like(clean)
        sigma = torch.randn(len(rows), device=clean.device).sigmoid()
        sigma = self.settings.shift * sigma / (1 + (self.settings.shift - 1) * sigma)
        # A fifth is uniform, so that the ends of the schedule are seen often enough.
        is_even = torch.rand_like(sigma) < 0.2
        sigma = torch.where(is_even, torch.rand_like(sigma), sigma)
        mix = sigma[:, None, None, None]
        noisy = (1 - mix) * clean + mix * noise
        made = self.model.velocity(noisy, 1 - sigma, features, lengths)
        return F.mse_loss(made.float(), clean - noise)

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the means (flow loss of the short part, of the long part, text loss)."""
        short, text = self.short()
        return short, self.long(), text

    def total(self, losses: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """What is trained on: every picture counts alike, the text as much as the settings say."""
        short, long, text = losses
        return (1 - LONG_SHARE) * short + LONG_SHARE * long + self.settings.text_weight * text

    def short(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (flow loss, text loss) of prompts of at most SHORT tokens."""
        captions, num, device = self.captions, self.settings.batch - self._num_long, self._at.device
        rows = torch.randint(len(self.latents), (num,), device=device)
        variant = torch.randint(VARIANTS, (num,), device=device)
        prompt, length = captions.short[rows, variant], captions.short_length[rows, variant].long()
        long_length = captions.long_length[rows].long()
        full = self._as_prompt(rows, long_length, SHORT)
        is_full = (torch.rand(num, device=device) < LONG_IN_SHORT) & (long_length + 1 <= SHORT)
        prompt = torch.where(is_full[:, None], full, prompt.long())
        length = torch.where(is_full, long_length + 1, length)
        is_empty = torch.rand(num, device=device) < self.settings.empty
        prompt = torch.where(is_empty[:, None], self._empty, prompt).long()
        length = length.masked_fill(is_empty, 2)[:, None]
        # Prompt and long caption in one row, without a gap.
        in_prompt = self._at < length
        behind = (self._at - length).clamp(0, LONG - 1)
        target = captions.long[rows].long().gather(1, behind)
        ids = torch.where(in_prompt, F.pad(prompt, (0, LONG)), target)
        features, last = self.model.encode(ids)
        flow = self._flow(rows, features[:, :SHORT], length[:, 0])
        few = max(1, num // 4)  # text needs fewer samples than pictures
        end = length + long_length[:, None]
        counts = (~in_prompt & (self._at < end))[:few, 1:]
        logits = self.model.text_encoder.lm_head(last[:few, :-1]).float()
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:few, 1:].flatten(), reduction="none")
        text = (losses * counts.flatten()).sum() / counts.sum()
        return flow, text

    def _as_prompt(self, rows: torch.Tensor, length: torch.Tensor, width: int) -> torch.Tensor:
        """Returns the rows' long captions in the prompt's template, cut off at `width` tokens."""
        at = torch.arange(width, device=rows.device)
        bare = self.captions.long[rows].long()
        bare = bare.gather(1, (at - 1).clamp(0, LONG - 1).expand(len(rows), -1))
        return bare.masked_fill(at == 0, USER).masked_fill(at == length[:, None], ASSISTANT)

    def long(self) -> torch.Tensor:
        """Returns the flow loss of prompts that are long captions of more than SHORT tokens."""
        at = torch.randint(len(self._long_rows), (self._num_long,), device=self._at.device)
        rows = self._long_rows[at]
        length = self.captions.long_length[rows].long()
        features, _ = self.model.encode(self._as_prompt(rows, length, 2 * SHORT))
        return self._flow(rows, features, length + 1)


@dataclass(slots=True)
class Networks:
    """Transformer and language model; both sets train or average together."""

    transformer: ZImageTransformer2DModel
    text_encoder: Qwen3ForCausalLM

    def parameters(self) -> list[torch.nn.Parameter]:
        return [*self.transformer.parameters(), *self.text_encoder.parameters()]


def train_flow(
    networks: Networks,
    latents: torch.Tensor,
    captions: Captions,
    settings: FlowSettings,
    log: Log,
    checkpoint: Callable[[Networks], None],
    every: float = 60.0,
) -> Networks:
    """Trains in place and returns the averaged weights; hands them to `checkpoint` at times."""
    device = latents.device
    averaged = copy.deepcopy(networks)
    parameters = networks.parameters()
    for parameter in averaged.parameters():
        parameter.requires_grad_(False)
    optimizer = build_optimizer(parameters, (0.9, 0.95), 0.01)
    average = Average(parameters, averaged.parameters(), 0.999)
    total = torch.zeros(4, device=device)  # flow, flow of long prompts, text, norm of gradients

    def build(compiled: bool, capture: bool) -> Step:
        model = BatchedModel(networks.transformer, networks.text_encoder, compiled)
        loss = FlowLoss(model, latents, captions, settings)

        def function() -> None:
            with torch.autocast(device.type, torch.bfloat16, enabled=settings.autocast):
                parts = loss()
            optimizer.zero_grad(set_to_none=True)
            loss.total(parts).backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            average.update()
            total.add_(torch.stack((*(part.detach() for part in parts), norm)))

        return Step(function, optimizer, capture)

    start = time.monotonic()
    step = first_that_works(
        build, settings.compiled, settings.capture, log,
        trial=lambda step: mean_of(step, total, optimizer),
    )  # fmt: skip
    wait(device)
    log("flow", event="step ready", took=time.monotonic() - start)

    guard = Guard(parameters, averaged.parameters(), optimizer)
    _loop(step, optimizer, settings, total, start, log, lambda: checkpoint(averaged), guard, every)
    return averaged


class Guard:
    """Keeps the averaged weights of the best window, and goes back to them when the loss climbs.

    A copy, because the moving average itself holds half of what the last 700 steps did: after a
    window of divergence it is no place to go back to.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        averaged: Sequence[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._parameters = [p.detach() for p in parameters]
        self._averaged = [p.detach() for p in averaged]
        self._kept = [p.clone() for p in self._averaged]
        self._optimizer = optimizer
        self._best = math.inf

    def has_rewound(self, loss: float) -> bool:
        """Judges a window by its mean loss; True where the weights and the optimizer went back.

        The optimizer then starts afresh: warm its rate up again, for its first step moves every
        weight by the whole rate.
        """
        if loss <= 1.3 * self._best:
            if loss < self._best:
                self._best = loss
                torch._foreach_copy_(self._kept, self._averaged)
            return False
        torch._foreach_copy_(self._parameters, self._kept)
        torch._foreach_copy_(self._averaged, self._kept)
        forget(self._optimizer)
        return True


def _loop(
    step: Step,
    optimizer: torch.optim.Optimizer,
    settings: FlowSettings,
    total: torch.Tensor,
    start: float,
    log: Log,
    checkpoint: Callable[[], None],
    guard: Guard,
    every: float,
) -> None:
    """Repeats the steps until the time is over; a loss that climbs rewinds and halves the rate."""
    slower, num, warm, since = 1.0, 0, 0, 0
    logged = saved = time.monotonic()
    total.zero_()
    while (progress := (time.monotonic() - start) / settings.seconds) < 1:
        set_rate(optimizer, slower * rate_at(warm, progress, settings.rate))
        step()
        num, warm, since = num + 1, warm + 1, since + 1
        if num % 20 == 0:
            wait(total.device)  # keeps the host from running ahead of the clock
        if time.monotonic() - logged > WINDOW_SECONDS:
            flow, long, text, norm = (total / since).tolist()
            spent = (time.monotonic() - logged) * 1000 / since
            log("flow", step=num, flow=flow, long=long, text=text, norm=norm, ms=spent)
            if not math.isfinite(flow + long + text):
                raise FloatingPointError(f"the loss is not finite at step {num}")
            if guard.has_rewound(flow):
                slower, warm = slower / 2, 0
                log("flow", event="rewound", step=num, slower=slower)
            total.zero_()
            since, logged = 0, time.monotonic()
        if time.monotonic() - saved > every:
            checkpoint()
            total.zero_()
            since, saved = 0, time.monotonic()
            logged = saved
    wait(total.device)
    log("flow", event="done", step=num, batch=settings.batch)


def save_flow(networks: Networks, file: Path) -> None:
    """Writes both networks as fp16; the output head is tied to the embedding and left out.

    Weights that are not finite raise FloatingPointError and leave an older file as it is.
    """
    tensors = {}
    for prefix, model in (
        ("transformer", networks.transformer),
        ("text_encoder", networks.text_encoder),
    ):
        for name, value in model.state_dict().items():
            if name != "lm_head.weight":
                tensors[f"{prefix}.{name}"] = value.detach().half().cpu().contiguous()
    if not all(value.isfinite().all() for value in tensors.values()):
        raise FloatingPointError("a weight is not finite in fp16")
    part = file.with_suffix(".part")
    save_file(tensors, part)
    part.rename(file)


def compile_ahead(sizes: Sizes, batch: int, device: torch.device, autocast: bool) -> None:
    """Compiles the step's kernels on made-up data, so that the run finds them in the disk cache."""
    text_encoder = build_text_encoder(sizes, VOCABULARY)
    model = BatchedModel(
        build_transformer(sizes).to(device), text_encoder.to(device), compiled=True
    )
    num = 64
    captions = Captions(
        torch.randint(4, VOCABULARY, (num, VARIANTS, SHORT), dtype=torch.int16, device=device),
        torch.full((num, VARIANTS), 9, dtype=torch.uint8, device=device),
        torch.randint(4, VOCABULARY, (num, LONG), dtype=torch.int16, device=device),
        torch.full((num,), 40, dtype=torch.uint8, device=device),
    )
    latents = torch.randn(num, 16, 16, 16, device=device).half()
    loss = FlowLoss(model, latents, captions, FlowSettings(0.0, batch=batch))
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        parts = loss()
    loss.total(parts).backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=compile_ahead.__doc__)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    set_up_backends()  # as in the run: it is part of the cache's key
    compile_ahead(TINY if args.tiny else Sizes(), args.batch, device, device.type == "cuda")
    print("compiled ahead", flush=True)


if __name__ == "__main__":
    main()
