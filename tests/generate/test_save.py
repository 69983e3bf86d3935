"""Files appear whole or not at all, and never in the place of another."""

from __future__ import annotations

import json
import threading
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dit_graphs.pipelines.generate import InputError, check_output, save
from dit_graphs.pipelines.generate.inputs import file_sha256
from dit_graphs.pipelines.generate.media import Medium, media_of
from dit_graphs.pipelines.generate.save import save_media, slug


def _picture(value: int = 0) -> Medium:
    return Medium((Image.new("RGB", (8, 4), (value, 0, 0)),))


def _save(folder: Path, *media: Medium, stem: str = "x-1") -> tuple[list[Path], Path]:
    return save_media(
        media, folder, stem, fps=8, sample_rate=8000, text="{}", sidecar={"note": "héart"}
    )


def test_the_sidecar_names_every_file_with_its_hash_and_size(tmp_path: Path) -> None:
    (picture,), sidecar = _save(tmp_path, _picture())
    (entry,) = json.loads(sidecar.read_text(encoding="utf-8"))["files"]
    assert entry == {"name": "x-1.png", "sha256": file_sha256(picture), "width": 8, "height": 4}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x-1.json", "x-1.png"]


def test_a_second_file_of_one_name_gets_a_number(tmp_path: Path) -> None:
    names = [_save(tmp_path, _picture(n))[0][0].name for n in range(3)]
    assert names == ["x-1.png", "x-1-2.png", "x-1-3.png"]
    assert Image.open(tmp_path / "x-1.png").getpixel((0, 0)) == (0, 0, 0)


@pytest.mark.parametrize("taken", ["x-1.png", "x-1.json"])
def test_a_foreign_file_is_not_overwritten(tmp_path: Path, taken: str) -> None:
    (tmp_path / taken).write_text("mine")
    (picture,), sidecar = _save(tmp_path, _picture())
    assert (tmp_path / taken).read_text() == "mine"
    assert (picture.name, sidecar.name) == ("x-1-2.png", "x-1-2.json")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupt_while_writing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def stopped(path: Path) -> str:
        assert path.exists()  # the first file is written, then somebody presses Ctrl-C
        raise error

    monkeypatch.setattr("dit_graphs.pipelines.generate.save.file_sha256", stopped)
    with pytest.raises(error):
        _save(tmp_path, _picture())
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_between_two_files_takes_the_first_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, calls = save._link, []

    def second_fails(source: Path, target: Path) -> bool:
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return link(source, target)

    monkeypatch.setattr(save, "_link", second_fails)
    with pytest.raises(KeyboardInterrupt):
        _save(tmp_path, _picture())
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_links_is_served_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("os.link", no_links)
    names = [_save(tmp_path, _picture(n))[0][0].name for n in range(2)]
    assert names == ["x-1.png", "x-1-2.png"]
    assert len(list(tmp_path.iterdir())) == 4


def test_a_name_that_is_taken_meanwhile_is_kept_without_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken_first(source: Path, target: Path) -> None:
        target.write_text("mine")
        raise PermissionError

    monkeypatch.setattr("os.link", taken_first)
    monkeypatch.setattr(Path, "exists", lambda path: False)  # it was not there a moment ago
    (tmp_path / "source").write_text("ours")
    assert not save._link(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_text() == "mine"


def test_a_failed_rename_gives_the_name_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("os.link", fails)
    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(PermissionError):
        _save(tmp_path, _picture())
    assert not list(tmp_path.iterdir())


def test_many_writers_of_one_name_all_keep_their_file(tmp_path: Path) -> None:
    threads = [threading.Thread(target=_save, args=(tmp_path, _picture(n))) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pictures = sorted(tmp_path.glob("*.png"))
    assert len(pictures) == 12
    assert {Image.open(p).getpixel((0, 0))[0] for p in pictures} == set(range(12))
    assert len(list(tmp_path.iterdir())) == 24


def test_a_video_keeps_its_size_and_its_frames(tmp_path: Path) -> None:
    import imageio.v3 as iio

    # 36 is no multiple of 16: an encoder left to itself would resize the frames to 48.
    frames = tuple(Image.new("RGB", (36, 20), (40 * i, 0, 0)) for i in range(5))
    (video,), sidecar = _save(tmp_path, Medium(frames))
    assert video.suffix == ".mp4"
    assert iio.imread(video).shape == (5, 20, 36, 3)
    (entry,) = json.loads(sidecar.read_text())["files"]
    assert (entry["num_frames"], entry["width"], entry["height"]) == (5, 36, 20)


def test_sound_is_saved_with_its_rate(tmp_path: Path) -> None:
    (sound,), _ = _save(tmp_path, Medium(samples=np.zeros((2, 100), dtype=np.float32)))
    with wave.open(str(sound)) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, 8000, 100)


def test_every_shape_a_pipeline_returns_becomes_frames() -> None:
    pil = [Image.new("RGB", (6, 4)) for _ in range(3)]
    shapes = {
        "np": np.zeros((1, 3, 4, 6, 3), dtype=np.float32),
        "pt": torch.zeros(1, 3, 3, 4, 6),
        "pil in a batch": [pil],
        "pil": pil,
        "list of np": [np.zeros((3, 4, 6, 3), dtype=np.float32)],
        "list of np frames": [list(np.zeros((3, 4, 6, 3), dtype=np.float32))],
    }
    for name, value in shapes.items():
        (medium,) = media_of({"frames": value})
        assert medium.describe() == {"width": 6, "height": 4, "num_frames": 3}, name
        assert medium.suffix == ".mp4", name


def test_one_frame_is_a_picture_and_layers_are_several() -> None:
    (one,) = media_of({"frames": np.ones((1, 1, 4, 6, 3), dtype=np.float32)})
    assert one.suffix == ".png" and one.frames[0].getpixel((0, 0)) == (255, 255, 255)
    layers = media_of({"images": [[Image.new("RGBA", (4, 4)) for _ in range(3)]]})
    assert [layer.label for layer in layers] == ["-0", "-1", "-2"]


def test_video_and_sound_are_two_media() -> None:
    output = {"frames": np.zeros((1, 2, 4, 6, 3)), "audio": torch.zeros(1, 2, 50)}
    assert [m.suffix for m in media_of(output)] == [".mp4", ".wav"]


def test_pixels_decide_the_hash() -> None:
    assert _picture(1).sha256 == _picture(1).sha256 != _picture(2).sha256


@pytest.mark.parametrize("name", ["a.png", "b.MP4"])
def test_an_output_that_looks_like_a_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"^output: expected a folder"):
        check_output(tmp_path / name)
    assert not (tmp_path / name).exists()


def test_a_folder_is_made_with_its_first_file(tmp_path: Path) -> None:
    check_output(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (picture,), _ = _save(tmp_path / "a" / "b", _picture())
    assert picture.exists()


def test_an_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match=r"^output: "):
            check_output(path)


def test_a_link_to_nothing_is_refused_before_the_picture_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(InputError, match=r"^output: .* is a link to nothing"):
        check_output(tmp_path / "link")


def test_a_place_that_takes_no_file_is_refused_whatever_its_permissions_say() -> None:
    """Nobody can write there, and `os.access` says that root can."""
    if not Path("/proc/self").exists():
        pytest.skip("needs /proc")
    with pytest.raises(InputError, match=r"^output: '/proc' cannot be written to: "):
        check_output(Path("/proc/new"))


def test_asking_for_a_place_leaves_nothing(tmp_path: Path) -> None:
    check_output(tmp_path / "a" / "b")
    check_output(tmp_path)
    assert not list(tmp_path.iterdir())


def test_slug() -> None:
    assert slug("A red  heart!") == "a-red-heart"
    assert slug("../../etc/passwd") == "etc-passwd"
    assert slug("") == slug(None) == slug("!!!") == "item"
    assert slug("ein großes Herz, 大きな心") == "ein-großes-herz-大きな心"
    assert len(slug("word " * 50)) <= 48
