"""The pool of training samples: specifications with their captions as tokens, later latents.

Owns how many variants a caption has and how they are stored. Knows the tokenizer only as a file.
Surprise: captions are written by many processes before training starts, so that the training step
never asks the host for anything.

    python -m dit_graphs.app.demo_model.training.pool --out FILE --num N --processes P
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from dit_graphs.app.demo_model.training.captions import (
    Spec,
    SpecSampler,
    long_caption,
    short_caption,
)
from dit_graphs.app.demo_model.training.concepts import Concept, load_concepts
from dit_graphs.app.demo_model.training.export import TOKENIZER

VARIANTS = 3
SHORT = 32
LONG = 56  # the longest caption that `long_caption` can write has 51 tokens
PAD, END, USER, ASSISTANT = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class Captions:
    """Tokens of N samples.

    short: int16 [N, VARIANTS, SHORT] prompts in their chat template;
    short_length: uint8 [N, VARIANTS];
    long: int16 [N, LONG] bare long captions ending in END, with long_length uint8 [N].
    """

    short: torch.Tensor
    short_length: torch.Tensor
    long: torch.Tensor
    long_length: torch.Tensor

    def to(self, device: torch.device) -> Captions:
        return Captions(*(getattr(self, f.name).to(device) for f in fields(self)))


class Encoder:
    """Text to token rows; checked against the chat template when made."""

    def __init__(self) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
        text = "a red heart next to 2 foxes"
        expected = self._tokenizer(
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        )["input_ids"]
        if [USER, *self.tokens([text])[0], ASSISTANT] != expected:
            raise ValueError(f"prompts are not encoded as the chat template does: {expected}")

    def tokens(self, texts: list[str]) -> list[list[int]]:
        """Returns the bare tokens of each text."""
        encoded = self._tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        return [e.ids for e in encoded]

    def prompts(self, texts: list[str], width: int = SHORT) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (int64 [B, width], lengths [B]) of the texts in their chat template."""
        return rows([[USER, *ids, ASSISTANT] for ids in self.tokens(texts)], width)


def rows(tokens: list[list[int]], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns padded lists and their lengths; raises ValueError for a list that is longer."""
    longest = max(map(len, tokens))
    if longest > width:
        raise ValueError(f"a caption has {longest} tokens, more than {width}")
    padded = torch.tensor([ids + [PAD] * (width - len(ids)) for ids in tokens])
    return padded, torch.tensor([len(ids) for ids in tokens])


def short_rows(
    row: tuple[int, int, int, int],
    num: int,
    concepts: tuple[Concept, ...],
    rng: random.Random,
    encoder: Encoder,
) -> list[list[int]]:
    """Returns `num` prompts of the row in their template, each of at most SHORT tokens.

    The pipeline would pad a longer one to 64 tokens, which batches of short prompts do not hold.
    """
    found: list[list[int]] = []
    while len(found) < num:
        texts = [short_caption(row, concepts, rng) for _ in range(num - len(found))]
        found += [ids for ids in encoder.tokens(texts) if len(ids) + 2 <= SHORT]
    return [[USER, *ids, ASSISTANT] for ids in found]


def chunk(job: tuple[int, int]) -> list[np.ndarray]:
    """Returns `num` samples, spec first, as arrays; the same for the same (seed, num).

    Arrays, not tensors: those would travel between processes as one open file each.
    """
    seed, num = job
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    concepts, rng, encoder = load_concepts(), random.Random(seed), Encoder()
    spec = SpecSampler(len(concepts), torch.device("cpu")).sample(num)
    short, long = [], []
    for row in zip(*(t.tolist() for t in spec.tensors()[:4]), strict=True):
        short += short_rows(row, VARIANTS, concepts, rng, encoder)
        long.append(long_caption(row, concepts, rng))
    ids, lengths = rows(short, SHORT)
    long_ids, long_lengths = rows([[*t, END] for t in encoder.tokens(long)], LONG)
    tensors = (
        torch.stack(spec.tensors(), 1),
        ids.view(num, VARIANTS, SHORT).short(),
        lengths.view(num, VARIANTS).byte(),
        long_ids.short(),
        long_lengths.byte(),
    )
    return [t.numpy() for t in tensors]


def write(file: Path, num: int, processes: int, seed: int = 1) -> None:
    """Writes a pool of about `num` samples; the file appears only when it is complete."""
    size = min(4000, num)
    jobs = [(seed * 1_000_003 + index, size) for index in range(num // size)]
    if processes > 1:
        with multiprocessing.get_context("spawn").Pool(processes) as workers:
            parts = workers.map(chunk, jobs, chunksize=1)
    else:
        parts = [chunk(job) for job in jobs]
    part = file.with_suffix(".part")
    torch.save([torch.from_numpy(np.concatenate(p)) for p in zip(*parts, strict=True)], part)
    part.rename(file)


def load(file: Path, device: torch.device) -> tuple[Spec, Captions]:
    """Returns the pool of `write` on a device."""
    spec, *captions = torch.load(file, map_location=device, weights_only=True)
    return Spec(*spec.T.contiguous()), Captions(*captions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num", type=int, required=True)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    write(args.out, args.num, args.processes)


if __name__ == "__main__":
    main()
