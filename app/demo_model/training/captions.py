"""Specifications of pictures and the captions that describe them exactly.

Owns what a picture may contain (`Spec`) and how English says it. Knows nothing of pixels or tokens.
Surprise: a background goes unmentioned only where it is one of the light plain colours, so a prompt
without one means those.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from dit_graphs.app.demo_model.training.concepts import Concept

LAYOUTS = (
    "single", "big", "small", "left", "right", "top", "bottom",
    "two", "three", "four", "beside", "above",
)  # fmt: skip
LAYOUT_WEIGHTS = (0.42, 0.05, 0.05, 0.03, 0.03, 0.03, 0.03, 0.07, 0.05, 0.04, 0.13, 0.07)
COLOURS = (
    "white", "gray", "light blue", "light green", "light yellow", "pink",
    "red", "orange", "blue", "green", "purple", "black",
)  # fmt: skip
NUM_LIGHT = 6
SCENES: tuple[tuple[str, ...], ...] = (
    ("in a meadow", "on the grass", "in a green field"),
    ("in the desert", "in a sandy desert", "on sand dunes"),
    ("in the snow", "in a snowy landscape", "in winter"),
    ("at night", "under the night sky", "at night under the stars"),
    ("in space", "in outer space", "among the stars in space"),
    ("at sunset", "in the sunset", "in front of a sunset"),
    ("under water", "under the sea", "in the ocean"),
    ("on the beach", "at the beach", "by the sea"),
    ("in the sky", "in a blue sky with clouds", "among the clouds"),
    ("in a forest", "in the woods", "among the trees"),
    ("on a table", "on a wooden table", "on the table"),
)
DETAILS = (
    "green grass and rolling hills under a bright blue sky",
    "golden sand dunes under a hot pale sky",
    "white snow drifts and falling snowflakes", "a dark blue sky with stars and a moon",
    "deep black space with many stars and a colorful glow", "an orange and pink sky with a low sun",
    "deep blue water with bubbles and rays of light", "yellow sand, blue sea and a clear sky",
    "a blue sky with soft white clouds", "tall green trees behind a shady ground",
    "a brown wooden table against a warm wall",
)  # fmt: skip
NUM_BACKGROUNDS = len(COLOURS) + len(SCENES)
PREFIXES = (
    "a picture of", "a photo of", "an image of", "an emoji of", "a 3d icon of", "a drawing of",
    "a cute", "draw", "a 3d render of", "an illustration of",
)  # fmt: skip
STYLES = (
    "soft shadow, bright colors, high detail", "smooth shapes, soft light, clean style",
    "glossy surface, vivid colors, studio light",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spec:
    """Picture descriptions: five int64 tensors [B]; `second` counts only in two-thing layouts."""

    layout: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    background: torch.Tensor
    variant: torch.Tensor

    def __getitem__(self, rows: slice) -> Spec:
        return Spec(*(t[rows] for t in self.tensors()))

    def to(self, device: torch.device) -> Spec:
        return Spec(*(t.to(device) for t in self.tensors()))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.layout, self.first, self.second, self.background, self.variant


class SpecSampler:
    """Draws specifications on a device; all its tensors are made once, so it can be captured."""

    def __init__(self, num_concepts: int, device: torch.device) -> None:
        self.num_concepts = num_concepts
        self.device = device
        self._layouts = torch.tensor(LAYOUT_WEIGHTS, device=device).cumsum(0)
        light = [0.20] + [0.06] * (NUM_LIGHT - 1)
        other = [0.02] * (len(COLOURS) - NUM_LIGHT)
        scene = [0.38 / len(SCENES)] * len(SCENES)
        self._backgrounds = torch.tensor(light + other + scene, device=device).cumsum(0)

    def sample(self, num: int) -> Spec:
        """Returns `num` independent specifications."""

        def pick(cumulative: torch.Tensor) -> torch.Tensor:
            drawn = torch.rand(num, device=self.device) * cumulative[-1]
            return torch.searchsorted(cumulative, drawn).clamp_(max=len(cumulative) - 1)

        first = torch.randint(self.num_concepts, (num,), device=self.device)
        apart = torch.randint(1, self.num_concepts, (num,), device=self.device)
        return Spec(
            layout=pick(self._layouts),
            first=first,
            second=(first + apart) % self.num_concepts,
            background=pick(self._backgrounds),
            variant=torch.randint(1 << 20, (num,), device=self.device),
        )


def one(concept: Concept, rng: random.Random, adjective: str = "") -> str:
    """Returns "a red heart", now and then by another name or without its article."""
    name, article = concept.name, concept.article
    if concept.other_names and rng.random() < 0.12:
        name = rng.choice(concept.other_names)
        article = "an" if name[0] in "aeiou" else "a"
    if adjective:
        name = f"{adjective} {name}"
        article = article and ("an" if adjective[0] in "aeiou" else "a")
    if not article or rng.random() < 0.12:
        return name
    return f"{article} {name}"


def _core(layout: str, first: Concept, second: Concept, rng: random.Random) -> str:
    """Returns the part of a caption that says what is drawn and where."""
    if layout == "big":
        return one(first, rng, rng.choice(("big", "large", "huge")))
    if layout == "small":
        return one(first, rng, rng.choice(("small", "little", "tiny")))
    if layout in ("left", "right"):
        where = rng.choice((f"on the {layout}", f"on the {layout} side"))
        return f"{one(first, rng)} {where}"
    if layout in ("top", "bottom"):
        return f"{one(first, rng)} at the {layout}"
    if layout in ("two", "three", "four"):
        digit = {"two": "2", "three": "3", "four": "4"}[layout]
        return f"{digit if rng.random() < 0.15 else layout} {first.plural}"
    if layout == "beside":
        a, b = one(first, rng), one(second, rng)
        return rng.choice((
            f"{a} and {b}", f"{a} and {b}", f"{a} and {b}", f"{a} next to {b}", f"{a} beside {b}",
            f"{a} to the left of {b}", f"{b} to the right of {a}", f"{a} with {b}",
        ))  # fmt: skip
    if layout == "above":
        a, b = one(first, rng), one(second, rng)
        return rng.choice((f"{a} above {b}", f"{b} below {a}", f"{a} over {b}", f"{b} under {a}"))
    return one(first, rng)


def short_caption(
    row: tuple[int, int, int, int], concepts: tuple[Concept, ...], rng: random.Random
) -> str:
    """Returns what a user would type for the row (layout, first, second, background)."""
    layout, first, second, background = row
    text = _core(LAYOUTS[layout], concepts[first], concepts[second], rng)
    if rng.random() < 0.2:
        prefix = rng.choice(PREFIXES)
        if prefix != "a cute":
            text = f"{prefix} {text}"
        elif text.startswith(("a ", "an ")):
            text = f"a cute {text.split(' ', 1)[1]}"
    if background >= len(COLOURS):
        return f"{text} {rng.choice(SCENES[background - len(COLOURS)])}"
    if background >= NUM_LIGHT or rng.random() < 0.3:
        colour = COLOURS[background]
        return f"{text}{rng.choice((f' on a {colour} background', f', {colour} background'))}"
    return text


_PLACES = {
    "single": "in the center", "big": "very large, filling the picture",
    "small": "tiny, in the center",
    "left": "on the left side", "right": "on the right side",
    "top": "at the top", "bottom": "at the bottom",
    "two": "side by side", "three": "close together", "four": "in two rows",
}  # fmt: skip


def long_caption(
    row: tuple[int, int, int, int], concepts: tuple[Concept, ...], rng: random.Random
) -> str:
    """Returns the full description that the language model learns to write for a short prompt."""
    layout, first, second, background = row
    name = LAYOUTS[layout]
    a, b = (f"{c.article} {c.name}".strip() for c in (concepts[first], concepts[second]))
    if name in ("two", "three", "four"):
        core = f"{name} {concepts[first].plural}, {_PLACES[name]}"
    elif name == "beside":
        core = f"{a} on the left and {b} on the right"
    elif name == "above":
        core = f"{a} at the top and {b} below it"
    else:
        core = f"{a}, {_PLACES[name]}"
    if background >= len(COLOURS):
        where = f"{SCENES[background - len(COLOURS)][0]}, {DETAILS[background - len(COLOURS)]}"
    else:
        where = f"on a plain {COLOURS[background]} background"
    return f"a 3d illustration of {core}, {where}, {rng.choice(STYLES)}"
