"""A studio around a tiny real pipeline, for tests of the demo: the same class the page uses.

Owns nothing but the building. The surprising fact: pipelines that were never saved have no place,
so the studio's model is called `unsaved/…` in records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import tiny
from diffusers import DiffusionPipeline

import dit_graphs
from dit_graphs import GraphConfig
from dit_graphs.app.demo.form import Form, Limits
from dit_graphs.app.demo.jobs import Job
from dit_graphs.app.demo.studio import Studio
from dit_graphs.pipelines.generate.load import LoadedPipeline
from dit_graphs.pipelines.generate.model import ModelSpec

SIZE = 64
EXTRA = '{"max_sequence_length": 64}'


def make_studio(
    pipe: DiffusionPipeline | None = None,
    *,
    config: GraphConfig | None = None,
    output: Path | None = None,
    lora_dir: Path | None = None,
    max_waiting: int = 16,
) -> Studio:
    """A studio whose denoiser is replayed by the CPU recorder."""
    pipe = tiny.build("z-image") if pipe is None else pipe
    config = config or GraphConfig(backend="recorded")
    spec = ModelSpec(model=f"unsaved/{type(pipe).__name__}")
    dit_graphs.accelerate(pipe, config)
    loaded = LoadedPipeline(pipe, spec, pipe._execution_device, {})
    return Studio(
        loaded,
        config,
        output=output,
        lora_dir=lora_dir,
        limits=Limits(side=512),
        max_waiting=max_waiting,
    )


@contextmanager
def studio_of(**options: object) -> Iterator[Studio]:
    """A studio that is closed, and its pipeline restored, afterwards."""
    studio = make_studio(**options)  # type: ignore[arg-type]
    try:
        yield studio
    finally:
        studio.close()
        dit_graphs.restore(studio.pipe)


def a_form(**fields: object) -> Form:
    """A small request that the tiny Z-Image takes."""
    given: dict[str, object] = {
        "prompt": "a red heart",
        "width": SIZE,
        "height": SIZE,
        "steps": 4,
        "guidance": 2.0,
        "seed": 7,
        "extra": EXTRA,
    }
    return Form(**{**given, **fields})  # type: ignore[arg-type]


def run_job(studio: Studio, work: Callable[[Job], None], *, session: str = "page") -> Job:
    """The finished job; its own error is raised here."""
    job = studio.queue.submit(work, session=session)
    assert job.wait(120)
    if job.error is not None:
        raise job.error
    return job
