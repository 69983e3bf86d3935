"""Forged records and impossible values sent to a served page: refused in words, page alive."""

from __future__ import annotations

import json
import threading

import pytest

pytest.importorskip("gradio")

from demo_http import SMALL, Stranger, png_of, record_of, restored


@pytest.mark.parametrize(
    "request_",
    [
        {"prompt": "x", "width": -64},
        {"prompt": "x", "num_inference_steps": -1},
        {"prompt": "x", "guidance_scale": float("nan")},
        {"prompt": "x", "strength": float("inf")},
        {"prompt": "x", "guidance_scale": 10**400},
        {"prompt": "x", "width": 10**30},
        {"prompt": "x", "seed": 2**70},
        {"prompt": "x", "unknown": 1},
        {"prompt": ["x"]},
        {"prompt": "x", "image": {"path": "/etc/hostname"}},
        {"prompt": "x", "set": [1]},
        {"prompt": "x", "set": {"a": "1e5000"}},
        [],
    ],
)
def test_a_record_with_impossible_values_is_refused_in_words(
    stranger: Stranger, request_: dict[str, object]
) -> None:
    text = json.dumps(record_of(request_)).replace('"1e5000"', "1" + "0" * 5000)
    for name, data in (("a.png", png_of(text)), ("a.json", text.encode())):
        success, fields, sent = stranger.send("restore", restore=stranger.upload(data, name))
        assert success, sent
        assert 'role="alert"' in fields["dg-restored"]


@pytest.mark.parametrize(
    "more",
    [
        {"model": ["unsaved"]},
        {"model": {"model": "unsaved/ZImagePipeline", "lora": ["x", 7, {"a": 1}]}},
        {"pipeline": 7},
        {"format": "1"},
    ],
)
def test_a_record_of_the_wrong_kind_never_breaks_the_page(
    stranger: Stranger, more: dict[str, object]
) -> None:
    fields = restored(stranger, {"prompt": "x"}, **more)
    assert fields["dg-restored"]


def test_a_size_above_the_limit_is_restored_with_a_note(stranger: Stranger) -> None:
    fields = restored(stranger, {"prompt": "x", "width": 100_000, "height": 64})
    assert fields["dg-prompt"] == "x"
    assert "at most 512 here" in fields["dg-restored"]


MARKUP = '<img src=x onerror="alert(1)"><script>alert(2)</script>'


def test_markup_in_a_file_or_a_field_stays_text(stranger: Stranger) -> None:
    model = {"model": MARKUP, "lora": [f"{MARKUP}:1.0"]}
    fields = restored(stranger, {"prompt": MARKUP}, model=model, pipeline=MARKUP)
    assert "&lt;img" in fields["dg-restored"]
    assert "<img" not in fields["dg-restored"]
    success, fields, _ = stranger.send(
        "generate", prompt=f"{MARKUP}\nsecond\nline", negative=MARKUP, **SMALL
    )
    assert success
    assert "&lt;img" in fields["dg-details"]
    for name in ("dg-details", "dg-stage", "dg-graphs-panel"):
        assert "<img" not in fields[name]
        assert "<script" not in fields[name]
    _, fields, _ = stranger.send("generate", prompt="x", lora=MARKUP, **SMALL)
    assert "<img" not in fields["dg-stage"]
    _, fields, _ = stranger.send("warm_up", prompt="x", sizes=MARKUP, **SMALL)
    assert "<img" not in fields["dg-warmed"]


def test_a_book_in_a_field_is_refused_in_words(stranger: Stranger) -> None:
    book = "word " * 20_000
    for event, output in (("generate", "stage"), ("compare", "comparison"), ("warm_up", "warmed")):
        success, fields, _ = stranger.send(event, prompt=book, **SMALL)
        assert success
        assert "Expected at most 10,000 characters" in fields[f"dg-{output}"]
    success, fields, _ = stranger.send("generate", prompt="x", negative=book, **SMALL)
    assert "Check “negative prompt”" in fields["dg-stage"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", "9" * 6000),
        ("seed", "-1"),
        ("guidance", float("nan")),
        ("guidance", float("inf")),
        ("width", 1e300),
        ("count", 10**9),
        ("steps", 0),
        ("count", 0),
        ("count", 2.5),
        ("width", 64.5),
        ("width", "abc"),
        ("width", [64]),
        ("height", {"a": 1}),
        ("guidance", 10**400),
    ],
)
def test_a_number_nobody_would_type_is_refused_and_the_next_one_is_fine(
    stranger: Stranger, field: str, value: object
) -> None:
    success, fields, _ = stranger.send("generate", prompt="x", **{**SMALL, field: value})
    assert success
    assert "Check “" in fields["dg-stage"]
    success, fields, _ = stranger.send("generate", prompt="x", **SMALL)
    assert "Done: 1 picture" in fields["dg-stage"]


@pytest.mark.parametrize("seed", ["-4", "1.5", "9" * 20, "seven"])
def test_a_rewrite_refuses_the_seed_that_generate_refuses(stranger: Stranger, seed: str) -> None:
    """It took another one instead, and wrote what no command line writes."""
    for event, output in (("rewrite", "restored"), ("generate", "stage")):
        fields = {**SMALL, "seed": seed} if event == "generate" else {"seed": seed}
        success, shown, _ = stranger.send(event, prompt="a cat", **fields)
        assert success
        assert "Check “seed”" in shown[f"dg-{output}"]


def test_two_sessions_restore_their_own_settings(address: str) -> None:
    names = ["first", "second", "third", "fourth"]
    strangers = [Stranger(address) for _ in names]
    shown: dict[str, dict[str, object]] = {}

    def restore(name: str, stranger: Stranger) -> None:
        for _ in range(3):
            shown[name] = restored(stranger, {"prompt": name, "num_inference_steps": len(name)})

    threads = [
        threading.Thread(target=restore, args=pair) for pair in zip(names, strangers, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in names:
        assert (shown[name]["dg-prompt"], shown[name]["dg-steps"]) == (name, len(name))
