"""The tabs that the bundled model does not have: an edit and a video, of tiny models from a folder.

The models are saved here and loaded by their folder, as `dit-graphs demo --model DIR` does it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from dit_graphs.app.demo import films
from dit_graphs.pipelines import disabled
from dit_graphs.pipelines.generate import GenerateRequest, generate_items

if TYPE_CHECKING:
    from demo_page import DemoPage

    from dit_graphs.app.demo.studio import Studio

    Opener = Callable[[str], DemoPage]

pytestmark = pytest.mark.browser


@contextmanager
def served(family: str, folder: Path, defaults: dict[str, object]) -> Iterator[tuple[Studio, str]]:
    """(studio, address) of the tiny model of a family, saved to `folder` with its `defaults`."""
    import tiny
    from demo_page import studio_of_model

    from dit_graphs.app.demo import launch

    tiny.build(family).save_pretrained(folder)
    (folder / "dit_graphs.json").write_text(json.dumps(defaults), encoding="utf-8")
    studio = studio_of_model(folder)
    try:
        yield studio, launch(studio, is_blocking=False)
    finally:
        studio.close()


@pytest.fixture(scope="module")
def editor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Studio, str]]:
    """A model that edits pictures, and draws from words alone."""
    layers = {"max_sequence_length": 64, "text_encoder_out_layers": [1, 2, 3]}
    size = {"width": 64, "height": 64, "num_inference_steps": 4}
    with served("flux2-klein", tmp_path_factory.mktemp("editor"), layers | size) as editor:
        yield editor


@pytest.fixture(scope="module")
def filmer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Studio, str]]:
    """A model that makes videos."""
    defaults = {"max_sequence_length": 32, "width": 64, "height": 64, "num_frames": 9}
    with served("wan", tmp_path_factory.mktemp("filmer"), defaults) as filmer:
        yield filmer


def tabs(page: DemoPage) -> list[str]:
    """The titles of what the model can do, the chosen one with a star."""
    code = (
        "return [...document.querySelectorAll('#dg-modes [role=tab]')].map("
        "(tab) => tab.innerText.trim() + (tab.ariaSelected === 'true' ? '*' : ''))"
    )
    return list(dict.fromkeys(page.script(code)))


def look_for_violations(page: DemoPage) -> None:
    for _ in range(2):
        assert page.serious_violations() == []
        page.press("theme")


def test_an_edit_starts_from_the_dropped_picture_and_can_be_restored(
    open_page: Opener, editor: tuple[Studio, str], tmp_path: Path
) -> None:
    studio, address = editor
    page = open_page(address)
    assert tabs(page) == ["Text to image*", "Edit"]
    page.go_to("Edit")
    page.fill(prompt="make it red", seed=7)
    page.press("run")
    page.wait(lambda: "Expected a picture" in page.alert)
    path = tmp_path / "start.png"
    Image.new("RGB", (64, 64), "teal").save(path)
    page.drop("#dg-image .upload-container", path)
    page.wait(lambda: page.find("#dg-image img"))
    page.press("run")
    assert "size\n64×64" in page.finished()
    bars = page.script(
        "return [...document.querySelectorAll('#dg-graphs-panel .dg-bar')].map((bar) => bar.title)"
    )
    assert any("denoiser: 1 from graphs" in bar for bar in bars), bars
    request = GenerateRequest(prompt="make it red", seed=7, image=(str(path),))
    with disabled(studio.pipe):
        (plain,) = generate_items(studio.pipeline_for(studio.plans[1]), request)
    edited = page.download()
    assert Image.open(io.BytesIO(edited)).tobytes() == plain.media[0].frames[0].tobytes()
    look_for_violations(page)

    page.open()
    again = tmp_path / "again.png"
    again.write_bytes(edited)
    page.drop("#dg-restore .upload-container", again)
    page.wait(lambda: "Settings restored." in page.text)
    page.wait(lambda: tabs(page) == ["Text to image", "Edit*"])
    page.wait(lambda: page.find("#dg-image img"))
    assert page.value("prompt") == "make it red"
    page.press("run")
    page.finished()
    assert page.download() == edited

    # the second picture is a reference too: it changes what is drawn
    other = tmp_path / "other.png"
    Image.new("RGB", (64, 64), "orange").save(other)
    page.drop("#dg-image-2 .upload-container", other)
    page.wait(lambda: page.find("#dg-image-2 img"))
    page.press("run")
    page.wait(lambda: "Done: " not in page.stage)
    page.finished()
    assert page.download() != edited


def test_a_video_plays_and_its_file_restores_it(
    open_page: Opener, filmer: tuple[Studio, str], tmp_path: Path
) -> None:
    imageio = pytest.importorskip("imageio.v3")
    page = open_page(filmer[1])
    assert tabs(page) == ["Video*"]
    details = page_of_video(page, prompt="a red heart", negative="blue", seed=7, steps=4, frames=9)
    assert "frames\n9" in details
    played = page.chrome.execute_async_script(
        "const done = arguments[0], film = document.querySelector('#dg-gallery video');"
        "film.muted = true;"
        "film.onended = () => done([film.videoWidth, film.videoHeight, film.currentTime]);"
        "film.play().catch((error) => done([String(error)]));"
    )
    assert played[:2] == [64, 64], played
    assert played[2] > 0.4  # 9 frames at 16 a second
    path = tmp_path / "film.mp4"
    path.write_bytes(page.download())
    assert len(imageio.imread(path)) == 9
    assert json.loads(films.record_text(path))["request"]["seed"] == 7
    page.fill(prompt="something else", seed=8)
    page.press("reuse")
    page.wait(lambda: "Settings restored." in page.text)
    assert (page.value("prompt"), page.value("seed")) == ("a red heart", "7")
    look_for_violations(page)

    page.open()
    page.drop("#dg-restore .upload-container", path)
    page.wait(lambda: "Settings restored." in page.text)
    fields = ("prompt", "negative", "seed", "steps", "frames", "fps")
    assert [page.value(name) for name in fields] == ["a red heart", "blue", "7", "4", "9", "16"]
    page.press("run")
    page.wait(lambda: "Done: 1 video" in page.stage)
    assert page.download() == path.read_bytes()

    page.go_to("Compare")
    page.press("compare-run")
    page.wait(lambda: page.find(".dg-compare"))
    assert "Same pixels. 0 of 36,864" in page.text  # 9 frames of 64 × 64
    look_for_violations(page)


def page_of_video(page: DemoPage, **fields: object) -> str:
    """The parameters of a finished video."""
    page.fill(**fields)
    page.press("run")
    page.wait(lambda: "Done: 1 video" in page.stage)
    page.wait(lambda: page.script("return document.querySelector('#dg-gallery video')?.readyState"))
    return str(page.wait(lambda: page.find(".dg-details-card")).text)


def test_a_length_the_model_cannot_make_is_said(
    open_page: Opener, filmer: tuple[Studio, str]
) -> None:
    page = open_page(filmer[1])
    details = page_of_video(page, prompt="a red heart", seed=7, steps=2, frames=6)
    assert "frames\n5 (asked for 6)" in details
