"""Pictures, warm-ups and comparisons on a real, tiny pipeline through the studio and its line."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import diffusers
import pytest
import tiny
import torch
from demo_studio import a_form, run_job, studio_of
from PIL import Image

import dit_graphs
from dit_graphs import GraphConfig
from dit_graphs.app.demo import work
from dit_graphs.app.demo.compare import Comparison, compare
from dit_graphs.app.demo.compare_view import comparison_html
from dit_graphs.app.demo.graphs_panel import panel_html
from dit_graphs.app.demo.jobs import Job, JobState
from dit_graphs.app.demo.modes import Mode
from dit_graphs.app.demo.problems import problem_of
from dit_graphs.app.demo.restoring import restore_form
from dit_graphs.app.demo.stage import details_html
from dit_graphs.app.demo.studio import Studio
from dit_graphs.app.demo.work import Finished, Warmed
from dit_graphs.backends.recorded import RecordedRecording
from dit_graphs.pipelines.generate import InputError, read_record


def _pictures(job: Job) -> list[Finished]:
    return [result for result in job.results if isinstance(result, Finished)]


def _generate(studio: Studio, **fields: object) -> list[Finished]:
    form = a_form(**fields)
    return _pictures(run_job(studio, lambda job: work.generate(studio, form, job)))


def _pixels(finished: Finished) -> bytes:
    return finished.item.media[0].frames[0].tobytes()


def test_pictures_are_those_of_the_plain_pipeline_and_each_seed_is_its_own() -> None:
    with studio_of() as studio:
        first, second = _generate(studio, count=2)
        (alone,) = _generate(studio, seed=8)
        with dit_graphs.disabled(studio.pipe):
            (plain,) = _generate(studio, seed=8)
    assert (first.item.seed, second.item.seed) == (7, 8)
    assert _pixels(second) == _pixels(alone) == _pixels(plain)
    assert _pixels(first) != _pixels(second)


def test_the_timeline_has_a_span_per_stage_and_accounts_for_every_call() -> None:
    with studio_of() as studio:
        first, second = _generate(studio, count=2, steps=6)
        for finished in (first, second):
            stages = [span.stage for span in finished.trace.spans]
            assert stages == ["encode", *["step"] * 6, "decode"]
            ends = [0.0, *(span.end_ms for span in finished.trace.spans)]
            assert [span.start_ms for span in finished.trace.spans] == ends[:-1]
            use, calls = finished.item.graph_use, finished.trace.calls.values()
            assert sum(c.graph for c in calls) == use.replays
            assert sum(c.num_eager for c in calls) == use.eager_calls
            assert sum(c.captures for c in calls) == use.captures
        steps = [span.source for span in first.trace.spans if span.stage == "step"]
        assert steps[0] == "eager"
        assert steps[-1] == "graph"
        later = [span.source for span in second.trace.spans if span.stage == "step"]
        assert later == ["graph"] * 6


def test_a_file_carries_its_record(tmp_path: Path) -> None:
    with studio_of(output=tmp_path) as studio:
        (finished,) = _generate(studio)
        (path,) = finished.item.files
        assert path.parent == tmp_path
        assert read_record(path)["request"]["seed"] == 7  # type: ignore[index,call-overload]
        copy = studio.publish(path)
        assert copy.parent == studio.shown
        assert copy.read_bytes() == path.read_bytes()
        shown = studio.shown
    assert path.exists()
    assert not shown.exists()


def test_b69_stop_ends_the_run_within_two_steps_and_the_next_run_is_equal() -> None:
    with studio_of() as studio:
        (before,) = _generate(studio)
        form = a_form(steps=100)
        job = studio.queue.submit(lambda job: work.generate(studio, form, job))
        while job.progress.step < 5 and not job.is_finished:
            time.sleep(0.002)
        seen = job.progress.step
        studio.queue.stop(job)
        assert job.wait(30)
        assert job.state is JobState.STOPPED
        assert job.results == []
        assert job.progress.step <= seen + 2
        assert len(studio.queue) == 0
        (after,) = _generate(studio)
    assert _pixels(before) == _pixels(after)


def test_b71_two_pages_get_their_own_pictures_and_progress() -> None:
    with studio_of() as studio:
        forms = [a_form(prompt=f"picture {i}", seed=i, steps=2 + i) for i in range(4)]
        jobs = [
            studio.queue.submit(
                lambda job, form=form: work.generate(studio, form, job), session=form.prompt
            )
            for form in forms
        ]
        assert all(job.wait(120) for job in jobs)
        for form, job in zip(forms, jobs, strict=True):
            (finished,) = _pictures(job)
            assert finished.request.prompt == form.prompt
            assert finished.item.seed == form.seed
            assert job.progress.total == form.steps
            (alone,) = _generate(studio, prompt=form.prompt, seed=form.seed, steps=form.steps)
            assert _pixels(finished) == _pixels(alone)


def test_b65_calls_from_the_worker_use_graphs_warmed_up_elsewhere() -> None:
    with studio_of() as studio:
        arguments = {"prompt": "a red heart", "guidance_scale": 2.0, "max_sequence_length": 64}
        dit_graphs.warmup(studio.pipe, [{"height": 64, "width": 64, **arguments}])
        assert threading.current_thread() is threading.main_thread()
        (finished,) = _generate(studio)
        assert finished.trace.calls["denoiser"].captures == 0
        assert finished.trace.calls["denoiser"].graph >= 3


def test_b72_out_of_memory_is_a_sentence_and_the_next_request_is_fine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with studio_of() as studio:
        (before,) = _generate(studio)
        forward = type(studio.pipe.transformer).forward

        def capped(self: object, x: list[torch.Tensor], *args: object, **kwargs: object) -> object:
            if x[0].shape[-1] > 8:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
            return forward(self, x, *args, **kwargs)

        monkeypatch.setattr(type(studio.pipe.transformer), "forward", capped)
        form = a_form(width=256, height=256)
        job = studio.queue.submit(lambda job: work.generate(studio, form, job))
        assert job.wait(60)
        assert job.state is JobState.FAILED
        assert job.error is not None
        problem = problem_of(job.error, 5 << 20)
        assert problem.title == "Out of memory"
        assert "Graphs hold 5 MiB of it" in problem.text
        (after,) = _generate(studio)
    assert _pixels(before) == _pixels(after)


def test_a_size_the_pipeline_refuses_is_named() -> None:
    with studio_of() as studio, pytest.raises(InputError) as caught:
        _generate(studio, width=72)
    problem = problem_of(caught.value)
    assert problem.title == "Check “width”"
    assert "divisible by 16" in problem.text


def test_image_to_image_shares_the_graphs(tmp_path: Path) -> None:
    path = tmp_path / "start.png"
    with studio_of() as studio:
        (text,) = _generate(studio)
        text.item.media[0].frames[0].save(path)
        made = [
            _generate(studio, mode=Mode.IMAGE, images=(str(path),), strength=strength)[0]
            for strength in (0.5, 1.0)
        ]
        assert made[0].item.record["pipeline"] == "ZImageImg2ImgPipeline"
        assert made[0].item.num_steps == 2  # half of four
        assert made[1].trace.calls["denoiser"].captures == 0
        assert _pixels(made[0]) != _pixels(made[1])


def test_a_masked_part_is_drawn_anew_and_the_rest_stays(tmp_path: Path) -> None:
    """A pipeline that draws only what is white in the mask, and its settings come back with it."""
    components = tiny.build("z-image").components
    path, mask = tmp_path / "a.png", tmp_path / "mask.png"
    Image.new("RGB", (64, 64), "teal").save(path)
    with studio_of(pipe=diffusers.ZImageInpaintPipeline(**components)) as studio:
        fields = {"mode": Mode.IMAGE, "images": (str(path),), "strength": 1.0}
        with pytest.raises(InputError, match="expected a mask"):
            _generate(studio, **fields)
        drawn = {}
        for name, colour in {"all": "white", "none": "black"}.items():
            Image.new("RGB", (64, 64), colour).save(mask)
            (finished,) = _generate(studio, mask=str(mask), **fields)
            drawn[name] = _pixels(finished)
            restored = restore_form(finished.item.files[0], studio, lambda _: True)
            assert restored.form.mask == str(mask)
            assert restored.form.images == (str(path),)
            hidden = restore_form(finished.item.files[0], studio, lambda _: False)
            assert hidden.form.mask is None
            assert hidden.notes[0].startswith("2 input picture(s)")
        (other,) = _generate(studio, mask=str(mask), prompt="a blue boat", **fields)
    assert drawn["all"] != drawn["none"]
    assert _pixels(other) == drawn["none"]  # nothing is drawn anew: no prompt matters


def test_an_input_picture_of_another_shape_is_cropped_to_the_size(tmp_path: Path) -> None:
    """Z-Image adds the picture's latents to noise of the asked size: other shapes failed."""
    wide = Image.new("RGB", (201, 140), "red")
    wide.paste("blue", (25, 0, 176, 140))  # what is left of 1 : 1 is blue alone
    for name in ("wide.jpg", "small.png"):
        wide.save(tmp_path / name, quality=95)
    blue = tmp_path / "blue.png"
    Image.new("RGB", (64, 64), "blue").save(blue)
    with studio_of() as studio:

        def draw(path: Path, **fields: object) -> Finished:
            images = (str(path),)
            (made,) = _generate(studio, mode=Mode.IMAGE, images=images, strength=0.5, **fields)
            return made

        cropped = draw(tmp_path / "small.png")
        assert _pixels(cropped) == _pixels(draw(blue))
        draw(tmp_path / "wide.jpg", width=96)
        form = a_form(mode=Mode.IMAGE, images=(str(tmp_path / "small.png"),), strength=0.5)
        run_job(studio, lambda job: work.warm_up(studio, form, "64x96, 96x64", job))
        (comparison,) = run_job(studio, lambda job: compare(studio, form, job)).results
        assert comparison.is_equal  # type: ignore[attr-defined]
        assert Image.open(tmp_path / "small.png").size == (201, 140)
        restored = restore_form(cropped.item.files[0], studio, lambda path: True)
        (again,) = _pictures(run_job(studio, lambda job: work.generate(studio, restored.form, job)))
        assert again.item.files[0].read_bytes() == cropped.item.files[0].read_bytes()


def test_a_broken_picture_is_an_error_in_words(tmp_path: Path) -> None:
    path = tmp_path / "broken.png"
    Image.effect_noise((64, 64), 50).save(path)
    path.write_bytes(path.read_bytes()[:900])
    with studio_of() as studio, pytest.raises(InputError, match="can be read"):
        _generate(studio, mode=Mode.IMAGE, images=(str(path),))


def test_b52_a_strength_of_nothing_is_an_error_or_a_picture_but_never_a_crash(
    tmp_path: Path,
) -> None:
    path = tmp_path / "start.png"
    Image.new("RGB", (64, 64), "red").save(path)
    with studio_of() as studio:
        for strength in (0.0, 0.01):
            form = a_form(mode=Mode.IMAGE, images=(str(path),), strength=strength)
            job = studio.queue.submit(lambda job, form=form: work.generate(studio, form, job))
            assert job.wait(60)
            if job.error is not None:
                assert problem_of(job.error).text
        assert len(_generate(studio)) == 1


def test_warm_up_captures_every_size_and_the_first_picture_replays() -> None:
    with studio_of() as studio:
        job = run_job(studio, lambda job: work.warm_up(studio, a_form(), "64x64, 96x64", job))
        (warmed,) = job.results
        assert isinstance(warmed, Warmed)
        denoiser = [name for name in warmed.signatures if name.startswith("denoiser")]
        assert len(denoiser) == 2
        (finished,) = _generate(studio, width=96)
        assert finished.trace.calls["denoiser"].captures == 0


def test_compare_finds_no_difference_where_there_is_none() -> None:
    with studio_of() as studio:
        job = run_job(studio, lambda job: compare(studio, a_form(), job))
        (comparison,) = job.results
        assert isinstance(comparison, Comparison)
        assert comparison.is_equal
        assert comparison.difference.num_pixels == 64 * 64
        colours = comparison.difference.picture.getcolors(1 << 16)
        assert colours is not None
        assert all(r == g == b for _, (r, g, b) in colours)  # type: ignore[misc]
        assert comparison.eager.item.graph_use.replays == 0
        steps = [span.source for span in comparison.graphs.trace.spans if span.stage == "step"]
        assert steps == ["graph"] * 4
        # what is timed is what every later picture gets: nothing left to learn, decoding included
        (decode,) = (s for s in comparison.graphs.trace.spans if s.stage == "decode")
        assert decode.source == "graph"
        assert [c.num_eager for c in comparison.graphs.trace.calls.values() if c.num_eager] == []
        panel = panel_html(comparison.graphs.snapshot, comparison.graphs.trace)
        assert "graphs are off here" not in panel.partition("<details")[0]
        page = comparison_html(comparison, "cpu")
        assert 'data-state="equal"' in page
        assert "Same pixels." in page
        assert "as fast as" not in page  # a CPU time is no speed-up


def test_a_run_shows_its_steps_while_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with studio_of() as studio:
        seen: list[tuple[int, int]] = []

        show = Job.show

        def noting(job: Job, **changes: object) -> None:
            live = changes.get("detail")
            if isinstance(live, work.Live):
                steps = [span for span in live.trace.spans if span.stage == "step"]
                before = live.before.stats["components"]["denoiser"]  # type: ignore[index]
                seen.append((len(steps), before["replays"] + before["eager_calls"]))
            show(job, **changes)

        monkeypatch.setattr(Job, "show", noting)
        run_job(studio, lambda job: work.generate(studio, a_form(count=2), job))
    assert [steps for steps, _ in seen] == [*range(5), *range(5)]
    assert len({calls for _, calls in seen[:5]}) == 1
    assert seen[5][1] > seen[4][1]  # the second picture counts on from the first


def test_a_warm_up_without_a_prompt_takes_a_usual_one() -> None:
    with studio_of() as studio:
        job = run_job(studio, lambda job: work.warm_up(studio, a_form(prompt=" "), "64x64", job))
        (warmed,) = job.results
        assert isinstance(warmed, work.Warmed)
        assert warmed.signatures
        with pytest.raises(InputError, match="say what the picture should show"):
            _generate(studio, prompt=" ")


def test_no_two_signatures_have_one_name() -> None:
    with studio_of() as studio:
        for guidance in (2.0, 0.0):
            for size in (64, 96):
                _generate(studio, guidance=guidance, width=size)
        reports = studio.snapshot.stats["components"]
        assert isinstance(reports, dict)
        for report in reports.values():
            names = [graph["signature"] for graph in report["graphs"]]
            assert len(names) == len(set(names))


def test_compare_shows_a_wrong_graph_in_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is deliberately wrong (its output is shifted) must not pass as equal."""
    replay = RecordedRecording.replay

    def wrong(self: RecordedRecording[object]) -> None:
        replay(self)
        for tensor in torch.utils._pytree.tree_leaves(self.output):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.add_(0.2)

    with studio_of(config=GraphConfig(backend="recorded", verify=False)) as studio:
        monkeypatch.setattr(RecordedRecording, "replay", wrong)
        job = run_job(studio, lambda job: compare(studio, a_form(), job))
        (comparison,) = job.results
    assert isinstance(comparison, Comparison)
    assert not comparison.is_equal
    assert comparison.difference.num_different > 0
    colours = comparison.difference.picture.getcolors(1 << 16)
    assert colours is not None
    red = sum(n for n, (r, g, b) in colours if r > g + 60 and r > b + 60)  # type: ignore[misc]
    assert red == comparison.difference.num_different
    page = comparison_html(comparison, "cpu")
    assert 'data-state="different"' in page
    assert "Not the same picture." in page


def test_a_request_for_a_mode_the_model_lacks_is_refused() -> None:
    with studio_of() as studio, pytest.raises(InputError, match="text to image, image to image"):
        _generate(studio, mode=Mode.VIDEO)


def test_b53_an_edit_says_which_size_it_really_has(tmp_path: Path) -> None:
    """Two references of unequal, odd sizes; a size asked for that the pipeline rounds."""
    paths = []
    for number, size in enumerate([(97, 81), (80, 64)]):
        paths.append(tmp_path / f"{number}.png")
        Image.new("RGB", size, "orange").save(paths[-1])
    extra = '{"max_sequence_length": 64, "text_encoder_out_layers": [1, 2, 3]}'
    fields = {"mode": Mode.EDIT, "images": tuple(map(str, paths)), "extra": extra, "steps": 2}
    with studio_of(pipe=tiny.build("flux2-klein")) as studio:
        (finished,) = _generate(studio, width=72, height=64, **fields)
        width, height = finished.item.media[0].frames[0].size
        assert (width, height) != (72, 64)
        assert f"{width}×{height} (asked for 72×64)" in details_html(finished)
        (exact,) = _generate(studio, width=64, height=64, **fields)
        assert "asked for" not in details_html(exact)
