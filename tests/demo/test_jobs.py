"""The line in front of a pipeline: order, one at a time, stop, and what a failure leaves behind."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from dit_graphs.app.demo.jobs import Job, JobQueue, JobState, QueueFull


@pytest.fixture
def queue() -> Iterator[JobQueue]:
    queue = JobQueue(max_waiting=3)
    yield queue
    queue.close()


class Held:
    """Work that waits until it is let go, looking at the stop flag as a pipeline step would."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self.steps = 0

    def __call__(self, job: Job) -> None:
        self.begun.set()
        while not self.go.wait(0.005):
            self.steps += 1
            job.show(step=self.steps)


def test_jobs_run_in_order_on_one_thread_and_never_two_at_a_time(queue: JobQueue) -> None:
    seen: list[tuple[int, int]] = []
    inside = 0

    def work(job: Job) -> None:
        nonlocal inside
        inside += 1
        assert inside == 1
        time.sleep(0.01)
        seen.append((job.number, threading.get_ident()))
        inside -= 1

    jobs = [queue.submit(work, session=f"page {i}") for i in range(3)]
    assert all(job.wait(10) for job in jobs)
    assert [number for number, _ in seen] == [job.number for job in jobs]
    assert len({thread for _, thread in seen}) == 1
    assert {job.state for job in jobs} == {JobState.DONE}


def test_a_running_job_ends_at_its_next_step(queue: JobQueue) -> None:
    held = Held()
    job = queue.submit(held)
    assert held.begun.wait(10)
    queue.stop(job)
    steps = held.steps
    assert job.wait(10)
    assert job.state is JobState.STOPPED
    assert held.steps <= steps + 2
    assert len(queue) == 0


def test_b70_a_stopped_waiting_job_leaves_the_line_and_never_runs(queue: JobQueue) -> None:
    """Three pages: one runs, two wait; the first waiting one is cancelled."""
    held, ran = Held(), []
    running = queue.submit(held, session="a")
    assert held.begun.wait(10)
    waiting = queue.submit(lambda job: ran.append("b"), session="b")
    last = queue.submit(lambda job: ran.append("c"), session="c")
    assert [queue.position(job) for job in (running, waiting, last)] == [0, 1, 2]
    assert len(queue) == 3
    queue.stop(waiting)
    assert waiting.state is JobState.STOPPED
    assert queue.position(last) == 1
    assert len(queue) == 2
    held.go.set()
    assert last.wait(10)
    assert ran == ["c"]
    assert len(queue) == 0


def test_a_page_that_closes_stops_its_own_jobs_only(queue: JobQueue) -> None:
    held, ran = Held(), []
    running = queue.submit(held, session="mine")
    assert held.begun.wait(10)
    mine = queue.submit(lambda job: ran.append("mine"), session="mine")
    other = queue.submit(lambda job: ran.append("other"), session="other")
    assert queue.stop_session("mine") == 2
    assert other.wait(10)
    assert running.wait(10)
    assert (running.state, mine.state, other.state) == (
        JobState.STOPPED,
        JobState.STOPPED,
        JobState.DONE,
    )
    assert ran == ["other"]


def test_a_failed_job_says_why_and_the_next_one_runs(queue: JobQueue) -> None:
    def fail(job: Job) -> None:
        job.add("first picture")
        raise RuntimeError("no such luck")

    failed = queue.submit(fail)
    after = queue.submit(lambda job: job.add("fine"))
    assert after.wait(10)
    assert failed.state is JobState.FAILED
    assert str(failed.error) == "no such luck"
    assert failed.results == ["first picture"]
    assert after.results == ["fine"]


def test_an_exit_inside_a_job_does_not_end_the_line(queue: JobQueue) -> None:
    failed = queue.submit(lambda job: sys.exit(3))
    after = queue.submit(lambda job: job.add("fine"))
    assert after.wait(10)
    assert failed.state is JobState.FAILED
    assert after.results == ["fine"]


def test_the_line_keeps_nothing_of_a_job_that_is_over(queue: JobQueue) -> None:
    """A picture or an error that waits for the next job is memory that job may need."""
    kept: list[weakref.ref[Held]] = []

    def work(job: Job) -> None:
        large = Held()
        kept.append(weakref.ref(large))
        job.add(large)
        raise RuntimeError("with everything it came through")

    assert queue.submit(work).wait(10)
    until = time.monotonic() + 10
    while kept[0]() is not None and time.monotonic() < until:
        time.sleep(0.005)
    assert kept[0]() is None


def test_a_full_line_refuses_and_forgets(queue: JobQueue) -> None:
    held = Held()
    queue.submit(held)
    assert held.begun.wait(10)
    for _ in range(3):
        queue.submit(lambda job: None)
    with pytest.raises(QueueFull, match="3 people are waiting"):
        queue.submit(lambda job: None)
    assert len(queue) == 4


def test_one_page_cannot_fill_the_line() -> None:
    """It may have two jobs waiting beside the one that runs; others still find a place."""
    queue, held = JobQueue(max_waiting=4, max_per_page=2), Held()
    queue.submit(held, session="greedy")
    assert held.begun.wait(10)
    second = queue.submit(lambda job: None, session="greedy")
    queue.submit(lambda job: None, session="greedy")
    with pytest.raises(QueueFull, match="2 jobs of this page are waiting already"):
        queue.submit(lambda job: None, session="greedy")
    other = queue.submit(lambda job: None, session="other")
    queue.stop(second)
    again = queue.submit(lambda job: None, session="greedy")
    held.go.set()
    assert other.wait(10)
    assert again.wait(10)
    queue.close()


def test_closing_stops_everything_and_refuses_new_work() -> None:
    queue, held = JobQueue(), Held()
    running = queue.submit(held)
    assert held.begun.wait(10)
    waiting = queue.submit(lambda job: None)
    queue.close()
    assert (running.state, waiting.state) == (JobState.STOPPED, JobState.STOPPED)
    with pytest.raises(QueueFull, match="shutting down"):
        queue.submit(lambda job: None)


def test_progress_keeps_what_is_not_changed_and_raises_the_version(queue: JobQueue) -> None:
    def work(job: Job) -> None:
        job.show(stage="denoising", total=8)
        job.show(step=3)

    job = queue.submit(work)
    assert job.wait(10)
    assert (job.progress.stage, job.progress.step, job.progress.total) == ("denoising", 3, 8)
    assert job.version >= 3
