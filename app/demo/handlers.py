"""Owns what happens on the page: each event becomes a job, and the job's life becomes updates.

Must never touch the pipeline itself. The surprising fact: every handler is an async generator that
polls its job. It holds no thread while people wait in line, and whatever ends it (the last step, a
closed page) also stops the job.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

import gradio as gr

from dit_graphs.pipelines.generate import InputError

from . import work
from .compare import Comparison, compare
from .compare_view import comparison_html, empty_comparison_html
from .filling import form_of, seed_of
from .form import Form
from .graphs_panel import panel_html, running_panel_html
from .history import History, Kept, with_newest
from .jobs import Job, JobState, QueueFull
from .markup import millis, plural, text
from .problems import Problem, problem_of
from .stage import error_html, running_html, status_html
from .studio import Studio
from .work import Finished, Live, Warmed

__all__ = ["Handlers"]

_POLL_SECONDS = 0.08
_PANEL_SECONDS = 0.25
_NO_GRAPHS = {"none": "there is no CUDA device", "off": "graphs are off"}  # by backend


class Handlers:
    """The events that use the pipeline, bound to one studio."""

    def __init__(self, studio: Studio) -> None:
        self.studio = studio

    async def generate(
        self, request: gr.Request, history: History, *values: object
    ) -> AsyncIterator[tuple[object, ...]]:
        """Updates of (stage, gallery, details, download, reuse, graphs, history)."""
        skip = gr.skip()
        try:
            form = form_of(values)
            job = self._submit(lambda job: work.generate(self.studio, form, job), request)
        except (InputError, QueueFull) as error:
            yield error_html(problem_of(error)), *[skip] * 6
            return
        live = _LivePanel()
        async for position in self._follow(job):
            stage = running_html(job, position)
            panel = live.update(job)
            yield stage, gr.Gallery(visible=False), "", _hidden(), _hidden(), panel, skip
        made = [result for result in job.results if isinstance(result, Finished)]
        history = with_newest(made, history)
        stage = self._outcome(job, made, form)
        panel = self._panel(made[-1]) if made else self._stopped_panel(job)
        if not history:
            yield stage, gr.Gallery(visible=False), "", _hidden(), _hidden(), panel, history
            return
        entries = [(str(kept.path), f"seed {kept.seed}") for kept in history]
        gallery = gr.Gallery(value=entries, selected_index=0, visible=True)
        yield stage, gallery, *self._details(history[0]), panel, history

    def _details(self, kept: Kept) -> tuple[object, object, object]:
        if not kept.path.is_file():  # the page is older than its pictures
            return kept.details, _hidden(), _hidden()
        download = gr.DownloadButton(value=str(kept.path), visible=True)
        return kept.details, download, gr.Button(visible=True)

    def _outcome(self, job: Job, made: Sequence[Finished], form: Form) -> str:
        if job.state is JobState.FAILED:
            return error_html(self._problem(job, form))
        if job.state is JobState.STOPPED:
            step = job.progress.step
            kept = f" {plural(len(made), self._thing)} finished before that." if made else ""
            where = f" after step {step} of {job.progress.total}" if step else ""
            return status_html(f"Stopped{where}.{kept}")
        seconds = sum(finished.item.total_seconds for finished in made)
        return status_html(f"Done: {plural(len(made), self._thing)} in {millis(seconds * 1e3)}.")

    @property
    def _thing(self) -> str:
        return "video" if self.studio.is_video else "picture"

    def _panel(self, finished: Finished) -> str:
        return panel_html(finished.snapshot, finished.trace, finished.line)

    def _stopped_panel(self, job: Job) -> object:
        """The steps of a run that ended early stay to be seen, under what the graphs hold now."""
        live = job.progress.detail
        if not isinstance(live, Live):
            return gr.skip()
        return panel_html(self.studio.snapshot, live.trace, "The run ended before its last step.")

    def _problem(self, job: Job, form: Form | None = None) -> Problem:
        assert job.error is not None
        num_pictures = len(form.images) if form is not None else 0
        return problem_of(job.error, self.studio.snapshot.held_bytes, num_pictures=num_pictures)

    def select(self, history: History, chosen: gr.SelectData) -> tuple[object, object, object]:
        """The parameters of the picture that was picked in the gallery."""
        if not history:  # the server has forgotten a page that was left alone
            return "", _hidden(), _hidden()
        return self._details(history[min(int(chosen.index), len(history) - 1)])

    def stop(self, request: gr.Request) -> None:
        """Everything this page waits for ends at its next step."""
        self.studio.queue.stop_session(_session(request))

    async def compare(
        self, request: gr.Request, *values: object
    ) -> AsyncIterator[tuple[object, object]]:
        """Updates of (comparison, graphs)."""
        skip = gr.skip()
        try:
            form = form_of(values)
            job = self._submit(lambda job: compare(self.studio, form, job), request)
        except (InputError, QueueFull) as error:
            yield error_html(problem_of(error)), skip
            return
        live = _LivePanel()
        async for position in self._follow(job):
            yield running_html(job, position), live.update(job)
        if job.state is JobState.FAILED:
            yield error_html(self._problem(job, form)), self._stopped_panel(job)
            return
        for result in job.results:
            if isinstance(result, Comparison):
                device = self.studio.device.type
                # Three large pictures take seconds to encode: other pages must not wait for them.
                view = await asyncio.to_thread(comparison_html, result, device)
                yield view, self._panel(result.graphs)
                return
        yield status_html("Stopped.") + empty_comparison_html(), self._stopped_panel(job)

    async def warm_up(
        self, request: gr.Request, history: History, sizes: str, *values: object
    ) -> AsyncIterator[tuple[object, object]]:
        """Updates of (result, graphs)."""
        skip = gr.skip()
        if self.studio.backend in _NO_GRAPHS:
            why = _NO_GRAPHS[self.studio.backend]
            words = f"Nothing to capture: {why}, so every call stays plain eager."
            yield status_html(words), skip
            return
        try:
            form = form_of(values)
            job = self._submit(lambda job: work.warm_up(self.studio, form, sizes, job), request)
        except (InputError, QueueFull) as error:
            yield error_html(problem_of(error)), skip
            return
        async for position in self._follow(job):
            yield running_html(job, position), skip
        if job.state is JobState.FAILED:
            yield error_html(self._problem(job, form)), skip
        elif job.results and isinstance(job.results[0], Warmed):
            warmed = job.results[0]
            trace = history[0].trace if history else None
            yield _warmed_html(warmed), panel_html(warmed.snapshot, trace)
        else:
            yield status_html("Stopped."), skip

    async def rewrite(
        self, request: gr.Request, prompt: str, seed: str
    ) -> AsyncIterator[tuple[object, object]]:
        """Updates of (prompt, message): the prompt grows word by word."""
        skip = gr.skip()
        prompt = str(prompt or "")
        try:
            chosen = seed_of(seed) or 0
            job = self._submit(lambda job: work.write(self.studio, prompt, chosen, job), request)
        except (InputError, QueueFull) as error:
            yield skip, error_html(problem_of(error))
            return
        async for _ in self._follow(job):
            yield job.progress.text or skip, status_html("Writing a longer prompt…")
        if job.state is JobState.FAILED:
            yield prompt, error_html(self._problem(job))
        elif job.state is JobState.STOPPED:
            yield prompt, status_html("Stopped: the prompt is as it was.")
        else:
            yield str(job.results[0]), ""

    def leave(self, request: gr.Request) -> None:
        """A page was closed: nothing of it stays in the line."""
        self.studio.queue.stop_session(_session(request))

    def _submit(self, run: Callable[[Job], None], request: gr.Request) -> Job:
        return self.studio.queue.submit(run, session=_session(request))

    async def _follow(self, job: Job) -> AsyncIterator[int]:
        """Yields the position in line whenever something changed, until the job is finished."""
        seen: tuple[int, int] | None = None
        try:
            while not job.is_finished:
                now = (job.version, self.studio.queue.position(job))
                if now != seen:
                    seen = now
                    yield now[1]
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            self.studio.queue.stop(job)  # nobody looks any more: a finished job ignores it


class _LivePanel:
    """The Graphs panel while a job runs: a few times a second, and only where a stage was added."""

    def __init__(self) -> None:
        self._shown: object = None
        self._at = 0.0

    def update(self, job: Job) -> object:
        """The panel's markup, or Gradio's skip where there is nothing new to see."""
        progress, now = job.progress, time.perf_counter()
        live = progress.detail
        if not isinstance(live, Live) or live is self._shown or now - self._at < _PANEL_SECONDS:
            return gr.skip()
        self._shown, self._at = live, now
        return running_panel_html(live.before, live.trace, progress.total)


def _session(request: gr.Request) -> str:
    return str(request.session_hash or "")


def _hidden() -> dict[str, object]:
    return gr.update(visible=False)  # type: ignore[no-any-return]


def _warmed_html(warmed: Warmed) -> str:
    if not warmed.signatures:
        return status_html(f"Nothing new to capture ({millis(warmed.seconds * 1e3)}).")
    lines = "".join(f"<li>{text(name)}</li>" for name in warmed.signatures)
    words = f"Captured {plural(len(warmed.signatures), 'graph')} in {millis(warmed.seconds * 1e3)}:"
    return f'{status_html(words)}<ul class="dg-list">{lines}</ul>'
