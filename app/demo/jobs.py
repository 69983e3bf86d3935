"""Owns the line of people waiting for one pipeline: jobs, one worker thread, progress, stop.

Must never know what a job does or who looks at it. The surprising fact: the worker thread is the
lock. Every call of the pipeline happens on that one thread, so a pipeline is never used by two at
a time and library handles that are kept per thread are warmed up once.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

from PIL import Image

__all__ = ["Job", "JobQueue", "JobState", "Progress", "QueueFull", "Stopped", "let_go"]

log = logging.getLogger("dit_graphs.demo")
_ids = itertools.count(1)


class Stopped(Exception):
    """Raised inside a job at its next step after somebody asked it to stop."""


class QueueFull(RuntimeError):
    """The line is as long as it may be; nothing was queued."""


class JobState(str, Enum):
    """Where a job is; the last three are final."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


_FINAL = frozenset({JobState.DONE, JobState.FAILED, JobState.STOPPED})


@dataclass(frozen=True, slots=True)
class Progress:
    """What can be shown while a job runs: `step` of `total`, a small picture, text so far.

    `detail` is whatever else the work wants its page to see; the line passes it on unread.
    """

    stage: str = ""
    step: int = 0
    total: int = 0
    preview: Image.Image | None = None
    text: str = ""
    detail: object = None


@dataclass(eq=False, slots=True)
class Job:
    """One piece of work for the pipeline, watched from other threads.

    `results` grows while the job runs; `error` is set where it failed. `version` rises with every
    visible change.
    """

    work: Callable[[Job], None]
    session: str
    number: int = field(default_factory=lambda: next(_ids))
    state: JobState = JobState.WAITING
    progress: Progress = Progress()
    results: list[object] = field(default_factory=list)
    error: BaseException | None = None
    version: int = 0
    started: float | None = None
    ended: float | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _finished: threading.Event = field(default_factory=threading.Event)

    @property
    def is_finished(self) -> bool:
        """Whether nothing about the job will change any more."""
        return self.state in _FINAL

    @property
    def is_stopping(self) -> bool:
        """Whether somebody asked it to stop."""
        return self._stop.is_set()

    def show(self, **changes: object) -> None:
        """Replace fields of `progress`. Raises `Stopped` where the job was asked to stop."""
        self.progress = replace(self.progress, **changes)  # type: ignore[arg-type]
        self.version += 1
        self.check()

    def add(self, result: object) -> None:
        """One more finished result, kept even where the job is stopped later."""
        self.results.append(result)
        self.version += 1

    def check(self) -> None:
        """Raises `Stopped` where the job was asked to stop."""
        if self._stop.is_set():
            raise Stopped

    def wait(self, seconds: float | None = None) -> bool:
        """Whether the job is finished, after waiting at most `seconds`."""
        return self._finished.wait(seconds)

    def finish(self, state: JobState, error: BaseException | None = None) -> None:
        """The job is over; who waits for it wakes up."""
        self.state, self.error, self.ended = state, error, time.perf_counter()
        self.version += 1
        self._finished.set()


class JobQueue:
    """First come, first served, one at a time; the thread starts with the first job."""

    def __init__(self, *, max_waiting: int = 16, max_per_page: int = 4) -> None:
        self.max_waiting = max_waiting
        self.max_per_page = max_per_page
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, work: Callable[[Job], None], *, session: str = "") -> Job:
        """A job at the end of the line.

        Raises `QueueFull` where the line is too long, or where too many in it are of one page; ""
        is no page and has no limit of its own.
        """
        job = Job(work, session)
        with self._changed:
            if self._is_closed:
                raise QueueFull("the demo is shutting down")
            if len(self._waiting) >= self.max_waiting:
                raise QueueFull(f"{self.max_waiting} people are waiting already: try again soon")
            mine = sum(waiting.session == session for waiting in self._waiting)
            if session and mine >= self.max_per_page:
                raise QueueFull(f"{mine} jobs of this page are waiting already: let one finish")
            self._waiting.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="pipeline", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return job

    def position(self, job: Job) -> int:
        """How many jobs come before this one; 0 where it runs or is over."""
        with self._changed:
            if job not in self._waiting:
                return 0
            return list(self._waiting).index(job) + (self._running is not None)

    def __len__(self) -> int:
        """Jobs waiting or running."""
        with self._changed:
            return len(self._waiting) + (self._running is not None)

    def stop(self, job: Job) -> None:
        """A waiting job leaves the line at once; a running one ends at its next step."""
        with self._changed:
            job._stop.set()
            if job in self._waiting:
                self._waiting.remove(job)
                job.finish(JobState.STOPPED)

    def stop_session(self, session: str) -> int:
        """Stops every job of one page; returns how many there were."""
        with self._changed:
            jobs = [job for job in (*self._waiting, self._running) if job is not None]
        mine = [job for job in jobs if job.session == session]
        for job in mine:
            self.stop(job)
        return len(mine)

    def close(self) -> None:
        """No new jobs; waiting ones are stopped, the running one ends at its next step."""
        with self._changed:
            self._is_closed = True
            jobs = [job for job in (*self._waiting, self._running) if job is not None]
            self._changed.notify_all()
        for job in jobs:
            self.stop(job)
        if self._thread is not None:
            self._thread.join(timeout=30)

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                job = self._running = self._waiting.popleft()
                job.state, job.started = JobState.RUNNING, time.perf_counter()
                job.version += 1
            state, error = _run(job)
            let_go(error)
            with self._changed:
                self._running = None
                job.finish(state, error)
            del job, error  # what they hold belongs to the page: the next job needs the memory


def _run(job: Job) -> tuple[JobState, BaseException | None]:
    try:
        job.check()
        job.work(job)
    except Stopped:
        return JobState.STOPPED, None
    except BaseException as error:  # an exit in a pipeline would end the only worker, and the line
        log.info("job %d failed", job.number, exc_info=error)
        return JobState.FAILED, error
    return JobState.DONE, None


def let_go(error: BaseException | None) -> None:
    """The calls that raised `error`, or one it was raised from, hold nothing any more."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        found = waiting.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        traceback.clear_frames(found.__traceback__)  # those still running keep their locals
        waiting += [found.__cause__, found.__context__]
