"""What a page is told while its job runs: the Graphs panel grows, and Stop ends a rewrite."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from demo_studio import EXTRA, studio_of
from PIL import Image

pytest.importorskip("gradio")

from dit_graphs.app.demo import compare_view, stage
from dit_graphs.app.demo import handlers as handlers_module
from dit_graphs.app.demo.handlers import Handlers
from dit_graphs.app.demo.layout import FIELDS
from dit_graphs.app.demo.rewriting import _Listener


class _Request:
    session_hash = "a page"


def _values(**fields: object) -> list[object]:
    given = {"prompt": "a red heart", "width": 64, "height": 64, "steps": 6, "guidance": 2.0}
    given |= {"seed": "7", "count": 1, "extra": EXTRA, **fields}
    texts = ("negative_prompt", "lora")
    return ["text", *(given.get(name, "" if name in texts else None) for name in FIELDS)]


def test_the_graphs_panel_grows_while_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers_module, "_PANEL_SECONDS", 0.0)
    monkeypatch.setattr(handlers_module, "_POLL_SECONDS", 0.001)

    async def panels(studio: object) -> list[str]:
        run = Handlers(studio).generate(_Request(), [], *_values())  # type: ignore[arg-type]
        return [update[5] async for update in run if isinstance(update[5], str)]

    with studio_of() as studio:
        found = asyncio.run(panels(studio))
    *running, last = found
    bars = [page.count('class="dg-bar ') for page in running]
    assert len(bars) > 2
    assert bars == sorted(bars)
    assert all('data-state="running"' in page for page in running)
    assert 'data-state="still"' in last
    assert last.count('class="dg-bar ') == 8  # encode, six steps, decode


def test_stop_ends_a_rewrite_and_gives_the_prompt_back(monkeypatch: pytest.MonkeyPatch) -> None:
    put = _Listener.put

    def slow(self: _Listener, value: object) -> None:
        time.sleep(0.05)
        put(self, value)  # type: ignore[arg-type]

    monkeypatch.setattr(_Listener, "put", slow)

    async def stopped(studio: object) -> list[tuple[object, object]]:
        page = Handlers(studio)  # type: ignore[arg-type]
        found = []
        async for update in page.rewrite(_Request(), "a cat", "3"):  # type: ignore[arg-type]
            found.append(update)
            if isinstance(update[0], str) and len(found) < 8:
                page.stop(_Request())  # type: ignore[arg-type]
        return found

    with studio_of() as studio:
        started = time.monotonic()
        *_, last = asyncio.run(stopped(studio))
        assert time.monotonic() - started < 60
    assert last[0] == "a cat"
    assert "Stopped: the prompt is as it was." in str(last[1])


def test_no_page_waits_while_the_pictures_of_another_are_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every page shares one event loop, and a large picture takes a second."""
    drawn_in: list[str] = []

    def encoded(picture: Image.Image, *, is_small: bool = False) -> str:
        if not is_small or max(picture.size) > 96:
            drawn_in.append(threading.current_thread().name)
        return "data:,"

    for module in (compare_view, stage):
        monkeypatch.setattr(module, "data_uri", encoded)
    here = threading.current_thread().name

    async def followed(studio: object) -> list[tuple[object, ...]]:
        page, found = Handlers(studio), []  # type: ignore[arg-type]
        size = {"width": 128, "height": 128, "steps": 2}
        async for update in page.generate(_Request(), [], *_values(**size, count=2)):  # type: ignore[arg-type]
            found.append(update)
        async for compared in page.compare(_Request(), *_values(**size)):  # type: ignore[arg-type]
            found.append(compared)
        return found

    with studio_of() as studio:
        found = asyncio.run(followed(studio))
    assert any("Picture 1 is finished" in str(update[0]) for update in found)
    assert len(drawn_in) == 3
    assert here not in drawn_in
