"""Generate, stop, restore, errors, two tabs at once: what people do, in a real browser."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from PIL import Image

from dit_graphs.pipelines import disabled
from dit_graphs.pipelines.generate import GenerateRequest, generate_items, read_record

if TYPE_CHECKING:
    from demo_page import DemoPage

    from dit_graphs.app.demo.studio import Studio

pytestmark = pytest.mark.browser


def plain_picture(studio: Studio, **fields: object) -> Image.Image:
    """What the unmodified pipeline draws. Only while the line is empty."""
    assert len(studio.queue) == 0
    request = GenerateRequest(**fields)  # type: ignore[arg-type]
    with disabled(studio.pipe):
        (item,) = generate_items(studio.pipeline_for(studio.plans[0]), request)
    return item.media[0].frames[0]


def test_a_picture_with_its_parameters_its_timeline_and_its_file(
    page: DemoPage, studio: Studio, tmp_path: Path
) -> None:
    details = page.generate(prompt="a red heart", seed=7, steps=6)
    for words in ("a red heart", "seed\n7", "size\n128×128", "steps\n6"):
        assert words in details
    assert page.find("#dg-gallery img") is not None
    bars = page.script("return document.querySelectorAll('#dg-graphs-panel .dg-bar').length")
    assert bars == 8  # encode, six steps, decode
    panel = page.find("#dg-graphs-panel")
    assert panel is not None
    for words in ("no GPU: busy/idle not measured", "no CUDA graphs, no speed-up", "denoiser"):
        assert words in panel.text
    assert "cuda graph" not in panel.text.lower().replace("no cuda graphs", "")
    path = tmp_path / "a.png"
    path.write_bytes(page.download())
    assert read_record(path)["request"]["seed"] == 7  # type: ignore[index,call-overload]
    plain = plain_picture(studio, prompt="a red heart", seed=7, num_inference_steps=6)
    assert Image.open(path).tobytes() == plain.tobytes()


def test_progress_counts_steps_and_shows_a_preview(page: DemoPage) -> None:
    page.fill(prompt="a cat", seed=1, steps=30)
    page.press("run")
    first = page.wait(lambda: page.step)
    page.wait(lambda: page.find("img.dg-preview"))
    second = page.wait(lambda: page.step if page.step > first else 0)
    assert 0 < first < second <= 30
    page.finished()


def test_stop_ends_the_work_within_two_steps_and_the_next_picture_is_right(
    page: DemoPage, studio: Studio
) -> None:
    page.fill(prompt="a red heart", seed=7, steps=200)
    page.press("run")
    page.wait(lambda: page.step >= 5)
    (job,) = [studio.queue._running]
    assert job is not None
    page.press("stop")
    page.wait(lambda: job.is_stopping)
    at_stop = job.progress.step
    page.wait(lambda: "Stopped after step" in page.stage)
    stopped_after = int(re.search(r"after step (\d+) of 200", page.stage)[1])  # type: ignore[index]
    assert stopped_after <= at_stop + 2
    assert stopped_after < 200
    assert len(studio.queue) == 0
    page.generate(steps=4)
    shown = Image.open(io.BytesIO(page.download()))
    plain = plain_picture(studio, prompt="a red heart", seed=7, num_inference_steps=4)
    assert shown.tobytes() == plain.tobytes()


def test_several_pictures_can_be_looked_at_one_by_one(page: DemoPage) -> None:
    details = page.generate(prompt="a fish", seed=20, steps=2, count=3)
    assert "seed\n20" in details
    thumbs = "#dg-gallery .thumbnail-item"
    page.wait(lambda: page.script(f"return document.querySelectorAll('{thumbs}').length") >= 3)
    page.script("document.querySelectorAll('#dg-gallery .thumbnail-small')[2].click()")
    page.wait(lambda: "seed\n22" in page.find(".dg-details-card").text)  # type: ignore[union-attr]


def test_a_dropped_picture_restores_the_settings_that_made_it(
    page: DemoPage, tmp_path: Path
) -> None:
    page.generate(prompt="a blue boat", seed=99, steps=3, guidance=1.5, negative="red")
    path = tmp_path / "boat.png"
    path.write_bytes(page.download())
    page.open()
    assert page.value("prompt") == ""
    page.drop("#dg-restore .upload-container", path)
    page.wait(lambda: "Settings restored." in page.text)
    for name, value in {
        "prompt": "a blue boat",
        "seed": "99",
        "steps": "3",
        "guidance": "1.5",
        "negative": "red",
        "width": "128",
    }.items():
        assert page.value(name) == value, name
    page.press("run")
    page.finished()
    assert page.download() == path.read_bytes()


def test_a_file_dropped_beside_the_fields_restores_and_never_replaces_the_page(
    page: DemoPage, tmp_path: Path
) -> None:
    page.generate(prompt="a blue boat", seed=99, steps=2)
    path = tmp_path / "boat.png"
    path.write_bytes(page.download())
    page.open()
    page.script(
        "window.kept = [];"
        "for (const kind of ['dragover', 'drop'])"
        "  addEventListener(kind, (event) => window.kept.push(event.defaultPrevented))"
    )
    page.drop("#dg-stage", path)
    page.wait(lambda: "Settings restored." in page.text)
    assert page.value("prompt") == "a blue boat"
    assert page.script("return window.kept") == [True, True]
    # over a picture that is there already it changes nothing, and the page stays
    page.go_to("Image to image")
    page.drop("#dg-image .upload-container", path)
    page.wait(lambda: page.find("#dg-image img"))
    page.fill(prompt="another")
    page.drop("#dg-image img", path)
    assert page.script("return window.kept.slice(-2)") == [True, True]
    assert page.value("prompt") == "another"


def test_a_long_prompt_leaves_the_graphs_in_sight(page: DemoPage) -> None:
    prompt = "a red heart and " * 60
    page.script(
        "const field = document.querySelector('#dg-prompt textarea'); field.value = arguments[0];"
        "field.dispatchEvent(new Event('input', {bubbles: true}))",
        prompt,
    )
    page.fill(seed=7, steps=2)
    page.press("run")
    page.finished()
    height = "return document.querySelector('.dg-prompt').getBoundingClientRect().height"
    closed = page.script(height)
    assert closed < 130
    assert page.serious_violations() == []
    page.find(".dg-prompt summary").click()  # type: ignore[union-attr]
    assert page.script(height) > 3 * closed


def test_a_picture_from_elsewhere_is_refused_in_words(page: DemoPage, tmp_path: Path) -> None:
    path = tmp_path / "other.png"
    Image.new("RGB", (8, 8)).save(path)
    page.drop("#dg-restore .upload-container", path)
    page.wait(lambda: "holds no record of dit-graphs" in page.alert)


def test_two_tabs_at_once_get_their_own_pictures(page: DemoPage, studio: Studio) -> None:
    page.fill(prompt="a red heart", seed=7, steps=24)
    other = page.open_tab()
    other.fill(prompt="a blue boat", seed=8, steps=5)
    page.show()
    page.press("run")
    page.wait(lambda: page.step)
    other.show()
    other.press("run")
    other.wait(lambda: "In line" in other.stage)
    theirs = other.finished()
    theirs_file = other.download()
    page.show()
    mine = page.finished()
    mine_file = page.download()
    assert "a red heart" in mine
    assert "seed\n7" in mine
    assert "steps\n24" in mine
    assert "a blue boat" in theirs
    assert "seed\n8" in theirs
    assert "steps\n5" in theirs
    for data, prompt, seed, steps in (
        (mine_file, "a red heart", 7, 24),
        (theirs_file, "a blue boat", 8, 5),
    ):
        plain = plain_picture(studio, prompt=prompt, seed=seed, num_inference_steps=steps)
        assert Image.open(io.BytesIO(data)).tobytes() == plain.tobytes()


def test_a_closed_tab_leaves_the_line(page: DemoPage, studio: Studio) -> None:
    other = page.open_tab()
    other.fill(prompt="a red heart", steps=200)
    other.press("run")
    other.wait(lambda: other.step)
    page.chrome.close()
    page.show()
    page.wait(lambda: len(studio.queue) == 0, seconds=20)


def test_a_bad_size_is_explained_and_the_page_goes_on(page: DemoPage) -> None:
    page.fill(prompt="a red heart", seed=7, steps=2, width=130)
    page.press("run")
    page.wait(lambda: "Check “width”" in page.alert)
    assert "divisible by 16" in page.alert
    details = page.generate(width=128)
    assert "size\n128×128" in details
    assert page.alert == ""


def test_a_missing_prompt_and_a_wrong_lora_are_explained(page: DemoPage) -> None:
    page.press("run")
    page.wait(lambda: "Say what the picture should show" in page.alert)
    page.fill(prompt="a red heart")
    page.script("document.querySelector('#dg-lora-box button').click()")
    page.fill(lora="/nowhere/at/all.safetensors:0.5")
    page.press("run")
    page.wait(lambda: "Check “lora”" in page.alert)
    assert "No LoRA weights are offered here" in page.alert


def test_out_of_memory_is_a_sentence_and_the_next_picture_is_fine(
    page: DemoPage, studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(studio.pipe.transformer)
    forward = kind.forward

    def capped(self: object, x: list[torch.Tensor], *args: object, **kwargs: object) -> object:
        if x[0].shape[-1] > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return forward(self, x, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", capped)
    page.fill(prompt="a red heart", seed=7, steps=2, width=256, height=256)
    page.press("run")
    page.wait(lambda: "Out of memory" in page.alert)
    assert "smaller size" in page.alert
    details = page.generate(width=128, height=128)
    assert "size\n128×128" in details


def test_image_to_image_starts_from_the_dropped_picture(page: DemoPage, tmp_path: Path) -> None:
    path = tmp_path / "start.png"
    Image.new("RGB", (201, 140), "teal").save(path)
    page.go_to("Image to image")
    page.fill(prompt="a red heart", seed=7, steps=4)
    page.press("run")
    page.wait(lambda: "expected a picture" in page.alert.lower())
    page.drop("#dg-image .upload-container", path)
    page.wait(lambda: page.find("#dg-image img"))
    page.press("run")
    details = page.finished()
    assert "strength\n0.6" in details


def test_a_file_that_is_no_picture_is_explained(page: DemoPage, tmp_path: Path) -> None:
    path = tmp_path / "words.png"
    path.write_bytes(b"no picture at all")
    page.go_to("Image to image")
    page.fill(prompt="a red heart")
    page.drop("#dg-image .upload-container", path)
    page.wait(lambda: page.find("#dg-image img"))
    page.press("run")
    toast = page.wait(lambda: page.find(".toast-body"))
    page.wait(lambda: "Expected a picture that can be read" in toast.text)
    assert "Check “image”" in toast.text
    for _ in range(2):
        assert page.serious_violations() == []
        page.script("document.querySelector('#dg-theme').click()")  # the message lies over it


def test_a_page_opened_later_shows_the_graphs_there_are(page: DemoPage) -> None:
    page.generate(prompt="a red heart", seed=7, steps=4)
    page.open()
    panel = page.wait(lambda: page.find("#dg-graphs-panel"))
    page.wait(lambda: "latent 16×16" in page.find("#dg-graphs-panel").text)  # type: ignore[union-attr]
    assert "0 graphs" not in panel.text


def test_a_prompt_grows_while_it_is_written(page: DemoPage, studio: Studio) -> None:
    assert studio.can_rewrite
    page.fill(prompt="a cat", seed=3)
    page.press("rewrite")
    page.wait(lambda: "Writing a longer prompt" in page.text)
    page.wait(lambda: page.value("prompt") not in ("", "a cat"))
    page.wait(lambda: "Writing a longer prompt" not in page.text)
    assert page.value("prompt") != "a cat"
    assert page.alert == ""


def test_everything_can_be_done_with_the_keyboard_alone(page: DemoPage) -> None:
    from selenium.webdriver import ActionChains, Keys

    def focused() -> str:
        code = "return document.activeElement.closest('[id^=dg-]')?.id || ''"
        return str(page.script(code))

    def tab_to(target: str) -> None:
        for _ in range(40):
            ActionChains(page.chrome).send_keys(Keys.TAB).perform()
            if focused() == target:
                outline = page.script(
                    "return getComputedStyle(document.activeElement).outlineStyle"
                )
                border = page.script("return getComputedStyle(document.activeElement).boxShadow")
                assert outline != "none" or border != "none", f"{target}: the focus is not seen"
                return
        raise AssertionError(f"{target} is not reached by Tab")

    tab_to("dg-prompt")
    ActionChains(page.chrome).send_keys("a red heart").perform()
    tab_to("dg-run")
    ActionChains(page.chrome).send_keys(Keys.ENTER).perform()
    page.finished()
    tab_to("dg-download")
    tab_to("dg-reuse")
    ActionChains(page.chrome).send_keys(Keys.ENTER).perform()
    page.wait(lambda: "Settings restored." in page.text)
