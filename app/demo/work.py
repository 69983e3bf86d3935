"""Owns what a job does with the pipeline: pictures, a longer prompt, a warm-up.

Must never know the page or run outside the worker thread. The surprising fact: every picture of a
request is a watched call of its own, so that progress, timeline and stop are the same for one
picture and for eight.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image
from torch import Tensor

from dit_graphs.pipelines import warmup
from dit_graphs.pipelines.generate import (
    GenerateRequest,
    InputError,
    Item,
    LoadedPipeline,
    Naming,
    complete,
    generate_items,
    guidance_note,
    open_images,
)
from dit_graphs.pipelines.generate.arguments import call_arguments
from dit_graphs.pipelines.generate.fitting import fitted

from .form import Form, request_of, sizes_of, text_of
from .gpu_busy import BusyMeter, busy_meter
from .jobs import Job
from .recovery import recovering
from .rewriting import rewrite
from .steps import watch_steps
from .studio import GraphSnapshot, Studio
from .trace import RunTrace, TraceRecorder
from .verdict import use_line

__all__ = [
    "Finished",
    "Live",
    "Prepared",
    "Warmed",
    "generate",
    "prepare",
    "run_once",
    "warm_for",
    "warm_up",
    "write",
]

_PREVIEW_SECONDS = 0.2
_THUMB_SIDE = 96
_MAX_PASSES = 3  # a call is eager until it was seen, captured and proven; some stay eager for good
# Where signatures depend on the length of the text, a warm-up without one takes a usual length.
TYPICAL_PROMPT = "a red fox that sits in tall grass at sunrise, soft light, a detailed photograph"


@dataclass(frozen=True, slots=True)
class Finished:
    """One finished picture or video, the timeline of its run, and the graphs after it.

    `shown` is the file a page may have, where the picture was saved; `thumb` is small and made
    once, because a running job is shown many times.
    """

    item: Item
    request: GenerateRequest
    trace: RunTrace
    snapshot: GraphSnapshot
    line: str
    note: str = ""
    shown: Path | None = None
    thumb: Image.Image | None = None


@dataclass(frozen=True, slots=True)
class Live:
    """A run that goes on: its spans until now, and the graphs as they were before it began."""

    trace: RunTrace
    before: GraphSnapshot


@dataclass(frozen=True, slots=True)
class Warmed:
    """What a warm-up captured, and how long it took."""

    signatures: tuple[str, ...]
    seconds: float
    snapshot: GraphSnapshot


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that was checked: its pipeline and its complete arguments, seed included."""

    loaded: LoadedPipeline
    request: GenerateRequest


def prepare(studio: Studio, form: Form) -> Prepared:
    """The form as a complete request on its pipeline, LoRA weights set. Raises `InputError`."""
    plan = studio.plan(form.mode)
    request = request_of(form, plan, studio.limits)
    studio.set_adapters(studio.loras.adapters(form.lora))
    loaded = studio.pipeline_for(plan)
    return Prepared(loaded, complete(loaded, request))


def generate(studio: Studio, form: Form, job: Job, *, measure_busy: bool = True) -> None:
    """Adds one `Finished` per picture to the job."""
    with recovering(studio):
        ready = prepare(studio, form)
        total = ready.request.num_images
        for index in range(total):
            thing = "video" if studio.is_video else "picture"
            title = f"{thing} {index + 1} of {total}" if total > 1 else thing
            job.add(run_once(studio, ready, job, index, title=title, measure_busy=measure_busy))


def run_once(
    studio: Studio,
    ready: Prepared,
    job: Job,
    index: int = 0,
    *,
    title: str = "picture",
    measure_busy: bool = True,
    is_saved: bool = True,
) -> Finished:
    """Item `index` of the request, watched step by step; saved unless `is_saved` is False."""
    loaded, pipe = ready.loaded, ready.loaded.pipe
    request = ready.request.single(index)
    job.show(stage=f"{title}: reading the prompt", step=0, total=0, preview=None, detail=None)
    recorder = TraceRecorder(pipe, loaded.device)
    with busy_meter(loaded.device, is_on=measure_busy) as meter:
        watcher = _Watcher(studio, job, recorder, meter, request, title)
        with watch_steps(pipe, watcher):
            item = next(
                generate_items(
                    loaded,
                    request,
                    naming=Naming(folder=studio.output) if is_saved else None,
                    graphs=studio.graphs,
                    name=studio.name,
                )
            )
        watcher.finish()
    frames = item.media[0].frames
    if watcher.latents is not None and frames:
        studio.previewer.learn(watcher.latents, frames[len(frames) // 2])
    return Finished(
        item=item,
        request=request,
        trace=recorder.trace(title).with_gpu(meter.stages),
        snapshot=studio.refresh(),
        line=use_line(item.graph_use, loaded.device),
        note=guidance_note(pipe, request) or "",
        shown=studio.publish(item.files[0], item.record) if item.files else None,
        thumb=_thumb(frames[0]) if frames else None,
    )


def _thumb(picture: Image.Image) -> Image.Image:
    small = picture.copy()
    small.thumbnail((_THUMB_SIDE, _THUMB_SIDE))
    return small


class _Watcher:
    """Turns what a call reports into the job's progress and the recorder's spans."""

    def __init__(
        self,
        studio: Studio,
        job: Job,
        recorder: TraceRecorder,
        meter: BusyMeter,
        request: GenerateRequest,
        title: str,
    ) -> None:
        self.latents: Tensor | None = None
        self._studio = studio
        self._job = job
        self._recorder = recorder
        self._meter = meter
        self._request = request
        self._title = title
        self._steps = 0
        self._total = 0
        self._shown = 0.0
        self._before = studio.snapshot

    def loop_opened(self, total: int) -> None:
        self._cut("decode" if self._total else "encode")
        self._total += total
        self._job.show(
            stage=f"{self._title}: denoising",
            step=self._steps,
            total=self._total,
            detail=self._live(),
        )

    def step_done(self, latents: Tensor | None) -> None:
        self._steps += 1
        self._cut("step", self._steps)
        self.latents = latents if latents is not None else self.latents
        changes: dict[str, object] = {"step": self._steps, "detail": self._live()}
        now = time.perf_counter()
        if latents is not None and now - self._shown >= _PREVIEW_SECONDS:
            self._shown = now
            width, height = self._request.width or 1, self._request.height or 1
            changes["preview"] = self._studio.previewer.picture(latents, width, height)
        self._job.show(**changes)

    def loop_closed(self) -> None:
        self._job.show(stage=f"{self._title}: decoding", step=self._steps)

    def check(self) -> None:
        self._job.check()

    def finish(self) -> None:
        """The call has returned."""
        self._cut("decode" if self._total else "run")

    def _cut(self, stage: str, index: int = 0) -> None:
        self._meter.mark()
        self._recorder.cut(stage, index)

    def _live(self) -> Live:
        return Live(self._recorder.trace(self._title), self._before)


def warm_up(studio: Studio, form: Form, sizes: str, job: Job) -> None:
    """Graphs exist for every size of the form's request; adds one `Warmed` to the job."""
    with recovering(studio):
        wanted = sizes_of(sizes, studio.limits)
        if not form.prompt.strip() and "prompt" in studio.plan(form.mode).takes:
            form = replace(form, prompt=TYPICAL_PROMPT)
        ready = prepare(studio, form)
        calls = [
            _warm_call(ready, replace(ready.request, width=width, height=height, num_images=1))
            for width, height in wanted
        ]
        words = ", ".join(f"{width}×{height}" for width, height in wanted)
        job.show(stage=f"warming up {words}, largest first")
        started = time.perf_counter()
        with watch_steps(ready.loaded.pipe, _Stoppable(job)):
            made = warmup(ready.loaded.pipe, calls)
        job.add(Warmed(tuple(made), time.perf_counter() - started, studio.refresh()))


def warm_for(ready: Prepared, job: Job) -> None:
    """What the request calls is captured, decoding included; Stop ends it at the next step."""
    job.show(stage="capturing what is left", step=0, total=0, preview=None, detail=None)
    pipe = ready.loaded.pipe
    with watch_steps(pipe, _Stoppable(job)):
        for _ in range(_MAX_PASSES):
            recorder = TraceRecorder(pipe, ready.loaded.device)
            warmup(pipe, [_warm_call(ready, ready.request.single(0))])
            if not recorder.cut("warm").total.num_eager:
                return


def _warm_call(ready: Prepared, request: GenerateRequest) -> dict[str, object]:
    request, inputs = fitted(ready.loaded.pipe, request, open_images(request))
    arguments = call_arguments(ready.loaded.pipe, request, inputs)
    return {**arguments, "num_inference_steps": 2, "output_type": "pil"}


class _Stoppable:
    """Only lets a call be stopped."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def loop_opened(self, total: int) -> None:
        self._job.check()

    def step_done(self, latents: Tensor | None) -> None:
        self._job.check()

    def loop_closed(self) -> None:
        self._job.check()

    def check(self) -> None:
        self._job.check()


def write(studio: Studio, prompt: str, seed: int, job: Job) -> None:
    """A longer prompt, shown in the job's progress while it grows; added as text at the end."""
    prompt = text_of("prompt", prompt, studio.limits)
    if not prompt:
        raise InputError("prompt", "say what the picture should show")
    job.show(stage="writing")
    with recovering(studio):
        text = rewrite(studio.pipe, prompt, seed=seed, on_text=lambda text: job.show(text=text))
    job.add(text)
