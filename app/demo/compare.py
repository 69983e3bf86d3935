"""Owns the comparison: one seed, plain eager beside graphs, and where the pixels differ.

Must never round a difference away. The surprising fact: graphs run twice, around plain eager. Their
first run may still be learning (its early calls are eager); it also warms the libraries up, so that
eager is not timed cold. What it did not capture is captured before the last run, the one that is
timed, because that is what every later picture gets; both runs are held against eager.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from dit_graphs.pipelines import disabled

from .form import Form
from .jobs import Job
from .recovery import recovering
from .studio import Studio
from .work import Finished, Prepared, prepare, run_once, warm_for

__all__ = ["Comparison", "Difference", "compare", "difference_of"]

_RED = np.array([235, 24, 24], dtype=np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """Pixels of one picture that are not those of the other; `picture` shows them in red."""

    num_pixels: int
    num_different: int
    largest: int
    picture: Image.Image

    @property
    def is_zero(self) -> bool:
        """Whether every pixel is the same."""
        return self.num_different == 0


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """The first run with graphs, plain eager, the timed run, and both differences to eager."""

    eager: Finished
    first: Finished
    graphs: Finished
    first_difference: Difference
    difference: Difference

    @property
    def is_equal(self) -> bool:
        """Whether both runs with graphs drew exactly what eager drew."""
        return self.first_difference.is_zero and self.difference.is_zero

    @property
    def uses_graphs(self) -> bool:
        """Whether any call of the two runs with graphs came from one."""
        return any(run.item.graph_use.replays for run in (self.first, self.graphs))


def compare(studio: Studio, form: Form, job: Job) -> None:
    """Adds one `Comparison` of the form's request to the job; its count is taken as one."""
    with recovering(studio):
        ready = prepare(studio, form)
        first = _run(studio, ready, job, "graphs, first run")
        with disabled(ready.loaded.pipe):
            eager = _run(studio, ready, job, "plain eager")
        warm_for(ready, job)
        graphs = _run(studio, ready, job, "graphs, timed run")
        job.add(
            Comparison(
                eager=eager,
                first=first,
                graphs=graphs,
                first_difference=difference_of(_frames(eager), _frames(first)),
                difference=difference_of(_frames(eager), _frames(graphs)),
            )
        )


def _run(studio: Studio, ready: Prepared, job: Job, title: str) -> Finished:
    # The tracer would slow plain eager more than replays: times here are taken without it.
    return run_once(studio, ready, job, title=title, measure_busy=False, is_saved=False)


def _frames(finished: Finished) -> tuple[Image.Image, ...]:
    return finished.item.media[0].frames


def difference_of(before: tuple[Image.Image, ...], after: tuple[Image.Image, ...]) -> Difference:
    """All frames compared value by value; `picture` is the frame that differs most.

    Equal pixels are shown as a pale grey copy, different ones in red, the stronger the redder.
    """
    if [frame.size for frame in before] != [frame.size for frame in after]:
        raise ValueError("pictures of different sizes cannot be compared")
    worst, different, largest, pixels = 0, 0, 0, 0
    counts = []
    for one, other in zip(before, after, strict=True):
        delta = _delta(one, other)
        count = int((delta > 0).sum())
        counts.append(count)
        different += count
        largest = max(largest, int(delta.max(initial=0)))
        pixels += delta.size
    worst = int(np.argmax(counts)) if counts else 0
    picture = _in_red(before[worst], _delta(before[worst], after[worst]))
    return Difference(pixels, different, largest, picture)


def _delta(one: Image.Image, other: Image.Image) -> np.ndarray:
    """Largest difference of any channel, per pixel, 0 to 255."""
    first = np.asarray(one.convert("RGBA"), dtype=np.int16)
    second = np.asarray(other.convert("RGBA"), dtype=np.int16)
    return np.asarray(np.abs(first - second).max(axis=-1))


def _in_red(picture: Image.Image, delta: np.ndarray) -> Image.Image:
    grey = np.asarray(picture.convert("L"), dtype=np.float64)[..., None]
    base = np.broadcast_to(218 + grey * (30 / 255), (*grey.shape[:2], 3))
    # At least half red for a difference of one: it must be seen, however small it is.
    weight = np.where(delta > 0, 0.5 + 0.5 * np.sqrt(delta / 255), 0.0)[..., None]
    mixed = base * (1 - weight) + _RED * weight
    return Image.fromarray(mixed.round().astype(np.uint8))
