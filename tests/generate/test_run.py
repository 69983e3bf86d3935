"""Items are drawn one by one, timed from outside, and can each be made again alone.

Rows B53, B54, B61 and B74 of the public bug log: sizes that were rounded, batches whose items
cannot be reproduced, files that carry another item's seed.
"""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import pytest
import tiny
import torch
from PIL import Image

import dit_graphs
from dit_graphs.pipelines.generate import (
    GenerateRequest,
    GraphUse,
    InputError,
    changes,
    generate,
    read_record,
)
from dit_graphs.pipelines.generate.run import _fps
from dit_graphs.pipelines.generate.stages import StageClock

SIZE = {"height": 32, "width": 32, "num_inference_steps": 2}
SMALL = {**SIZE, "set": {"max_sequence_length": 32}}


@pytest.fixture(scope="module")
def pipe() -> diffusers.ZImagePipeline:
    return tiny.build("z-image")


def test_every_item_is_what_its_seed_gives_alone(
    pipe: diffusers.ZImagePipeline, tmp_path: Path
) -> None:
    together = generate(pipe, "a", seed=7, num_images=3, output=tmp_path, **SMALL)
    assert [item.seed for item in together] == [7, 8, 9]
    hashes = [item.media[0].sha256 for item in together]
    assert len(set(hashes)) == 3
    for item, digest in zip(together, hashes, strict=True):
        (alone,) = generate(pipe, "a", seed=item.seed, **SMALL)
        assert alone.media[0].sha256 == digest
        assert read_record(item.files[0]) == read_record(item.sidecar) == item.record
        assert item.record["request"]["seed"] == item.seed
        assert str(item.seed) in item.files[0].name


def test_the_picture_is_the_plain_pipelines(pipe: diffusers.ZImagePipeline) -> None:
    (item,) = generate(pipe, "a", seed=7, **SMALL)
    generator = torch.Generator().manual_seed(7)
    expected = pipe("a", generator=generator, max_sequence_length=32, **SIZE).images[0]
    assert item.media[0].frames[0].tobytes() == expected.tobytes()


def test_the_callers_random_numbers_go_on(
    pipe: diffusers.ZImagePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside, torch's own generator starts from the seed: language models sample from it."""
    drawn = []
    encode = pipe.encode_prompt

    def sampling(*args: object, **kwargs: object) -> object:
        drawn.append(torch.rand(()).item())
        return encode(*args, **kwargs)

    monkeypatch.setattr(pipe, "encode_prompt", sampling)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first = torch.rand(1)
    for seed in (7, 8, 7):
        generate(pipe, "a", seed=seed, **SMALL)
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected)
    assert drawn[0] == drawn[2] != drawn[1]


def test_without_a_seed_one_is_drawn_and_told(pipe: diffusers.ZImagePipeline) -> None:
    first, second = (generate(pipe, "a", **SMALL)[0] for _ in range(2))
    assert first.seed != second.seed
    assert generate(pipe, "a", seed=first.seed, **SMALL)[0].media[0].sha256 == (
        first.media[0].sha256
    )


def test_the_png_depends_on_the_request_alone(
    pipe: diffusers.ZImagePipeline, tmp_path: Path
) -> None:
    """Neither the clock, nor the item's place in a batch, nor its name is in the bytes."""
    third = generate(pipe, "a", seed=7, num_images=3, output=tmp_path / "one", **SMALL)[2]
    (alone,) = generate(pipe, "a", seed=9, output=tmp_path / "two", **SMALL)
    assert third.files[0].read_bytes() == alone.files[0].read_bytes()


def test_stages_are_timed_and_the_pipeline_is_left_as_it_was(
    pipe: diffusers.ZImagePipeline,
) -> None:
    before = dict(vars(pipe))
    (item,) = generate(pipe, "a", seed=7, **SMALL)
    assert list(item.seconds) == ["encode", "denoise", "decode"]
    assert all(seconds > 0 for seconds in item.seconds.values())
    assert item.num_steps == 2
    assert vars(pipe) == before


def test_the_clock_puts_a_slow_stage_where_it_was_slow(
    pipe: diffusers.ZImagePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that stands still but inside one method, all seconds are that stage's."""
    now = 0.0
    monkeypatch.setattr("dit_graphs.pipelines.generate.stages.time.perf_counter", lambda: now)
    for stage, owner, name in (
        ("encode", pipe, "encode_prompt"),
        ("denoise", pipe.scheduler, "step"),
        ("decode", pipe.vae, "decode"),
    ):
        method = getattr(owner, name)

        def slow(*args: object, _method: object = method, **kwargs: object) -> object:
            nonlocal now
            now += 5.0
            return _method(*args, **kwargs)  # type: ignore[operator]

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, slow)
            (item,) = generate(pipe, "a", seed=7, **SMALL)
        calls = SMALL["num_inference_steps"] if stage == "denoise" else 1
        expected = dict.fromkeys(("encode", "denoise", "decode"), 0.0) | {stage: 5.0 * calls}
        assert item.seconds == expected


def test_the_clock_restores_the_pipeline_after_an_error(pipe: diffusers.ZImagePipeline) -> None:
    own = pipe.progress_bar
    with pytest.raises(ZeroDivisionError), StageClock(torch.device("cpu")).watch(pipe):
        assert pipe.progress_bar != own
        raise ZeroDivisionError
    assert "progress_bar" not in vars(pipe)
    pipe.progress_bar = own  # somebody else's attribute is given back
    try:
        with StageClock(torch.device("cpu")).watch(pipe):
            pass
        assert pipe.progress_bar is own or pipe.progress_bar == own
        assert "progress_bar" in vars(pipe)
    finally:
        del pipe.progress_bar


def test_a_size_the_pipeline_refuses_is_an_input_error_and_nothing_is_written(
    pipe: diffusers.ZImagePipeline, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"^height: ZImagePipeline refuses it: .*divisible by"):
        generate(pipe, "a", height=33, width=32, num_inference_steps=1, output=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("strength", [0.3, 0.0])
def test_b52_a_strength_that_leaves_no_step_is_refused_where_the_pipeline_goes_on(
    strength: float, tmp_path: Path
) -> None:
    """Two steps of 0.3: SDXL cuts it to none, and fails on an empty tensor or draws nothing."""
    components = tiny.build("sdxl").components
    own = diffusers.StableDiffusionXLImg2ImgPipeline
    keys, _ = own._get_signature_keys(own)
    pipe = own(**{key: part for key, part in components.items() if key in keys})
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    given = {"image": str(tmp_path / "a.png"), "num_inference_steps": 2}
    with pytest.raises(InputError) as caught:
        generate(pipe, "x", strength=strength, output=tmp_path / "out", **given)
    assert caught.value.option == "num_inference_steps, strength"
    assert not (tmp_path / "out").exists()


def test_no_step_at_all_is_no_picture(pipe: diffusers.ZImagePipeline) -> None:
    with pytest.raises(InputError, match="expected at least one denoising step, got none"):
        generate(pipe, "x", height=32, width=32, set={"sigmas": [], "max_sequence_length": 32})


def test_an_error_inside_the_loop_is_not_blamed_on_the_user(
    pipe: diffusers.ZImagePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("scheduler is broken")

    monkeypatch.setattr(pipe.scheduler, "step", broken)
    with pytest.raises(ValueError, match="scheduler is broken") as caught:
        generate(pipe, "a", seed=7, **SMALL)
    assert not isinstance(caught.value, InputError)


@pytest.mark.parametrize(("asked", "used"), [(1, 1), (3, 1), (5, 5), (6, 5), (7, 5)])
def test_b54_the_frames_that_were_used_are_recorded(asked: int, used: int, tmp_path: Path) -> None:
    """Wan needs 4k + 1 frames and rounds the rest; one frame is a picture."""
    wan = tiny.build("wan")
    options = {"height": 32, "width": 32, "num_inference_steps": 1, "seed": 1}
    (item,) = generate(wan, "a", num_frames=asked, output=tmp_path, **options)
    assert item.sidecar is not None
    (entry,) = json.loads(item.sidecar.read_text())["files"]
    assert entry.get("num_frames", 1) == used
    assert item.record["request"]["num_frames"] == asked
    assert item.files[0].suffix == (".png" if used == 1 else ".mp4")


def test_b73_a_video_is_made_again_from_its_sidecar_with_the_same_bytes(tmp_path: Path) -> None:
    wan = tiny.build("wan")
    options = {"height": 32, "width": 32, "num_inference_steps": 1, "num_frames": 5, "fps": 12}
    (item,) = generate(
        wan, "a", seed=3, negative_prompt="b", output=tmp_path, guidance_scale=4, **options
    )
    assert item.sidecar is not None
    record = read_record(item.sidecar)
    request = GenerateRequest.from_mapping(record["request"])
    assert (request.negative_prompt, request.fps, request.guidance_scale) == ("b", 12, 4.0)
    (again,) = generate(wan, request, output=tmp_path / "again")
    assert again.files[0].read_bytes() == item.files[0].read_bytes()
    assert changes(item.record, again.record) == []


@pytest.mark.parametrize(
    ("settings", "fps"), [({}, 16), ({"frame_rate": 29.97}, 30), ({"frame_rate": 0.2}, 1)]
)
def test_a_video_has_the_whole_rate_nearest_to_its_frame_rate(
    settings: dict[str, float], fps: int
) -> None:
    """Cut down, 0.2 frames a second was none, and the encoder failed after the drawing."""
    assert _fps(GenerateRequest(set=settings)) == fps


def test_b53_the_actual_size_of_an_edit_is_recorded(tmp_path: Path) -> None:
    source = tmp_path / "in.png"
    Image.new("RGB", (48, 32), (200, 30, 30)).save(source)
    text = tiny.build("z-image")
    pipe = diffusers.ZImageImg2ImgPipeline(**text.components)
    pipe.set_progress_bar_config(disable=True)
    options = {"height": 32, "width": 48, "num_inference_steps": 2, "strength": 0.5}
    (item,) = generate(pipe, "a", image=str(source), seed=1, output=tmp_path / "out", **options)
    assert item.sidecar is not None
    (entry,) = json.loads(item.sidecar.read_text())["files"]
    assert (entry["width"], entry["height"]) == item.media[0].frames[0].size
    (noted,) = item.record["inputs"]
    assert noted["path"] == str(source) and len(noted["sha256"]) == 64
    Image.new("RGB", (48, 32), (30, 30, 200)).save(source)
    (other,) = generate(pipe, "a", image=str(source), seed=1, **options)
    assert any(line.startswith("inputs") for line in changes(item.record, other.record))


def test_changes_name_the_library_and_both_versions(pipe: diffusers.ZImagePipeline) -> None:
    (item,) = generate(pipe, "a", seed=7, **SMALL)
    old = json.loads(json.dumps(item.record))
    old["environment"]["versions"]["torch"] = "2.0.0"
    old["environment"]["threads"] = None
    threads = torch.get_num_threads()
    assert changes(old, item.record) == [
        f"environment.threads: none → {threads}",
        f"environment.versions.torch: 2.0.0 → {torch.__version__.partition('+')[0]}",
    ] or changes(old, item.record)[1].startswith("environment.versions.torch: 2.0.0 → ")


def test_graph_use_is_told_and_the_pixels_do_not_change(pipe: diffusers.ZImagePipeline) -> None:
    (plain,) = generate(pipe, "a", seed=7, **SMALL)
    assert plain.record["graphs"] is None and plain.graph_use.replays == 0
    config = dit_graphs.GraphConfig(backend="recorded", components=("denoiser",))
    dit_graphs.accelerate(pipe, config)
    try:
        items = generate(pipe, "a", seed=7, num_images=3, **SMALL)
    finally:
        dit_graphs.restore(pipe)
    assert items[0].media[0].sha256 == plain.media[0].sha256
    assert items[0].record["graphs"] == {"backend": "recorded", "components": ["denoiser"]}
    uses = [item.graph_use for item in items]
    assert [use.replays + use.eager_calls for use in uses] == [2, 2, 2]
    assert uses[-1].replays == 2
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert uses[-1].line(cpu) == (
        "2 of 2 calls replayed by the CPU recorder: no CUDA graphs, no speed-up"
    )
    assert uses[-1].line(gpu) == "cuda graph: 2/2"
    assert uses[0].line(gpu) == "cuda graph: 0/2 (2 eager: warming_up)"


@pytest.mark.parametrize(
    ("reasons", "line"),
    [
        ({"no_cuda": 8}, "cuda graph: 0/8 (8 eager: no_cuda)"),
        ({"kill_switch": 8}, "cuda graph: 0/8 (8 eager: kill_switch)"),
        (
            {"warming_up": 8},
            "0 of 8 calls replayed by the CPU recorder: no CUDA graphs, no speed-up",
        ),
    ],
)
def test_the_line_of_a_run_without_replays(reasons: dict[str, int], line: str) -> None:
    use = GraphUse(replays=0, eager_calls=8, reasons=reasons)
    assert use.line(torch.device("cpu")) == line


def test_mixed_reasons_are_counted_apart() -> None:
    use = GraphUse(replays=15, eager_calls=3, reasons={"warming_up": 2, "host_read": 1})
    assert use.line(torch.device("cuda")) == (
        "cuda graph: 15/18 (3 eager: 2 warming_up, 1 host_read)"
    )


def test_a_prompt_length_no_encoder_can_read_is_refused(pipe: diffusers.ZImagePipeline) -> None:
    """99999 tokens of padding took all memory of the host before anything was said."""
    longest = pipe.text_encoder.config.max_position_embeddings
    for length in (0, longest + 1, 99_999):
        with pytest.raises(InputError, match=f"^set: max_sequence_length: .* 1 to {longest}, got"):
            generate(pipe, "a", **SIZE, set={"max_sequence_length": length})


def test_the_names_of_the_library_are_listed() -> None:
    from dit_graphs.pipelines import generate as library

    assert {"generate", "generate_batch", "load_pipeline"} <= set(dir(library))
