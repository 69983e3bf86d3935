"""How a command ends: its exit code and its last sentence, whatever stopped it."""

from __future__ import annotations

import errno
import io
import sys
from pathlib import Path

import pytest

from dit_graphs.app.cli import COMMANDS, main
from dit_graphs.app.cli.flags import Given
from dit_graphs.app.cli.report import listing_finished


def test_ctrl_c_inside_an_import_is_an_interrupt_though_a_library_wraps_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(given: Given) -> int:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise RuntimeError("Failed to import transformers.models") from error

    monkeypatch.setattr(COMMANDS["doctor"], "run", run)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted; no file was finished\n"


def test_a_disk_that_fails_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(given: Given) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "out/a.png")

    monkeypatch.setattr(COMMANDS["doctor"], "run", run)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "dit-graphs: out/a.png: No space left on device\n"


def test_ctrl_c_after_a_file_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That no file was finished stood under the list of those that were."""

    def run(given: Given) -> int:
        with listing_finished([Path("a.png")]):
            raise KeyboardInterrupt

    monkeypatch.setattr(COMMANDS["doctor"], "run", run)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "\ninterrupted; 1 finished:\n  a.png\n"


def test_a_name_no_file_can_have_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batch", "x" * 5000]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dit-graphs: no file can have this name: 'xxx") and len(error) < 120


def test_a_terminal_of_few_letters_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture was saved by then, and its path ended the run."""

    def run(given: Given) -> int:
        print("ein-großes-herz → 心 \udce9")
        return 0

    monkeypatch.setattr(COMMANDS["doctor"], "run", run)
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", output)
    assert main(["doctor"]) == 0
    output.seek(0)
    assert output.read() == r"ein-gro\xdfes-herz \u2192 \u5fc3 \udce9" + "\n"


@pytest.mark.parametrize("command", [["generate", "a"], ["demo"]])
def test_a_folder_without_a_name_is_refused(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--output", ""]) == 2
    assert capsys.readouterr().err == "dit-graphs: --output: expected a folder, got ''\n"
