"""A picture on the command line: the bundled model starts from it, without a class being named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_process import MODEL, Done, run_many
from PIL import Image

STEPS = ["--seed", "1", "--num-inference-steps", "2", *MODEL]
IMAGE = ["--image", "wide.png", "--strength", "0.5"]
MASK = [*IMAGE, "--mask-image", "mask.png"]
NAMED = "ZImageImg2ImgPipeline"


def _prepare(folder: Path) -> None:
    """A picture whose middle square is blue, one that is that square, and a file of both kinds."""
    wide = Image.new("RGB", (256, 128), "red")
    wide.paste("blue", (64, 0, 192, 128))
    wide.save(folder / "wide.png")
    Image.new("RGB", (128, 128), "blue").save(folder / "blue.png")
    mask = Image.new("L", (256, 128), 0)
    mask.paste(255, (64, 0, 128, 128))  # the left half of what is left
    mask.save(folder / "mask.png")
    lines: list[dict[str, object]] = [
        {"prompt": "x"},
        {"prompt": "x", "image": "wide.png", "strength": 0.5},
        {"prompt": "x", "image": "wide.png", "strength": 0.5, "mask_image": "mask.png"},
        {"prompt": "x", "strength": 0.5},
        {"image": "wide.png"},
    ]
    (folder / "mixed.jsonl").write_text("\n".join(map(json.dumps, lines)))


def _commands() -> dict[str, list[str]]:
    commands = {
        "plain": ["generate", "x", *STEPS],
        "image": ["generate", "x", *STEPS, *IMAGE],
        "named": ["generate", "x", *STEPS, *IMAGE, "--pipeline", NAMED],
        "square": ["generate", "x", *STEPS, "--image", "blue.png", "--strength", "0.5"],
        "mask": ["generate", "x", *STEPS, *MASK],
        "small": ["generate", "x", *STEPS, *IMAGE, "--height", "64", "--width", "96"],
        "rewritten": ["generate", "x", *STEPS, *IMAGE, "--rewrite-prompt"],
        "again": ["generate", "--from", "image/x-1.png"],
        "mask again": ["generate", "--from", "mask/x-1.json"],
        "other class": ["generate", "x", *STEPS, *IMAGE, "--pipeline", "ZImagePipeline"],
        "no prompt": ["generate", *STEPS, *IMAGE],
        "mixed": ["batch", "mixed.jsonl", *STEPS],
        "mixed again": ["batch", "mixed.jsonl", *STEPS],
    }
    named = {n: [*words, "--output", n.removesuffix(" again")] for n, words in commands.items()}
    size = ["--height", "32", "--width", "32", *STEPS]
    return {**named, "inspect": ["inspect", "x", *size, *IMAGE, "--json"]}


Made = tuple[Path, dict[str, Done]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("pictures")
    _prepare(folder)
    commands = _commands()
    results = run_many(list(commands.values()), folder, timeout=480)
    return folder, dict(zip(commands, results, strict=True))


def _picture(made: Made, name: str) -> bytes:
    with Image.open(made[0] / name) as picture:
        return picture.tobytes()


def _drawn(made: Made, name: str) -> bytes:
    assert made[1][name].code == 0, made[1][name].err
    return _picture(made, f"{name}/x-1.png")


def _record(made: Made, name: str) -> dict[str, dict[str, object]]:
    text = (made[0] / f"{name}.json").read_text()
    return json.loads(text)["record"]


def test_a_picture_alone_is_enough(made: Made) -> None:
    """It draws what the class named by hand draws, and says which class that is."""
    assert _drawn(made, "image") == _drawn(made, "named") != _drawn(made, "plain")
    first = made[1]["image"].out.splitlines()[0]
    assert first == (
        f"picture  {NAMED} on the same weights: ZImagePipeline does not start from a picture"
    )
    assert not made[1]["named"].out.startswith("picture  ZImage")


def test_a_picture_of_another_shape_is_cropped_at_the_centre(made: Made) -> None:
    assert _drawn(made, "image") == _drawn(made, "square")
    said = "picture  wide.png 256x128 -> 128x128, scaled and cropped at the centre"
    assert said in made[1]["image"].out.splitlines()
    assert "cropped" not in made[1]["square"].out
    with Image.open(made[0] / "small" / "x-1.png") as picture:
        assert picture.size == (96, 64)
    with Image.open(made[0] / "wide.png") as picture:
        assert picture.size == (256, 128)


def test_a_mask_is_cropped_with_the_picture_and_keeps_what_is_black(made: Made) -> None:
    _drawn(made, "mask")
    record = _record(made, "mask/x-1")
    assert record["pipeline"] == record["model"]["pipeline"] == "ZImageInpaintPipeline"
    with Image.open(made[0] / "mask" / "x-1.png") as picture:
        kept = [picture.getpixel((x, 64)) for x in (90, 110)]
    for red, green, blue in kept:
        assert blue > 180 and red < 90 and green < 90, kept


@pytest.mark.parametrize("name", ["image", "mask"])
def test_the_record_makes_it_again(made: Made, name: str) -> None:
    again = "again" if name == "image" else "mask again"
    done = made[1][again]
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1].startswith(f"same bytes as {name}/x-1.")
    assert str(_record(made, f"{name}/x-1")["request"]["image"]) == f"['{made[0] / 'wide.png'}']"


def test_the_prompt_of_a_picture_can_be_written_out(made: Made) -> None:
    assert made[1]["rewritten"].code == 0, made[1]["rewritten"].err


def test_a_file_may_mix_both_kinds_and_is_resumed(made: Made) -> None:
    done = made[1]["mixed"]
    assert done.code == 1
    assert "3 made, 0 already there, 2 failed (line 4, 5)" in done.out
    told = [line for line in done.out.splitlines() if line.startswith("line ")]
    assert told == [
        "line 1 of 5",
        f"line 2 of 5  {NAMED}",
        "line 3 of 5  ZImageInpaintPipeline",
    ]
    assert "line 4: strength: ZImagePipeline does not take it" in done.err
    assert f"line 5: prompt: {NAMED} needs a prompt" in done.err
    pictures = ["plain/x-1.png", "image/x-1.png", "mask/x-1.png"]
    for number, alone in enumerate(pictures, start=1):
        assert _picture(made, f"mixed/000{number}-x-1.png") == _picture(made, alone)
    assert "0 made, 3 already there, 2 failed" in made[1]["mixed again"].out


def test_inspect_runs_the_class_that_generate_would(made: Made) -> None:
    done = made[1]["inspect"]
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["pipeline"] == NAMED
    assert "on the same weights" in done.err


def test_a_named_class_is_never_replaced(made: Made) -> None:
    done = made[1]["other class"]
    assert done.code == 2 and not (made[0] / "other class").exists()
    assert "--image: ZImagePipeline does not take it; it takes" in done.err
    assert done.err.strip().endswith(f"; {NAMED} takes it")


def test_a_picture_without_words_is_refused_in_words(made: Made) -> None:
    done = made[1]["no prompt"]
    assert done.code == 2 and not (made[0] / "no prompt").exists()
    assert f"{NAMED} needs a prompt" in done.err
