"""What is left of a file's record is told in one sentence, however the file was damaged."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

from dit_graphs.app.cli.flags import Given
from dit_graphs.pipelines.generate import (
    GenerateRequest,
    InputError,
    ModelSpec,
    generate,
    load_pipeline,
    open_images,
    read_record,
    read_source,
    record,
)

WHOLE = {
    "record": {
        "format": 1,
        "request": {"prompt": "a"},
        "model": {"model": "bundled"},
        "inputs": [{"option": "image", "path": "in.png", "sha256": "1"}],
        "graphs": None,
    },
    "files": [{"name": "a.png", "sha256": "2"}],
}
_HEAD = struct.pack(">IIBBBBB", 4, 4, 8, 2, 0, 0, 0)
_HUGE = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
_LONG_TEXT = (b"zTXt", b"dit-graphs\0\0" + zlib.compress(b"a" * 10_000_000))


def _png(head: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    data = b"\x89PNG\r\n\x1a\n"
    for kind, body in ((b"IHDR", head), *chunks, (b"IDAT", b""), (b"IEND", b"")):
        data += struct.pack(">I", len(body)) + kind + body
        data += struct.pack(">I", zlib.crc32(kind + body))
    return data


def test_a_whole_sidecar_gives_its_record_and_the_hashes(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(WHOLE))
    record, hashes = read_source(path)
    assert hashes == {"2"}
    assert record["request"] == {"prompt": "a"} and read_record(path) == record


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole["record"].pop("model"),
        lambda whole: whole["record"].pop("request"),
        lambda whole: whole["record"].update(model=5),
        lambda whole: whole["record"].update(graphs=5),
        lambda whole: whole["record"].update(inputs=5),
        lambda whole: whole["record"].update(inputs=[1]),
        lambda whole: whole["record"].update(inputs=[{"option": "image"}]),
        lambda whole: whole.update(record=[1]),
        lambda whole: whole.update(files=5),
        lambda whole: whole.update(files=[{"name": "a.png"}]),
    ],
)
def test_a_damaged_record_is_said_to_be_one(
    tmp_path: Path, damage: Callable[[dict[str, object]], object]
) -> None:
    damaged = json.loads(json.dumps(WHOLE))
    damage(damaged)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(damaged))
    with pytest.raises(InputError, match=r"^from: .*(is damaged|holds no record)"):
        read_source(path)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("deep.json", b"[" * 100_000),
        ("bytes.json", b"\xff"),
        ("text.png", b"text"),
        ("huge.png", _png(_HUGE)),
        ("long.png", _png(_HEAD, _LONG_TEXT)),
        ("foreign.png", _png(_HEAD, (b"tEXt", b"parameters\0a cat"))),
        ("other.png", _png(_HEAD, (b"tEXt", b"dit-graphs\0no json"))),
    ],
)
def test_a_file_of_another_kind_holds_no_record(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=r"^from: .*(cannot be read|holds no record)"):
        read_record(tmp_path / name)


@pytest.mark.parametrize("data", [_png(_HUGE), _png(_HEAD, _LONG_TEXT), _png(_HEAD), b"text"])
def test_a_picture_that_cannot_be_read_names_its_option(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "in.png").write_bytes(data)
    with pytest.raises(InputError, match=r"^image: .* is not a picture that can be read"):
        open_images(GenerateRequest(image=(str(tmp_path / "in.png"),)))


def test_the_home_of_nobody_is_no_file() -> None:
    with pytest.raises(InputError, match=r"^image: no such file: '~nobody-here/in.png'"):
        open_images(GenerateRequest(image=("~nobody-here/in.png",)))


def test_graphs_of_another_version_are_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"^from: .*says speed, which GraphConfig has not"):
        Given({}).graphs({"speed": 9})


def test_weights_are_hashed_once_and_again_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of many gigabytes was read from end to end for every picture."""
    tiny.build("z-image").save_pretrained(tmp_path)
    loaded = load_pipeline(ModelSpec(model=str(tmp_path), device="cpu"))
    loaded.pipe.set_progress_bar_config(disable=True)
    reads = []
    whole = record._folder_sha256
    monkeypatch.setattr(record, "_folder_sha256", lambda *a: reads.append(a) or whole(*a))
    request = GenerateRequest(
        prompt="a", seed=1, num_images=2, height=32, width=32, num_inference_steps=1
    )
    first, second = (item.record["weights"] for item in generate(loaded, request))
    assert first == second and len(reads) == 1
    (tmp_path / "new.txt").write_text("x")
    (item, _) = generate(loaded, request)
    assert item.record["weights"] != first and len(reads) == 2
