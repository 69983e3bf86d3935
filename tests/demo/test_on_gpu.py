"""The demo on a CUDA device: busy time per stage while graphs are captured, and stop."""

from __future__ import annotations

import time

import pytest
import tiny
import torch
from demo_studio import a_form, run_job, studio_of

from dit_graphs import GraphConfig
from dit_graphs.app.demo import work
from dit_graphs.app.demo.jobs import JobState
from dit_graphs.app.demo.work import Finished

pytestmark = pytest.mark.gpu


def test_every_stage_has_a_busy_time_and_tracing_changes_no_pixel() -> None:
    pipe = tiny.build("z-image").to("cuda")
    with studio_of(pipe=pipe, config=GraphConfig(backend="full")) as studio:
        made: list[Finished] = []
        for is_measured in (True, True, False):
            job = run_job(
                studio,
                lambda job, on=is_measured: work.generate(studio, a_form(), job, measure_busy=on),
            )
            made += [result for result in job.results if isinstance(result, Finished)]
    pixels = [finished.item.media[0].frames[0].tobytes() for finished in made]
    assert pixels[0] == pixels[1] == pixels[2]
    for finished in made[:2]:
        for span in finished.trace.spans:
            assert span.gpu is not None
            assert 0.0 <= span.gpu[0] <= span.gpu[1]
        steps = [span for span in finished.trace.spans if span.stage == "step"]
        assert all(span.gpu is not None and span.gpu[0] > 0.0 for span in steps)
    assert all(span.gpu is None for span in made[2].trace.spans)
    assert {span.source for span in made[1].trace.spans if span.stage == "step"} == {"graph"}


def test_stop_leaves_at_most_two_steps_on_the_device() -> None:
    pipe = tiny.build("z-image").to("cuda")
    with studio_of(pipe=pipe, config=GraphConfig(backend="full")) as studio:
        form = a_form(steps=150)
        run_job(studio, lambda job: work.generate(studio, a_form(), job))
        job = studio.queue.submit(lambda job: work.generate(studio, form, job, measure_busy=False))
        while job.progress.step < 5 and not job.is_finished:
            time.sleep(0.0005)
        seen = job.progress.step
        studio.queue.stop(job)
        assert job.wait(30)
        assert job.state is JobState.STOPPED
        assert job.progress.step <= seen + 2
        torch.cuda.synchronize()
        run_job(studio, lambda job: work.generate(studio, a_form(), job))
