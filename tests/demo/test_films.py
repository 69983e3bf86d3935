"""A film keeps its settings inside, whatever box stands before them, and plays as before."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import tiny
from demo_studio import a_form, run_job, studio_of
from PIL import Image

from dit_graphs.app.demo import films, work
from dit_graphs.app.demo.modes import Mode
from dit_graphs.app.demo.restoring import restore_form
from dit_graphs.pipelines.generate import InputError

RECORD = {"format": 1, "request": {"prompt": "ein rötliches Herz", "seed": 7}}
BOX = struct.pack(">I4s", 12, b"free") + b"\0" * 4
LONG_BOX = struct.pack(">I4sQ", 1, b"mdat", 20) + b"\0" * 4
OTHER_UUID = struct.pack(">I4s", 28, b"uuid") + b"\1" * 20


def never(path: str) -> bool:
    return False


@pytest.mark.parametrize("boxes", [BOX, LONG_BOX, BOX + LONG_BOX, OTHER_UUID + BOX])
def test_a_record_is_found_behind_any_box(tmp_path: Path, boxes: bytes) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(boxes)
    assert films.record_text(path) == ""
    films.stamp(path, RECORD)
    assert path.read_bytes().startswith(boxes)
    assert "ein rötliches Herz" in films.record_text(path)
    again = tmp_path / "b.mp4"
    again.write_bytes(boxes)
    films.stamp(again, RECORD)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "data",
    [
        b"no film",
        b"no film, and longer",
        struct.pack(">I4s", 4, b"free"),  # shorter than its own head: it would never end
        struct.pack(">I4s", 1, b"free") + b"\0" * 3,
        struct.pack(">I4sQ", 1, b"mdat", 2**63) + b"\0" * 4,
        BOX * 10_001,
    ],
)
def test_a_broken_film_is_an_error_in_words(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(data)
    with pytest.raises(InputError, match="no MP4 that can be read"):
        films.record_text(path)


def test_a_record_that_is_no_record_is_refused(tmp_path: Path) -> None:
    with studio_of() as studio:
        for record, words in (({"x": 1}, "holds no record"), ({"y": "z" * 2**20}, "damaged")):
            path = tmp_path / "a.mp4"
            path.write_bytes(BOX)
            films.stamp(path, record)
            with pytest.raises(InputError, match=words):
                restore_form(path, studio, never)
        path.write_bytes(BOX)
        with pytest.raises(InputError, match="holds no record"):
            restore_form(path, studio, never)


@pytest.mark.parametrize("keeps_output", [False, True])
def test_a_downloaded_film_plays_and_restores_its_settings(
    tmp_path: Path, keeps_output: bool
) -> None:
    imageio = pytest.importorskip("imageio.v3")
    form = a_form(
        mode=Mode.VIDEO,
        num_frames=5,
        fps=8,
        steps=2,
        negative_prompt="blue",
        extra='{"max_sequence_length": 32}',
    )
    output = tmp_path if keeps_output else None
    with studio_of(pipe=tiny.build("wan"), output=output) as studio:
        job = run_job(studio, lambda job: work.generate(studio, form, job))
        item = job.results[0].item  # type: ignore[attr-defined]
        (path,) = item.files
        shown = studio.publish(path, item.record)
        assert shown.parent.is_relative_to(studio.shown)
        assert studio.publish(path, item.record) == shown  # shown again, stamped once
        assert shown.read_bytes().startswith(path.read_bytes())
        frames = imageio.imread(shown)
        assert len(frames) == 5
        assert Image.fromarray(frames[0]).size == (64, 64)
        restored = restore_form(shown, studio, never)
    assert restored.notes == ()
    assert (restored.form.mode, restored.form.prompt) == (Mode.VIDEO, "a red heart")
    assert (restored.form.num_frames, restored.form.fps) == (5, 8)
    assert (restored.form.seed, restored.form.negative_prompt) == (7, "blue")
