"""A prompt that grows while it is written is the prompt `rewrite_prompt` writes."""

from __future__ import annotations

import threading

import pytest
import tiny
from demo_studio import a_form, run_job, studio_of

import dit_graphs
from dit_graphs.app.demo import work
from dit_graphs.app.demo.jobs import Job, JobState, Stopped
from dit_graphs.app.demo.rewriting import can_rewrite, rewrite


def test_the_words_come_one_by_one_and_end_as_rewrite_prompt_has_it() -> None:
    with studio_of() as studio:
        seen: list[str] = []
        text = rewrite(studio.pipe, "a cat", seed=3, on_text=seen.append)
        assert text == dit_graphs.rewrite_prompt(studio.pipe, "a cat", seed=3)
        assert text != dit_graphs.rewrite_prompt(studio.pipe, "a cat", seed=4)
    assert len(seen) > 3
    assert seen[-1] == text
    assert len(set(map(len, seen))) > 3


def test_it_can_be_stopped_and_leaves_the_model_as_it_was() -> None:
    with studio_of() as studio:
        whole = dit_graphs.rewrite_prompt(studio.pipe, "a cat", seed=3)
        seen: list[str] = []

        def stop_at_five(text: str) -> None:
            seen.append(text)
            if len(seen) == 5:
                raise Stopped

        with pytest.raises(Stopped):
            rewrite(studio.pipe, "a cat", seed=3, on_text=stop_at_five)
        assert len(seen) == 5
        assert dit_graphs.rewrite_prompt(studio.pipe, "a cat", seed=3) == whole


def test_a_rewrite_waits_in_line_and_can_be_stopped_there() -> None:
    with studio_of() as studio:
        begun = threading.Event()

        def write(job: Job) -> None:
            begun.set()
            work.write(studio, "a cat", 3, job)

        job = studio.queue.submit(write)
        assert begun.wait(30)
        while not job.progress.text and not job.is_finished:
            job.wait(0.001)
        studio.queue.stop(job)
        assert job.wait(30)
        assert job.state is JobState.STOPPED
        done = run_job(studio, lambda job: work.write(studio, "a cat", 3, job))
        assert done.results == [dit_graphs.rewrite_prompt(studio.pipe, "a cat", seed=3)]
        run_job(studio, lambda job: work.generate(studio, a_form(), job))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("z-image", True), ("flux2-klein", True), ("sdxl", False), ("wan", False)],
)
def test_only_language_models_write(name: str, expected: bool) -> None:
    assert can_rewrite(tiny.build(name)) is expected
