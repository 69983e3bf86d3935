"""Many requests in a row: what fails stops nothing, what is complete is not made again."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import pytest
import tiny

from dit_graphs.app.cli.batch import file_lines
from dit_graphs.pipelines.generate import GenerateRequest, InputError, generate_batch, read_lines

SMALL = {
    "height": 32,
    "width": 32,
    "num_inference_steps": 2,
    "set": {"max_sequence_length": 32},
}


@pytest.fixture(scope="module")
def pipe() -> diffusers.ZImagePipeline:
    return tiny.build("z-image")


def test_a_line_overrides_the_defaults_and_drops_none_of_them() -> None:
    defaults = GenerateRequest(num_images=4, height=64, set={"a": 1, "b": 1})
    (line,) = read_lines(['{"prompt": "x", "num_images": 1, "set": {"b": 2}}'], defaults).values()
    assert isinstance(line, GenerateRequest)
    assert (line.num_images, line.height, line.set) == (1, 64, {"a": 1, "b": 2})


def test_a_batch_goes_on_after_a_failure_and_resumes(
    pipe: diffusers.ZImagePipeline, tmp_path: Path
) -> None:
    defaults = GenerateRequest.from_mapping(SMALL)
    text = ['{"prompt": "a", "seed": 1}', "", "not json", '{"prompt": "b", "height": 33}']
    text += ['{"prompt": "c", "num_images": 2}', '{"prompt": "a", "seed": 1}', '{"size": 3}']
    lines = read_lines(text, defaults)
    assert list(lines) == [1, 3, 4, 5, 6, 7]
    report = generate_batch(pipe, lines, output=tmp_path)
    assert [f.number for f in report.failures] == [3, 4, 7]
    assert all(isinstance(f.error, InputError) for f in report.failures)
    assert len(report.items) == 4 and report.num_skipped == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(before) == 8
    again = generate_batch(pipe, lines, output=tmp_path)
    assert (len(again.items), again.num_skipped, len(again.failures)) == (0, 4, 3)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_a_lost_file_is_made_again_and_a_lost_sidecar_overwrites_nothing(
    pipe: diffusers.ZImagePipeline, tmp_path: Path
) -> None:
    requests = [GenerateRequest.from_mapping({"prompt": p, "seed": 1, **SMALL}) for p in "ab"]
    first, second = generate_batch(pipe, requests, output=tmp_path).items
    assert second.sidecar is not None
    first.files[0].unlink()
    second.sidecar.unlink()
    report = generate_batch(pipe, requests, output=tmp_path)
    assert len(report.items) == 2
    assert second.files[0].exists() and report.items[1].files[0] != second.files[0]
    assert report.items[1].files[0].read_bytes() == second.files[0].read_bytes()


def test_an_interrupted_batch_keeps_what_was_finished(
    pipe: diffusers.ZImagePipeline, tmp_path: Path
) -> None:
    requests = [GenerateRequest.from_mapping({"prompt": p, **SMALL}) for p in "abc"]

    def stop(number: int, item: object) -> None:
        if number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_batch(pipe, requests, output=tmp_path, on_item=stop)
    assert len(list(tmp_path.glob("*.png"))) == 2
    report = generate_batch(pipe, requests, output=tmp_path)
    assert (report.num_skipped, len(report.items)) == (2, 1)
    assert len(list(tmp_path.glob("*.png"))) == 3


def test_a_batch_takes_prompts_and_dicts_and_nothing_else(
    pipe: diffusers.ZImagePipeline, tmp_path: Path
) -> None:
    requests = ["a", {"prompt": "b", "seed": 1}, {"prompt": "c", "frames": 3}]
    full = [requests[0], *({**SMALL, **r} for r in requests[1:])]
    with pytest.raises(TypeError, match=r"^expected a GenerateRequest, a prompt or a dict, got 3"):
        generate_batch(pipe, [*full, 3], output=tmp_path)
    assert not list(tmp_path.iterdir())
    report = generate_batch(pipe, full[1:], output=tmp_path)
    assert [item.seed for item in report.items] == [1]
    assert [str(failure.error)[:25] for failure in report.failures] == ["frames: no such key; a re"]


@pytest.mark.parametrize("wrong", ["a red heart", {"prompt": "a red heart"}])
def test_one_request_is_not_taken_for_many(
    pipe: diffusers.ZImagePipeline, tmp_path: Path, wrong: object
) -> None:
    """A text would be a picture of each letter, a dict one of each key."""
    with pytest.raises(TypeError, match=r"^expected "):
        generate_batch(pipe, wrong, output=tmp_path)
    assert not list(tmp_path.iterdir())


def test_numbered_requests_may_be_prompts_and_dicts_too(
    pipe: diffusers.ZImagePipeline, tmp_path: Path
) -> None:
    report = generate_batch(pipe, {7: {"prompt": "a", "seed": 1, **SMALL}}, output=tmp_path)
    assert [path.name for item in report.items for path in item.files] == ["0007-a-1.png"]


@pytest.mark.parametrize(
    "foreign",
    [
        '{"files": [], "batch_key": "x", "item": {"index": 0}}',
        '{"files": [{"name": "x"}], "batch_key": {}, "item": {"index": [0]}}',
        "[" * 100_000,
        "null",
        "\ufeff",
    ],
)
def test_someone_elses_json_in_the_folder_stops_no_batch(
    pipe: diffusers.ZImagePipeline, tmp_path: Path, foreign: str
) -> None:
    (tmp_path / "foreign.json").write_text(foreign, encoding="utf-8")
    report = generate_batch(pipe, [{"prompt": "a", **SMALL}], output=tmp_path)
    assert len(report.items) == 1 and not report.failures


def test_a_sidecar_that_never_got_its_name_is_no_sidecar(
    pipe: diffusers.ZImagePipeline, tmp_path: Path
) -> None:
    """A process killed just before it leaves one that names a file which may be another's."""
    requests = [{"prompt": "a", "seed": 1, **SMALL}]
    (item,) = generate_batch(pipe, requests, output=tmp_path).items
    assert item.sidecar is not None
    item.sidecar.rename(tmp_path / f".{item.sidecar.name}")
    assert len(generate_batch(pipe, requests, output=tmp_path).items) == 1


def test_a_sidecar_names_its_own_item_whatever_the_number_of_images(
    pipe: diffusers.ZImagePipeline, tmp_path: Path
) -> None:
    """A list of all keys in each of them grew with the square of `num_images`."""
    sizes = []
    for number in (1, 3):
        request = {"prompt": "a", "seed": 1, "num_images": number, **SMALL}
        item = generate_batch(pipe, [request], output=tmp_path / str(number)).items[0]
        assert item.sidecar is not None
        key = json.loads(item.sidecar.read_text())["batch_key"]
        sizes.append(len(key))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "a", "seed": 1, "seed": 2}', "'seed' stands in it twice"),
        ('{"prompt": "a", "set": {"b": 1, "b": 1}}', "'b' stands in it twice"),
        ('{"set": ' + "[" * 100_000, "recursion"),
        ('{"guidance_scale": ' + "1" * 400 + "}", "guidance_scale: expected a finite number"),
        ('{"guidance_scale": ' + "1" * 5000 + "}", "not JSON"),
        ('{"set": {"a": NaN}}', "set: expected JSON values"),
        ('["a"]', "expected a JSON object"),
    ],
)
def test_a_line_that_makes_no_sense_is_an_error_of_its_own(line: str, problem: str) -> None:
    found = read_lines([line, '{"prompt": "a"}'], GenerateRequest())
    assert isinstance(found[1], InputError) and problem in str(found[1])
    assert isinstance(found[2], GenerateRequest)


def test_a_file_of_lines_is_read_as_editors_write_it(tmp_path: Path) -> None:
    """A byte order mark, ends of Windows, and separators that JSON text may hold as they are."""
    text = '\ufeff{"prompt": "a\u2028b\x85c"}\r\n\r\n{"prompt": "d"}'
    (tmp_path / "b.jsonl").write_bytes(text.encode())
    lines = read_lines(file_lines(tmp_path / "b.jsonl"), GenerateRequest())
    assert {number: line.prompt for number, line in lines.items()} == {1: "a\u2028b\x85c", 3: "d"}
