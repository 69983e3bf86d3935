"""What strangers send to a served page: paths, addresses, forged records, huge pictures, markup."""

from __future__ import annotations

import json
import struct
import threading
import zlib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

pytest.importorskip("gradio")

import httpx
from demo_http import META, SMALL, Stranger, png_of, record_of, restored
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from dit_graphs.app.demo.studio import Studio

SECRET = "the-operator-s-secret"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A readable picture and text of the operator, outside every upload."""
    path = tmp_path / "secret.png"
    info = PngInfo()
    info.add_itxt("dit-graphs", json.dumps(record_of({"prompt": SECRET})))
    Image.new("RGB", (16, 16), "red").save(path, pnginfo=info)
    (tmp_path / "secret.svg").write_text(f"<svg>{SECRET}</svg>", encoding="utf-8")
    (tmp_path / "secret.txt").write_text(SECRET, encoding="utf-8")
    return path


def _bomb(side: int) -> bytes:
    """A PNG of a few hundred bytes whose header claims `side` × `side` pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        check = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    start = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + start + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("event", "field"),
    [
        ("restore", "restore"),
        ("restore_1", "download"),
        ("generate", "image"),
        ("generate", "image-2"),
        ("compare", "image"),
        ("warm_up", "image"),
        # a text or number field is no way in either
        ("generate", "prompt"),
        ("generate", "lora"),
    ],
)
@pytest.mark.parametrize("name", ["secret.png", "secret.txt", "secret.svg"])
def test_a_path_that_was_not_uploaded_is_not_opened(
    stranger: Stranger, secret: Path, event: str, field: str, name: str
) -> None:
    value = {"path": str(secret.with_name(name)), "meta": META, "orig_name": name}
    success, _, sent = stranger.send(event, **{field: value})
    assert not success
    assert "was uploaded here" in sent
    assert SECRET not in sent
    assert str(secret.parent) not in sent


@pytest.mark.parametrize("way", ["nested", "climbing", "link", "data", "no meta", "relative"])
def test_no_spelling_of_a_path_helps(
    stranger: Stranger, secret: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = stranger.upload(png_of())
    folder = Path(str(upload["path"])).parent
    value: object = {"path": str(secret), "meta": META}
    if way == "nested":
        value = [value]
    elif way == "climbing":
        value = {"path": f"{folder}/{'../' * 12}{secret}", "meta": META}
    elif way == "link":
        (folder / "link.png").symlink_to(secret)
        value = {"path": str(folder / "link.png"), "meta": META}
    elif way == "data":
        value = {**upload, "url": "data:image/png;base64,AAAA"}
    elif way == "no meta":
        value = {"path": str(secret)}
    else:
        monkeypatch.chdir(secret.parent)
        value = {"path": secret.name, "meta": META}
    for event, field in (("restore", "restore"), ("generate", "image")):
        success, _, sent = stranger.send(event, **{field: value})
        assert not success
        assert SECRET not in sent
        assert str(secret.parent) not in sent


def test_an_address_is_not_fetched(stranger: Stranger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradio's own guard lets public addresses through; here the local one stands for them."""
    from gradio import processing_utils

    asked: list[str] = []

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(png_of())

    async def unguarded(url: str) -> httpx.Response:
        async with httpx.AsyncClient() as client:
            return await client.get(url)

    monkeypatch.setattr(processing_utils, "async_ssrf_protected_get", unguarded)
    server = HTTPServer(("127.0.0.1", 0), Answering)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        place = f"http://127.0.0.1:{server.server_address[1]}/a.png"
        for event, field in (("restore", "restore"), ("generate", "image"), ("compare", "image")):
            success, _, _ = stranger.send(event, **{field: {"path": place, "meta": META}})
            assert not success
    finally:
        server.shutdown()
    assert asked == []


@pytest.mark.parametrize("name", ["secret.png", "secret.txt", "secret.svg"])
def test_a_forged_record_names_no_picture_of_this_machine(
    stranger: Stranger, secret: Path, name: str
) -> None:
    """The pictures of a record are shown in the page again: their paths were served to anybody."""
    fields = restored(stranger, {"prompt": "x", "image": [str(secret.with_name(name))]})
    assert fields["dg-image"] is None
    assert SECRET not in json.dumps(fields)
    missing = restored(stranger, {"prompt": "x", "image": ["/nowhere/at/all.png"]})
    assert missing["dg-restored"] == fields["dg-restored"]  # nor says whether a file is there


def test_an_uploaded_picture_comes_back_with_its_settings(stranger: Stranger) -> None:
    upload = stranger.upload(png_of())
    fields = restored(stranger, {"prompt": "x", "image": [upload["path"]]})
    assert isinstance(fields["dg-image"], dict)
    assert stranger.fetch(fields["dg-image"]["path"]).status_code == 200


def test_pictures_of_others_cannot_be_fetched_by_name(stranger: Stranger, studio: Studio) -> None:
    success, fields, _ = stranger.send("generate", prompt="mine alone", **SMALL)
    assert success
    (made,) = [path for path in studio.shown.iterdir() if path.name.startswith("mine-alone")][:1]
    assert stranger.fetch(str(made)).status_code in (403, 404)
    gallery = fields["dg-gallery"]["value"]
    assert stranger.fetch(gallery[0]["image"]["path"]).status_code == 200


def test_a_lora_is_a_name_and_never_a_path(stranger: Stranger, tmp_path: Path) -> None:
    path = tmp_path / "own.safetensors"
    path.write_bytes(b"")
    answers = set()
    for line in (f"{path}:1", "/nowhere/own.safetensors:1", "owner/own.safetensors:1", "../own:1"):
        _, fields, _ = stranger.send("generate", prompt="x", lora=line, **SMALL)
        assert "Check “lora”" in fields["dg-stage"]
        assert "No LoRA weights are offered here" in fields["dg-stage"]
        answers.add(fields["dg-stage"].partition("got")[0])
    assert len(answers) == 1  # the same whether the file is there or not


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ('{"image": "/etc/hostname"}', "in its own field"),
        ('{"width": 100000}', "in its own field"),
        ('{"num_inference_steps": 100000}', "in its own field"),
        ('{"control_video": "/etc/hostname"}', "cannot be given as text"),
        ('{"negative_prompt_2": "http://127.0.0.1/"}', "cannot be given as text"),
        ('{"max_sequence_length": 1000000000}', "xpected at most 8192"),
        ('{"max_sequence_length": NaN}', "no number"),
        ('{"max_sequence_length": 1e999}', "xpected at most 8192"),
        ("[" * 3000, "Expected JSON such as"),
        ('{"a": ' * 500 + "1" + "}" * 500, "nested"),
        ('{"sigmas": [' + "1," * 1900 + "1]}", "at most 200 values"),
        ('{"a": "' + "x" * 5000 + '"}', "at most 4000 characters"),
    ],
)
def test_other_arguments_are_no_way_around_the_fields(
    stranger: Stranger, extra: str, words: str
) -> None:
    fields = {**SMALL, "width": None, "extra": extra}
    success, shown, _ = stranger.send("generate", prompt="x", **fields)
    assert success
    assert "Check “other arguments”" in shown["dg-stage"]
    assert words in shown["dg-stage"]


@pytest.mark.parametrize("side", [7000, 12_000, 60_000])
def test_a_picture_that_unpacks_to_gigabytes_is_refused_in_words(
    stranger: Stranger, side: int
) -> None:
    upload = stranger.upload(_bomb(side))
    assert Path(str(upload["path"])).stat().st_size < 1000
    success, _, sent = stranger.send("generate", prompt="x", image=upload, **SMALL)
    assert not success
    assert "at most 36 million pixels" in sent
    success, fields, _ = stranger.send("restore", restore=upload)
    assert success
    assert "alert" in fields["dg-restored"]


@pytest.mark.parametrize("data", [b"", b"\x89PNG\r\n\x1a\n", b"%!PS-Adobe-3.0\n", b"<svg/>"])
def test_a_file_that_is_no_picture_is_refused_in_words(stranger: Stranger, data: bytes) -> None:
    for name in ("a.png", "a.eps", "a.svg"):
        upload = stranger.upload(data, name)
        success, _, sent = stranger.send("generate", prompt="x", image=upload, **SMALL)
        assert not success
        assert "Expected a picture that can be read" in sent


def test_an_upload_that_is_too_large_is_refused(stranger: Stranger, studio: Studio) -> None:
    with pytest.raises(httpx.HTTPStatusError, match="413"):
        stranger.upload(bytes(studio.limits.upload_bytes + 1))


def test_errors_name_no_place_of_this_machine(
    stranger: Stranger, studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError(2, "No such file", str(tmp_path / "deep" / "weights.bin"))

    monkeypatch.setattr(type(studio.pipe.transformer), "forward", broken)
    _, fields, sent = stranger.send("generate", prompt="somewhere else", **SMALL)
    assert "weights.bin" in fields["dg-stage"]
    assert str(tmp_path) not in sent
