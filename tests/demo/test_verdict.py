"""What is said of a run: never graphs where none served it, and why not, in words."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import tiny
import torch
from demo_studio import EXTRA, a_form, run_job, studio_of
from PIL import Image

pytest.importorskip("gradio")

from dit_graphs import GraphConfig
from dit_graphs.app.demo import work
from dit_graphs.app.demo.compare import Comparison, compare
from dit_graphs.app.demo.compare_view import comparison_html
from dit_graphs.app.demo.handlers import Handlers
from dit_graphs.app.demo.layout import FIELDS
from dit_graphs.app.demo.modes import Mode
from dit_graphs.app.demo.stage import details_html
from dit_graphs.app.demo.studio import Studio
from dit_graphs.app.demo.verdict import source_of, use_line
from dit_graphs.pipelines.generate.usage import GraphUse

PLAIN = [GraphConfig(), GraphConfig(backend="off")]  # on a CPU both are plain eager


class _Request:
    session_hash = "a page"


def _values(**fields: object) -> list[object]:
    given = {"mode": "text", "prompt": "a red heart", "width": 64, "height": 64, "steps": 2}
    given |= {"seed": "7", "count": 1, "extra": EXTRA, **fields}
    return [given.get(name) for name in ("mode", *FIELDS)]


def _comparison(studio: Studio, **fields: object) -> Comparison:
    job = run_job(studio, lambda job: compare(studio, a_form(**fields), job))
    (comparison,) = job.results
    assert isinstance(comparison, Comparison)
    return comparison


def test_where_the_calls_came_from() -> None:
    assert source_of(GraphUse(replays=3)) == "graph"
    assert source_of(GraphUse(replays=3, eager_calls=1)) == "mixed"
    assert source_of(GraphUse(eager_calls=1)) == "eager"


def test_without_a_gpu_no_line_speaks_of_cuda_graphs() -> None:
    plain = GraphUse(eager_calls=11, reasons={"no_cuda": 11})
    line = use_line(plain, torch.device("cpu"))
    assert line.startswith("0 of 11 calls from a graph: the module is not on a CUDA device")
    assert use_line(plain, torch.device("cuda")) == plain.line(torch.device("cuda"))
    recorded = GraphUse(replays=9, eager_calls=2, reasons={"warming_up": 2})
    assert use_line(recorded, torch.device("cpu")) == recorded.line(torch.device("cpu"))


@pytest.mark.parametrize("config", PLAIN, ids=["no CUDA", "off"])
def test_two_plain_runs_are_not_called_a_comparison(config: GraphConfig) -> None:
    with studio_of(config=config) as studio:
        comparison = _comparison(studio, steps=2)
    assert comparison.is_equal
    assert not comparison.uses_graphs
    page = comparison_html(comparison, "cpu")
    assert "Nothing to compare." in page
    assert "No graph was used" in page
    for wrong in ("Same pixels.", "With graphs", "CPU recorder", 'class="dg-graph"', "cuda graph"):
        assert wrong not in page, wrong
    assert "as fast as" not in comparison_html(comparison, "cuda")


def test_a_comparison_colours_each_run_by_what_served_it() -> None:
    with studio_of() as studio:
        first = comparison_html(_comparison(studio), "cpu")
        second = comparison_html(_comparison(studio), "cpu")
    assert first.index('class="dg-eager"') < first.index('class="dg-mixed"')
    assert "Same pixels." in first
    assert 'class="dg-mixed"' not in second  # its first run had nothing left to learn
    assert second.count('class="dg-graph"') == 2


@pytest.mark.parametrize("config", PLAIN, ids=["no CUDA", "off"])
def test_a_warm_up_that_cannot_capture_says_why(config: GraphConfig) -> None:
    async def said(studio: Studio) -> str:
        page = Handlers(studio)
        updates = [u async for u in page.warm_up(_Request(), [], "64x64", *_values())]  # type: ignore[arg-type]
        return str(updates[-1][0])

    with studio_of(config=config) as studio:
        words = asyncio.run(said(studio))
    assert "Nothing to capture: " in words
    assert ("no CUDA device" if config.backend == "auto" else "graphs are off") in words


def test_numbers_the_pipeline_changed_are_shown_beside_what_was_asked(tmp_path: Path) -> None:
    film = {"mode": Mode.VIDEO, "num_frames": 6, "extra": '{"max_sequence_length": 32}'}
    with studio_of(pipe=tiny.build("wan")) as studio:
        form = a_form(steps=2, **film)
        job = run_job(studio, lambda job: work.generate(studio, form, job))
        assert "5 (asked for 6)" in details_html(job.results[0])  # type: ignore[arg-type]
    path = tmp_path / "a.png"
    Image.new("RGB", (64, 64), "teal").save(path)
    with studio_of() as studio:
        form = a_form(mode=Mode.IMAGE, images=(str(path),), strength=0.5, steps=4)
        job = run_job(studio, lambda job: work.generate(studio, form, job))
        assert "2 (asked for 4)" in details_html(job.results[0])  # type: ignore[arg-type]


def test_a_long_prompt_is_cut_to_lines_that_open_and_a_short_one_is_not() -> None:
    with studio_of() as studio:
        for prompt, is_long in (("a red <b>heart</b>", False), ("a red <b>heart</b> " * 20, True)):
            form = a_form(prompt=prompt, steps=1)
            job = run_job(studio, lambda job, form=form: work.generate(studio, form, job))
            page = details_html(job.results[0])  # type: ignore[arg-type]
            assert ('<details class="dg-long">' in page) == is_long
            assert page.count("&lt;b&gt;heart") == (20 if is_long else 1)
            assert "<b>" not in page


def test_a_second_picture_that_breaks_the_pipeline_is_named_as_a_suspect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*args: object, **kwargs: object) -> object:
        raise RuntimeError("Shape '[1, 4, 52]' is invalid for input of size 7")

    paths = [tmp_path / "0.png", tmp_path / "1.png"]
    for path in paths:
        Image.new("RGB", (64, 64), "orange").save(path)

    async def said(studio: Studio, **pictures: object) -> str:
        run = Handlers(studio).generate(_Request(), [], *_values(mode="edit", **pictures))  # type: ignore[arg-type]
        return str([update async for update in run][-1][0])

    with studio_of(pipe=tiny.build("flux2-klein")) as studio:
        monkeypatch.setattr(studio.pipe.transformer, "forward", refuses)
        extra = '{"max_sequence_length": 64, "text_encoder_out_layers": [1, 2, 3]}'
        one = asyncio.run(said(studio, image=str(paths[0]), extra=extra))
        two = asyncio.run(said(studio, image=str(paths[0]), image_2=str(paths[1]), extra=extra))
    assert "is invalid for input" in one
    assert "without the second" not in one
    assert "is invalid for input" in two
    assert "try it without the second" in two
