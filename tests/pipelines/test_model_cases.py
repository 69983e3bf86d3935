"""The sweep over diffusers' classes keeps what it has reached; docs/models.md says what that is.

Each case runs as the sweep runs it (plain beside wrapped, two sizes, sequential and batched
guidance, bit for bit) and must do no worse than benchmarks/results/sweep-cpu.json. A sample runs by
default, every case under `-m slow`.
"""

from __future__ import annotations

import inspect
import json
from importlib.metadata import version
from pathlib import Path

import diffusers
import pytest
import torch
from torch import nn
from twin import Twin, Where

from benchmarks import results, sweep, sweep_docs, sweep_table
from benchmarks.sweep_cases import Case

CPU = Where("recorded", torch.device("cpu"))
COMMITTED = sweep_docs.Column.read(sweep_docs.CPU)

# One of each kind of finding, and nothing that takes more than a few seconds.
SAMPLE = (
    "AutoencoderKL.decode",
    "AutoencoderKL.encode",
    "AutoencoderKLQwenImage.decode",
    "AutoencoderOobleck.decode",
    "BriaFibo2Transformer2DModel",
    "ControlNetModel",
    "FluxTransformer2DModel",
    "GlmImageTransformer2DModel",
    "HiDreamImageTransformer2DModel",
    "HunyuanImageTransformer2DModel",
    "HunyuanVideo15Transformer3DModel",
    "Kandinsky6SRTransformer3DModel",
    "Lumina2Transformer2DModel",
    "MochiTransformer3DModel",
    "OmniGenTransformer2DModel",
    "QwenImage21Transformer2DModel",
    "QwenImageTransformer2DModel",
    "UNet2DConditionModel#SDXL",
    "WanTransformer3DModel",
    "ZImageTransformer2DModel",
)
TABLE = [case.key for case in sweep_table.CASES]
ATTENTION_SAMPLE = (
    "FluxTransformer2DModel",
    "Lumina2Transformer2DModel",
    "WanTransformer3DModel",
    "ZImageTransformer2DModel",
)

# Its rotary buffer gets new values on every call, which no graph with breaks may do.
WRITES_STATE = {"OmniGenTransformer2DModel"}


def _sampled(keys: list[str], sample: tuple[str, ...]) -> list[object]:
    assert set(sample) <= set(keys), set(sample) - set(keys)
    slow = [pytest.mark.slow]
    return [pytest.param(key, marks=[] if key in sample else slow) for key in keys]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", _sampled(list(sweep.CASES), SAMPLE))
def test_a_class_does_no_worse_than_committed(key: str) -> None:
    row = sweep.measure(sweep.CASES[key], sweep.Options("cpu", "recorded"))
    assert row["is_equal"], row["problems"]
    before = COMMITTED.rows[key]
    assert sweep_docs.rank(row) >= sweep_docs.rank(before), (row, before)


def test_every_committed_row_is_a_case_and_equal() -> None:
    assert set(COMMITTED.rows) == set(sweep.CASES)
    unequal = {key: row["problems"] for key, row in COMMITTED.rows.items() if not row["is_equal"]}
    assert not unequal


def test_every_class_of_diffusers_is_a_case_or_skipped_with_a_reason() -> None:
    families = ("transformers", "unets", "controlnets", "autoencoders")
    found = {
        name
        for name in dir(diffusers)
        if inspect.isclass(kind := getattr(diffusers, name, None))
        and issubclass(kind, nn.Module)
        and kind.__module__.startswith(tuple(f"diffusers.models.{family}" for family in families))
    }
    # weights without a forward of their own: parts of UNetMotionModel and UNetControlNetXSModel
    parts = {"MotionAdapter", "ControlNetXSAdapter"}
    known = {case.name for case in sweep.CASES.values()} | {one.name for one in sweep.SKIPPED}
    assert found - parts <= known, found - parts - known
    assert all(one.why for one in sweep.SKIPPED)


def test_the_page_is_what_the_generator_writes() -> None:
    assert sweep_docs.PAGE.read_text() == sweep_docs.current(), (
        "run python -m benchmarks.sweep --write-docs"
    )


def test_the_page_says_what_was_not_measured_and_what_was_unequal() -> None:
    row = {"kind": "dit", "outcome": "full", "captured_fraction": 1.0, "is_equal": False}
    cpu = sweep_docs.Column({"A": {"key": "A", **row, "problems": ["x"]}}, "CPU")
    page = sweep_docs.page(cpu, sweep_docs.Column({}, ""), [("B", "no network")], version("torch"))
    assert "| `A` | full | **no** | not measured | – |" in page
    assert "- `B`: no network." in page


def test_the_page_says_which_rows_are_of_which_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file may hold a few rows measured later; the rest is no younger for it."""
    machine = {"gpu": "H200", "versions": {"torch": "2.11.0"}}
    old = {"commit": "a" * 40, "machine": machine, "rows": [{"key": "A"}, {"key": "B"}]}
    new = {"commit": "b" * 40, "machine": machine, "rows": [{"key": "C"}]}
    (tmp_path / "two.json").write_text(json.dumps({"runs": [old, new]}))
    (tmp_path / "one.json").write_text(json.dumps({"runs": [new]}))
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    both = f"H200, torch 2.11.0, commit {'a' * 12} (2 rows), {'b' * 12} (1 row)"
    assert sweep_docs.Column.read("two.json").machine == both
    assert sweep_docs.Column.read("one.json").machine == f"H200, torch 2.11.0, commit {'b' * 12}"


class _Toy(nn.Module):
    """Adds one where it is the second model built, and never reads `ignored`."""

    built = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).built += 1
        self.shift = float(type(self).built - 1)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, ignored: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.shift


def test_the_sweep_reports_a_wrong_output_and_an_input_that_does_nothing() -> None:
    case = Case(
        kind="dit",
        name="Toy",
        make=_Toy,
        inputs=lambda draw, batch, width: {"x": draw(batch, width, 4), "ignored": draw(1)},
    )
    row = sweep.measure(case, sweep.Options("cpu", "recorded"))
    problems = row["problems"]
    assert isinstance(problems, list) and not row["is_equal"]
    assert "input['ignored'] changes 0% of the output" in problems
    # 4 steps of two sizes and 8 of batched guidance, wrong from the first call on
    assert sum("differ" in problem for problem in problems) == 16


def test_a_worse_outcome_ranks_lower() -> None:
    full, broken, eager = (
        {"outcome": "full", "captured_fraction": 1.0},
        {"outcome": "breakable", "captured_fraction": 0.55},
        {"outcome": "eager", "captured_fraction": 0.0},
    )
    less = {"outcome": "breakable", "captured_fraction": 0.5}
    ranks = [sweep_docs.rank(row) for row in (full, broken, less, eager, {"outcome": "failed"})]
    assert ranks == sorted(ranks, reverse=True) and len(set(ranks)) == 5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", _sampled(TABLE, ATTENTION_SAMPLE))
def test_a_denoiser_class_with_eager_attention(key: str) -> None:
    case = sweep.CASES[key]
    with torch.no_grad():
        twin = Twin(case.build(), CPU, attention="eager")
        for index in range(7):
            twin(**case.draw(index, 1, 1))
    if key in WRITES_STATE:
        assert "writes to module state" in twin.details["capture_failed"]
        return
    assert set(twin.fallbacks) == {"warming_up"}
    graph = twin.runner.report()["graphs"][0]
    assert graph["breaks"] >= 1
    assert twin.replays >= 3
