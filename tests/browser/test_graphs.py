"""Compare, fault injection, warm-up, and axe in light and dark."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from PIL import Image

import dit_graphs
from dit_graphs import GraphConfig
from dit_graphs.backends.recorded import RecordedRecording

if TYPE_CHECKING:
    from demo_page import DemoPage

    from dit_graphs.app.demo.studio import Studio

pytestmark = pytest.mark.browser


@pytest.fixture
def graphs_afterwards(studio: Studio) -> Iterator[None]:
    """Graphs that were found wrong are forgotten, so that later tests start with none."""
    yield
    dit_graphs.restore(studio.pipe)
    dit_graphs.accelerate(studio.pipe, GraphConfig(backend="recorded"))


def _compare(page: DemoPage) -> None:
    page.press("compare-run")
    page.wait(lambda: page.find(".dg-compare") is None)
    page.wait(lambda: page.find(".dg-compare"))


def _difference_picture(page: DemoPage) -> Image.Image:
    source = page.script(
        "return document.querySelector('.dg-compare img[alt=Difference]').getAttribute('src')"
    )
    return Image.open(io.BytesIO(base64.b64decode(str(source).partition(",")[2]))).convert("RGB")


def _red_pixels(picture: Image.Image) -> int:
    colours = picture.getcolors(1 << 20)
    assert colours is not None
    return sum(n for n, (r, g, b) in colours if r > g + 60 and r > b + 60)  # type: ignore[misc]


def test_compare_shows_equal_pictures_and_a_wrong_graph_in_red(
    page: DemoPage, monkeypatch: pytest.MonkeyPatch, graphs_afterwards: None
) -> None:
    page.fill(prompt="a red heart", seed=7, steps=4)
    page.go_to("Compare")
    _compare(page)
    assert "Same pixels." in page.find(".dg-compare").text  # type: ignore[union-attr]
    assert _red_pixels(_difference_picture(page)) == 0
    words = page.find(".dg-times").text  # type: ignore[union-attr]
    assert "plain eager" in words
    assert "graphs, timed run" in words
    assert "No GPU here" in page.text

    replay = RecordedRecording.replay

    def wrong(self: RecordedRecording[object]) -> None:
        replay(self)
        for tensor in torch.utils._pytree.tree_leaves(self.output):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.add_(0.25)

    # The graphs were proven equal by now: from here on they are deliberately wrong.
    monkeypatch.setattr(RecordedRecording, "replay", wrong)
    _compare(page)
    assert "Not the same picture." in page.alert
    assert _red_pixels(_difference_picture(page)) > 0


def test_warm_up_captures_what_the_first_picture_then_replays(page: DemoPage) -> None:
    page.fill(prompt="a red heart", seed=7, steps=4)
    page.go_to("Warm up")
    page.fill(sizes="96x160, 12")
    page.press("warm-run")
    page.wait(lambda: "Check “sizes”" in page.alert)
    page.fill(sizes="96x160")
    page.press("warm-run")
    page.wait(lambda: "Captured" in page.find("#dg-warmed").text)  # type: ignore[union-attr]
    assert "latent 20×12" in page.find("#dg-graphs-panel").text  # type: ignore[union-attr]
    page.go_to("Pictures")
    page.generate(width=96, height=160)
    titles = page.script(
        "return [...document.querySelectorAll('#dg-graphs-panel .dg-bar')].map((bar) => bar.title)"
    )
    steps = [title for title in titles if title.startswith("step ")]
    assert len(steps) == 4
    assert all("denoiser: 1 from graphs" in title for title in steps), steps


def test_a_telephone_shows_everything_in_its_width(page: DemoPage) -> None:
    size = {"width": 375, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page.open()
        page.generate(prompt="a red heart", seed=7, steps=12)
        assert page.script("return document.documentElement.scrollWidth") == 375
        labels = page.script(
            "return [...document.querySelectorAll('.dg-axis span, .dg-bar b')].map((one) => {"
            "const box = one.getBoundingClientRect(); "
            "const bar = one.closest('.dg-bar')?.getBoundingClientRect();"
            "return [one.className, box.left, box.right, bar?.left ?? 0, bar?.right ?? 375];"
            "}).filter((one) => one[1] < one[2])"
        )
        stages = [one for one in labels if one[0] == "dg-stage-name"]
        assert all(left >= start and right <= end for _, left, right, start, end in stages), stages
        ticks = [one for one in labels if one[4] == 375]
        assert len(ticks) >= 2
        for (_, _, right, *_), (_, left, *_) in itertools.pairwise(ticks):
            assert right < left
        reasons = page.script(
            "return [...document.querySelectorAll('.dg-columns .dg-reason')].map("
            "(one) => one.getBoundingClientRect()).map((box) => [box.left, box.right])"
        )
        assert reasons
        assert all(0 <= left < right <= 375 for left, right in reasons), reasons
        page.go_to("Compare")
        _compare(page)
        assert page.script("return document.documentElement.scrollWidth") == 375
        lines = "return [...document.querySelectorAll('.dg-time .dg-quiet')]"
        widths = page.script(f"{lines}.map((one) => one.getBoundingClientRect().width)")
        assert len(widths) == 3
        assert min(widths) > 200
        assert page.serious_violations() == []
    finally:
        page.chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_axe_finds_nothing_serious_in_light_and_dark(page: DemoPage) -> None:
    found: dict[str, list[str]] = {}

    def look(name: str) -> None:
        for theme in ("light", "dark"):
            page.press("theme")
            is_dark = page.script("return document.body.classList.contains('dark')")
            found[f"{name}, {'dark' if is_dark else 'light'}"] = page.serious_violations()
            assert theme in ("light", "dark")

    look("empty page")
    page.press("run")
    page.wait(lambda: page.alert)
    look("an error")
    page.generate(prompt="a red heart", seed=7, steps=3, count=2)
    page.script("for (const item of document.querySelectorAll('details')) item.open = true")
    look("pictures")
    page.go_to("Image to image")
    look("image to image")
    page.go_to("Text to image")
    page.go_to("Compare")
    _compare(page)
    look("a comparison")
    page.go_to("Warm up")
    look("warm-up")
    assert len(found) == 12
    assert {name: rules for name, rules in found.items() if rules} == {}
