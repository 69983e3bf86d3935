"""Owns the page's fields as values: from the fields to a form, from a form back to the fields.

Must never run the pipeline. The surprising fact: the order of `FIELDS` is the contract between the
layout and the events; both are made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import gradio as gr

from dit_graphs.pipelines.generate import InputError

from .form import Form
from .layout import FIELDS, Parts
from .markup import text
from .modes import Mode
from .problems import problem_of
from .restoring import restore_form
from .stage import error_html, status_html
from .starting import start_form
from .studio import Studio
from .uploads import is_upload

__all__ = ["Filler", "form_of", "seed_of"]

_MAX_DIGITS = 19
_NUMBERS = ("width", "height", "num_frames", "fps", "steps", "guidance", "count", "strength")


def form_of(values: Sequence[object]) -> Form:
    """The form of (mode, *FIELDS) as the page sent them. Raises `InputError`."""
    given = dict(zip(("mode", *FIELDS), values, strict=True))
    pictures = [given[name] for name in ("image", "image_2") if given[name]]
    return Form(
        mode=Mode(str(given["mode"])),
        prompt=_text(given["prompt"]),
        negative_prompt=_text(given["negative_prompt"]),
        width=_number("width", given["width"]),
        height=_number("height", given["height"]),
        num_frames=_number("num_frames", given["num_frames"]),
        steps=_number("steps", given["steps"]),
        guidance=_number("guidance", given["guidance"]),
        seed=seed_of(given["seed"]),
        count=_number("count", given["count"]),
        images=tuple(str(path) for path in pictures),
        mask=_text(given["mask"]) or None,
        strength=_number("strength", given["strength"]),
        lora=_text(given["lora"]),
        extra=_text(given["extra"]),
        fps=_number("fps", given["fps"]),
    )


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _number(name: str, value: object) -> float | None:
    if value in (None, ""):
        return None
    try:
        return float(cast(float, value))
    except (TypeError, ValueError, OverflowError):
        raise InputError(name, f"expected a number, got {str(value)[:40]!r}") from None


def seed_of(value: object) -> int | None:
    """The seed as it was typed, None where it was left open. Raises `InputError`.

    It is text on the page, because an empty number would be 0.
    """
    words = _text(value).strip()
    if words and not (words.isdecimal() and len(words) <= _MAX_DIGITS):
        raise InputError("seed", f"expected a whole number ≥ 0, or nothing, got {words[:40]!r}")
    return int(words) if words else None


class Filler:
    """The events that only change fields, bound to one studio and its page."""

    def __init__(self, studio: Studio, parts: Parts) -> None:
        self.studio = studio
        self.parts = parts

    @property
    def outputs(self) -> list[object]:
        """What `restore` fills, in order."""
        fields = [self.parts.fields[name] for name in FIELDS]
        zone = self.parts["restore"]
        return [self.parts["mode"], *fields, *self.mode_outputs, zone, self.parts["restored"]]

    @property
    def mode_outputs(self) -> list[object]:
        """What a mode shows or hides, in order."""
        names = ("inputs", "image_2", "mask", "negative_prompt", "modes")
        return [self.parts[name] for name in names]

    def restore(self, path: str | None) -> list[object]:
        """Every field as it was when the file was made, or why not."""
        keep = [gr.skip()] * (len(self.outputs) - 2)
        if not path:
            return [*keep, None, ""]
        try:
            found = restore_form(Path(path), self.studio, is_upload)
        except InputError as error:
            return [*keep, None, error_html(problem_of(error))]
        form = found.form
        notes = "".join(f" Note: {text(note)}." for note in found.notes)
        words = status_html("Settings restored.") + (
            f'<p class="dg-note">{notes}</p>' * bool(notes)
        )
        shown = self._shown(form.mode, is_tab_moved=True)
        # None empties the drop zone: the next file can be dropped at once.
        values = _values(form, start_form(self.studio))
        return [form.mode.value, *values, *shown, None, words]

    def switch(self, mode: Mode) -> Callable[[], list[object]]:
        """A handler that shows what `mode` takes."""
        return lambda: [mode.value, *self._shown(mode, is_tab_moved=False)]

    def _shown(self, mode: Mode, *, is_tab_moved: bool) -> list[object]:
        plan = self.studio.plan(mode)
        return [
            gr.Column(visible=plan.takes_image),
            gr.Image(visible=mode is Mode.EDIT),
            gr.Image(visible=plan.needs_mask),
            gr.Textbox(visible="negative_prompt" in plan.takes),
            gr.Tabs(selected=mode.value) if is_tab_moved else gr.skip(),
        ]


def _values(form: Form, start: Form) -> list[object]:
    """What each field shows; a number the record left open is the one the pipeline took."""
    images = [*form.images, None, None]
    seed = "" if form.seed is None else str(int(form.seed))
    special = {"image": images[0], "image_2": images[1], "seed": seed}
    shown = {name: getattr(form, name) for name in FIELDS if name not in special} | special
    for name in _NUMBERS:
        if shown[name] is None:
            shown[name] = getattr(start, name)
    return [shown[name] for name in FIELDS]
