"""What a server keeps of the pictures it made: few bytes per page, and no file for ever."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from demo_studio import EXTRA, a_form, studio_of
from PIL import Image

pytest.importorskip("gradio")

from dit_graphs.app.demo import films, history, launch, work
from dit_graphs.app.demo.handlers import Handlers
from dit_graphs.app.demo.layout import FIELDS
from dit_graphs.app.demo.studio import KEPT_SECONDS, Studio


class _Request:
    session_hash = "a page"


def _drawn(studio: Studio, before: list[object], **fields: object) -> list[object]:
    """The history of a page after one more run."""
    given = {"prompt": "a red heart", "width": 64, "height": 64, "steps": 2, "guidance": 2.0}
    given |= {"count": 1, "seed": "7", "extra": EXTRA, **fields}
    values = ["text", *(given.get(name, None) for name in FIELDS)]

    async def last() -> tuple[object, ...]:
        run = Handlers(studio).generate(_Request(), before, *values)  # type: ignore[arg-type]
        return [update async for update in run][-1]

    return asyncio.run(last())[-1]  # type: ignore[return-value]


def _held(root: object) -> list[object]:
    """Every object that `root` keeps alive, classes and modules aside."""
    seen: dict[int, object] = {}
    waiting = [root]
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, type) or hasattr(found, "__path__"):
            continue
        seen[id(found)] = found
        waiting += gc.get_referents(found)
    return list(seen.values())


def test_a_page_keeps_its_pictures_as_files_and_no_pixels() -> None:
    with studio_of() as studio:
        kept = _drawn(studio, [], count=2)
        kept = _drawn(studio, kept, seed="9")
        assert [entry.seed for entry in kept] == [9, 7, 8]  # type: ignore[attr-defined]
        assert all(entry.path.is_file() for entry in kept)  # type: ignore[attr-defined]
        assert not [thing for thing in _held(kept) if isinstance(thing, Image.Image)]


def test_a_file_older_than_any_page_is_removed_and_its_page_goes_on(tmp_path: Path) -> None:
    """With --output the folder that was asked for keeps everything; only copies go."""
    assert history.SECONDS * history._MAX_ENTRIES <= KEPT_SECONDS
    for output in (None, tmp_path):
        with studio_of(output=output) as studio:
            first = _drawn(studio, [])
            (old,) = (entry.path for entry in first)  # type: ignore[attr-defined]
            long_ago = time.time() - KEPT_SECONDS - 60
            for path in studio.shown.iterdir():
                os.utime(path, (long_ago, long_ago))
            both = _drawn(studio, first, seed="8")
            assert not old.exists()
            assert [entry.seed for entry in both] == [8]  # type: ignore[attr-defined]
            details, download, _ = Handlers(studio)._details(first[0])  # type: ignore[arg-type]
            assert "a red heart" in str(details)
            assert download["visible"] is False  # type: ignore[index]
    assert len(list(tmp_path.glob("*.png"))) == 2


def test_a_copy_that_fails_is_not_shown_as_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, record: object) -> None:
        raise OSError(28, "No space left on device")

    film = tmp_path / "a.mp4"
    film.write_bytes(b"film")
    monkeypatch.setattr(films, "stamp", full)
    with studio_of() as studio:
        with pytest.raises(OSError, match="No space left"):
            studio.publish(film, {"format": 1})
        monkeypatch.undo()
        shown = studio.publish(film, {"format": 1})
        film.write_bytes(b"another film of that name")
        assert shown.read_bytes().startswith(b"film")
        assert studio.publish(film, {"format": 1}).read_bytes().startswith(b"another film")


def test_a_port_that_is_taken_leaves_no_folder_behind() -> None:
    with studio_of() as studio, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="port"):
            launch(studio, port=taken.getsockname()[1])
        assert not studio.shown.exists()


def test_a_server_that_is_told_to_end_ends_its_run_and_its_folder() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with studio_of() as studio:
        job = studio.queue.submit(lambda job: work.generate(studio, a_form(steps=150), job))
        while job.progress.step < 1:
            time.sleep(0.005)
        timer = threading.Timer(3, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        try:
            launch(studio)
        finally:
            timer.join()
            signal.signal(signal.SIGTERM, handler)
        assert job.is_finished
        assert not studio.shown.exists()
