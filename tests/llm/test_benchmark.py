"""The decode benchmark runs to its end on a CPU, compares before it times, and says what failed."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import decode

ARGUMENTS = [
    *("--model", "tiny", "--device", "cpu", "--batch", "1,2", "--context", "12"),
    *("--new-tokens", "5", "--no-static", "--allow-dirty"),
]


def test_a_run_ends_with_one_line_of_json(capsys):
    assert decode.main(ARGUMENTS) == 0
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert report["is_equal"] and len(report["rows"]) == 2
    for row in report["rows"]:
        assert row["problems"] == [] and row["first_difference"] is None
        assert row["graph_ms"] != 0 and row["first_token_ms"] > 0 and row["padded_prompt_ms"] > 0
        assert "speedup" not in row  # a CPU has no launches to save
    assert "empty_slot_ms" in report["rows"][1]


def test_a_wrong_text_fails_the_run(capsys, monkeypatch):
    original = decode.Texts.plain

    def plain(self, count, **options):
        return (original(self, count, **options) + 1) % 128

    monkeypatch.setattr(decode.Texts, "plain", plain)
    assert decode.main(ARGUMENTS) == 1
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert any("differs at 0" in problem for row in report["rows"] for problem in row["problems"])


def test_close_logits_are_told_from_far_ones():
    model = decode.build("tiny", "cpu")
    gap, noise = decode._gap_and_noise(model, torch.arange(3, 20)[None])
    assert gap > noise >= 0


@pytest.mark.parametrize("wrong", [["--model", "none"], ["--batch", "a"], ["--mod", "tiny"]])
def test_a_wrong_command_line_exits_2(wrong, capsys):
    with pytest.raises(SystemExit) as caught:
        decode.parse(wrong)
    assert caught.value.code == 2
