"""The soak does what it says: every kind of call, comparisons that can fail, an honest status."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks import soak
from benchmarks.shapes import Size
from dit_graphs.runner import GraphRunner
from dit_graphs.tree import map_tensors


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled model at one small size, two steps a picture."""
    subject = replace(soak.SUBJECTS["bundled"], small_sizes=(Size(64, 64),), steps=(4,))
    monkeypatch.setitem(soak.SUBJECTS, "bundled", subject)
    monkeypatch.setattr(soak, "NUM_SAMPLES", 4)


ARGUMENTS = ["--calls", "11", "--device", "cpu", "--compare-every", "1", "--allow-dirty"]


def test_a_clean_run_counts_every_kind_of_call(
    small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert soak.main([*ARGUMENTS, "--seed", "59"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = result["rows"]
    assert result["is_clean"] and row["num_mismatches"] == row["num_errors"] == 0
    assert sum(row["calls"].values()) == 11
    assert set(row["calls"]) == {"draw", "stop", "fail", "refuse", "swap", "turn"}
    assert row["compared"] == row["calls"]["draw"] >= 5
    assert row["replays"] > 12 and row["captures"] >= 2
    assert [sample["call"] for sample in row["curve"]] == [0, 2, 4, 6, 8, 10]


def test_replays_that_are_nearly_right_fail_the_run(
    small: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = GraphRunner._replay

    def nearly(self: GraphRunner, *args: object) -> object:
        return map_tensors(replay(self, *args), lambda tensor: tensor * 1.0001)

    monkeypatch.setattr(GraphRunner, "_replay", nearly)
    assert soak.main([*ARGUMENTS, "--calls", "3", "--seed", "59"]) == 1
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row["num_mismatches"] > 0
    assert "adapter" in row["mismatches"][0]


def test_growth_is_what_the_second_half_adds() -> None:
    def curve(*values: int) -> list[dict[str, int]]:
        return [{"call": i, "reserved_bytes": value} for i, value in enumerate(values)]

    # the first quarter holds the first captures and does not count
    assert soak.growth(curve(0, 0, 50, 60, 60, 60, 60, 60), "reserved_bytes") == 0
    assert soak.growth(curve(0, 0, 50, 60, 60, 70, 80, 75), "reserved_bytes") == 20
    assert soak.growth(curve(1, 9), "reserved_bytes") == 0
