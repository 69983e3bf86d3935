"""`dit-graphs demo` before anything is loaded: what it needs and what it refuses."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec

import pytest

from dit_graphs.app.cli import main


def test_without_gradio_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec

    def hidden(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "gradio" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    assert main(["demo"]) == 2
    assert "pip install 'dit-graphs[app]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "0"], "--port: expected a whole number from 1 to 65535, got 0"),
        (["--model", "./nowhere"], "--model: no such folder or file"),
        (["--backend", "fast"], "--backend: expected auto, full"),
        (["--output", __file__], "--output: expected a folder"),
        (["--lora-dir", "./nowhere"], "--lora-dir: expected a folder"),
    ],
)
def test_a_wrong_flag_is_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    assert words in capsys.readouterr().err
