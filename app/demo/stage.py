"""Owns what is seen where the picture will be: waiting, progress with a preview, errors, results.

Must never talk to the pipeline. The surprising fact: everything that changes is inside one live
region, so a screen reader hears "step 4 of 8" and errors without moving the focus.
"""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from .jobs import Job, JobState
from .markup import data_uri, millis, plural, text
from .problems import Problem
from .work import Finished

__all__ = ["details_html", "error_html", "idle_html", "running_html", "status_html"]

_LONG = 200  # characters


def idle_html(model: str) -> str:
    """Before the first picture."""
    return (
        '<div class="dg-stage dg-stage-idle"><div class="dg-stage-words">'
        "<strong>Nothing drawn yet</strong>"
        f"<span>Describe a picture and press Generate: {text(model)} is ready.</span></div></div>"
    )


def running_html(job: Job, position: int) -> str:
    """A job in the line or at work: where it is, how far, and what can be seen already."""
    progress = job.progress
    if job.state is JobState.WAITING:
        return _stage(
            None,
            "In line",
            "You are next." if position <= 1 else f"{plural(position, 'job')} before yours.",
            None,
            (),
        )
    share = progress.step / progress.total if progress.total else None
    words = f"step {progress.step} of {progress.total}" if progress.total else ""
    title = "Stopping…" if job.is_stopping else _capital(progress.stage or "starting")
    done = [finished.thumb for finished in _finished(job) if finished.thumb is not None]
    return _stage(progress.preview, title, words, share, done)


def _finished(job: Job) -> list[Finished]:
    return [result for result in list(job.results) if isinstance(result, Finished)]


def _stage(
    preview: Image.Image | None,
    title: str,
    words: str,
    share: float | None,
    done: Sequence[Image.Image],
) -> str:
    picture = (
        f'<img class="dg-preview" alt="Preview of the picture being made" '
        f'src="{data_uri(preview, is_small=True)}">'
        if preview is not None
        else '<div class="dg-preview dg-preview-empty" aria-hidden="true"></div>'
    )
    percent = 100 * (share or 0)
    value = "" if share is None else f' aria-valuenow="{percent:.0f}"'
    thumbs = "".join(
        f'<img alt="Picture {number} is finished" src="{data_uri(image, is_small=True)}">'
        for number, image in enumerate(done, start=1)
    )
    return (
        f'<div class="dg-stage" aria-busy="true">{picture}'
        '<div class="dg-progress-block">'
        f'<div class="dg-progress-words"><strong>{text(title)}</strong>'
        f'<span id="dg-step">{text(words)}</span></div>'
        f'<div class="dg-progress" role="progressbar" aria-label="Progress" aria-valuemin="0" '
        f'aria-valuemax="100"{value}><i style="width:{percent:.1f}%"></i></div></div>'
        f'<div class="dg-thumbs">{thumbs}</div></div>'
    )


def status_html(words: str) -> str:
    """One line of status after a run."""
    return f'<p class="dg-status-line">{text(words)}</p>'


def error_html(problem: Problem) -> str:
    """An error in words, with the page alive around it."""
    return (
        f'<div class="dg-alert" role="alert"><strong>{text(problem.title)}</strong>'
        f"<p>{text(problem.text)}</p></div>"
    )


def details_html(finished: Finished) -> str:
    """The parameters of one picture, the ones that were used rather than asked for."""
    item, request = finished.item, finished.request
    size = item.media[0].describe()
    actual = f"{size['width']}×{size['height']}" if "width" in size else "–"
    if request.width and request.height and actual != f"{request.width}×{request.height}":
        actual += f" (asked for {request.width}×{request.height})"
    frames = size.get("num_frames")
    rows = {
        "seed": item.seed,
        "size": actual,
        "frames": _and_asked(frames, request.num_frames),
        "steps": _and_asked(item.num_steps, request.num_inference_steps),
        "guidance": request.guidance_scale,
        "strength": request.strength,
        "negative": request.negative_prompt,
        "time": millis(item.total_seconds * 1e3),
    }
    lora = _lora(finished)
    if lora:
        rows["LoRA"] = lora
    cells = "".join(
        f"<div><dt>{text(name)}</dt><dd>{_text(str(value))}</dd></div>"
        for name, value in rows.items()
        if value is not None
    )
    stages = ", ".join(f"{name} {millis(s * 1e3)}" for name, s in item.seconds.items())
    note = f'<p class="dg-note">{text(finished.note)}.</p>' if finished.note else ""
    return (
        f'<div class="dg-details-card"><div class="dg-prompt">{_text(request.prompt or "")}</div>'
        f'<dl class="dg-facts">{cells}</dl><p class="dg-quiet">{text(stages)}</p>'
        f'<p class="dg-line">{text(finished.line)}</p>{note}</div>'
    )


def _and_asked(got: object, asked: int | None) -> object:
    """What a pipeline made of a number: a strength takes fewer steps, a video whole groups."""
    return got if got is None or asked in (None, got) else f"{got} (asked for {asked})"


def _text(words: str) -> str:
    """Escaped; a long text is cut to a few lines that open, so that the graphs stay in sight."""
    if len(words) <= _LONG:
        return text(words)
    return f'<details class="dg-long"><summary>{text(words)}</summary></details>'


def _lora(finished: Finished) -> str:
    model = finished.item.record.get("model")
    lora = model.get("lora") if isinstance(model, dict) else None
    return (
        ", ".join(str(item).rpartition("/")[2] for item in lora) if isinstance(lora, list) else ""
    )


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]
