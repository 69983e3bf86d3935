"""The benchmarks measure what they say: real shapes, honest equality, files that can be refuted.

On the CPU, at small widths; the numbers themselves are made on a GPU.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import dit_graphs
from benchmarks import (
    check,
    equality,
    forward,
    memory,
    models,
    pipelines,
    protocol,
    results,
    shapes,
    whole,
)
from benchmarks.shapes import Size
from benchmarks.turns import Turns

VIDEO = {"wan-1.3b", "ltx"}


def _small_size(name: str) -> Size:
    return Size(64, 64, 9) if name in VIDEO else Size(64, 64)


@pytest.mark.parametrize("name", models.MODELS)
def test_small_model_runs_and_depends_on_every_input(name: str) -> None:
    module = models.build(name, "cpu", small=True)
    inputs = models.inputs(name, _small_size(name), device="cpu")
    assert forward.eager_problems(module, inputs) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", models.MODELS)
def test_full_model_takes_the_shapes_of_every_size(name: str) -> None:
    module = models.build(name, "meta")
    for text in models.MODELS[name].sizes:
        inputs = models.inputs(name, Size.parse(text), device="meta")
        with torch.no_grad():
            (output, *_) = equality.leaves(module(**inputs))
        latents = next(
            leaf for leaf in equality.leaves(inputs) if shapes.is_latents(leaf.path)
        ).tensor
        assert output.tensor.shape[-2:] == latents.shape[-2:]


@pytest.mark.parametrize("name", ["wan-1.3b", "z-image", "pixart-sigma"])
def test_tables_are_built_as_a_loader_builds_them(name: str) -> None:
    """In float32 where the class computes them so, and equal to those of a plain construction."""
    spec = models.MODELS[name]
    module = models.build(name, "cpu", small=True)
    plain = type(module)(**{**spec.config, **spec.small})
    wanted = dict(plain.named_buffers())
    for path, buffer in module.named_buffers():
        assert torch.equal(buffer, wanted[path]), path
    assert {p.dtype for p in module.parameters()} == (
        {torch.bfloat16, torch.float32} if name == "wan-1.3b" else {torch.bfloat16}
    )
    if name == "wan-1.3b":
        assert module.scale_shift_table.dtype == torch.float32
        assert module.rope.freqs_cos.dtype == torch.float32


def test_a_step_changes_latents_and_time_and_a_picture_changes_the_prompt_too() -> None:
    inputs = models.inputs("pixart-sigma", Size(64, 64), device="cpu")
    step = models.change(inputs, 1, per_step=True)
    picture = models.change(inputs, 1)

    def changed(tree: dict[str, object]) -> set[str]:
        return {
            a.path
            for a, b in zip(equality.leaves(inputs), equality.leaves(tree), strict=True)
            if not torch.equal(a.tensor, b.tensor)
        }

    assert changed(step) == {"['hidden_states']", "['timestep']"}
    assert changed(picture) == changed(step) | {"['encoder_hidden_states']"}
    for before, after in zip(equality.leaves(inputs), equality.leaves(picture), strict=True):
        assert before.tensor.dtype == after.tensor.dtype
        assert before.tensor.stride() == after.tensor.stride(), before.path


@pytest.mark.parametrize("name", pipelines.PIPELINES)
def test_small_pipeline_makes_a_picture_of_the_seed(name: str) -> None:
    pipe = pipelines.build(name, "cpu", small=True)
    size = Size(64, 64, 5) if name == "wan-1.3b" else Size(64, 64)
    first, same, other = (
        pipelines.picture(pipe, pipelines.call_kwargs(name, size, steps=2, seed=seed, device="cpu"))
        for seed in (0, 0, 1)
    )
    assert not equality.defects([first])
    assert equality.equal([first], [same])
    assert equality.changed_fraction([first], [other]) > equality.MIN_CHANGED


def test_sizes_are_read_and_written() -> None:
    for text in ("512", "512x768", "256x448x17"):
        assert str(Size.parse(text)) == text
    assert Size.parse("256x256x17").frames == 17
    with pytest.raises(ValueError, match="1x2x3x4"):
        Size.parse("1x2x3x4")


class TestForward:
    options = forward.Options(device="cpu", backend="recorded", attention="auto", rounds=5)
    size = Size(64, 64)

    def test_a_replayed_forward_is_equal(self) -> None:
        module = models.build("pixart-sigma", "cpu", small=True)
        row = forward.measure("pixart-sigma", module, self.size, self.options)
        assert row["problems"] == [] and row["is_equal"] is True
        assert (row["segments"], row["breaks"]) == (1, 0)
        assert "speedup" not in row, "a CPU shows no speed-up"

    def test_a_backend_that_never_replays_fails(self) -> None:
        module = models.build("pixart-sigma", "cpu", small=True)
        options = forward.Options(device="cpu", backend="off", attention="auto", rounds=5)
        row = forward.measure("pixart-sigma", module, self.size, options)
        assert row["is_equal"] is False
        assert "0 of" in str(row["problems"])

    @pytest.mark.parametrize("fault", ["stale", "rounded"])
    def test_a_wrong_replay_fails(self, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A graph that returns its capture's output, or one that is off by a rounding."""
        module = models.build("pixart-sigma", "cpu", small=True)
        monkeypatch.setattr(forward, "dit_graphs", _FaultyGraphs(fault))
        row = forward.measure("pixart-sigma", module, self.size, self.options)
        assert row["is_equal"] is False
        assert "differs from eager" in str(row["problems"])

    def test_a_dead_output_is_a_problem(self) -> None:
        class Dead(nn.Module):
            def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
                return [x * 0]

        assert forward.eager_problems(Dead(), {"x": torch.randn(4)})

    def test_a_wrong_command_line_exits_2(self) -> None:
        for line in (["--models", "nobody"], ["--mod", "sana"], ["--small", "--output", "x.json"]):
            with pytest.raises(SystemExit) as stop:
                forward.parse(line)
            assert stop.value.code == 2


class _FaultyGraphs:
    """Stands in for the library: everything is counted as replayed, and nothing is right."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.replays = 0
        self.first: object = None

    def wrap(self, module: nn.Module, config: object) -> None:
        def call(**inputs: object) -> object:
            self.replays += 1
            output = forward.eager(module, inputs)
            self.first = self.first or output
            if self.fault == "stale":
                return self.first
            return [leaf.tensor.float() * (1 + 2**-7) for leaf in equality.leaves(output)]

        module._compiled_call_impl = call

    def unwrap(self, module: nn.Module) -> None:
        module._compiled_call_impl = None

    def request(self) -> object:
        return torch.no_grad()

    def stats(self, module: nn.Module) -> dict[str, object]:
        return {"components": {"denoiser": {"replays": self.replays, "graphs": []}}}


def test_memory_scenarios_make_the_plain_picture() -> None:
    """All in this process: what a scenario does is the same, only its memory is not read."""
    plan = memory.scenarios(["256"], "384")
    assert plan["ladder, largest first"] == [["384", "256"]]
    assert plan["ladder, rising"] == [["256"], ["384"]]
    plain = memory.run_scenario("z-image", [], "64", "cpu")
    graphs = memory.run_scenario("z-image", [["64", "32"]], "64", "cpu")
    assert graphs["digest"] == plain["digest"]
    assert isinstance(graphs["replays"], int) and graphs["replays"] >= memory.STEPS
    assert not plain["defects"]


class TestProtocol:
    def test_variants_run_in_turn(self) -> None:
        order: list[str] = []
        variants = {name: (lambda name=name: order.append(name)) for name in "ab"}
        timings = protocol.interleaved(variants, rounds=5, warmups=1)
        assert "".join(order) == "ab" + "ab" * 5
        assert len(timings["a"].samples_ms) == 5

    def test_few_rounds_are_refused(self) -> None:
        with pytest.raises(ValueError, match="at least 5"):
            protocol.interleaved({}, rounds=4)

    def test_percentile_is_a_measured_value(self) -> None:
        samples = [float(i) for i in range(1, 101)]
        assert protocol.percentile(samples, 95) == 95.0
        assert protocol.percentile([3.0, 1.0, 2.0], 95) == 3.0

    def test_slow_or_hot_gpu_is_suspect(self) -> None:
        cool = protocol.parse_gpu_samples("1980, 1980, 40, 300.5\n1900, 1980, 50, 600.0\n19")
        assert cool == [[1980.0, 1980.0, 40.0, 300.5], [1900.0, 1980.0, 50.0, 600.0]]
        assert protocol.summarise_gpu_samples(cool)["suspect"] == []
        hot = protocol.parse_gpu_samples("900, 1980, 81, 300\n900, 1980, 60, 300\n")
        assert protocol.summarise_gpu_samples(hot)["suspect"] == [
            "median SM clock under half of the maximum",
            "started above 80 °C",
        ]
        assert protocol.summarise_gpu_samples([])["suspect"] == ["no clock samples"]


def test_gpu_clock_reads_start_and_end_even_if_the_loop_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(
        '#!/bin/sh\ncase "$*" in *--loop-ms*) exec sleep 60;; esac\necho "1800, 1980, 45, 500.0"\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with protocol.GpuClock() as clock:
        pass
    summary = clock.summary()
    assert (summary["num_samples"], summary["start_celsius"]) == (2, 45.0)
    assert summary["suspect"] == []


def _git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    command = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small clone-like tree with one commit, which the result files are about."""
    for name in ("dit_graphs", "pipelines", "benchmarks/results"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "dit_graphs" / "runner.py").write_text("x = 1\n")
    (tmp_path / "benchmarks" / "forward.py").write_text("y = 1\n")
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", "-A")
    _git(tmp_path, "commit", "-qm", "one")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "FOLDER", tmp_path / "benchmarks" / "results")
    return tmp_path


def _write_run(root: Path, rows: list[dict[str, object]], **changes: object) -> None:
    run = results.run_record("benchmarks/forward.py", rows, provenance=results.provenance())
    run["sources"] = results.sources(root)
    results.write(Path("forward.json"), {**run, **changes})


ROW: dict[str, object] = {
    "key": "z-image 512 full auto",
    "speedup": 2.2891,
    "graph_bytes": 1014 * 2**20,
    "timings": {"eager": {"median_ms": 84.44, "samples_ms": [77.77]}},
}


class TestResultFiles:
    def test_a_dirty_tree_is_refused_and_marked(self, repository: Path) -> None:
        assert not results.provenance().is_dirty
        (repository / "dit_graphs" / "runner.py").write_text("x = 2\n")
        with pytest.raises(results.DirtyTree, match=r"runner\.py"):
            results.provenance()
        assert results.provenance(allow_dirty=True).is_dirty

    def test_without_git_the_commit_must_be_given(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(results, "ROOT", tmp_path)
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
        with pytest.raises(results.DirtyTree, match="--commit"):
            results.provenance()
        assert results.provenance(commit="abc") == results.Provenance("abc", is_dirty=False)
        assert results.provenance(allow_dirty=True).is_dirty

    def test_runs_merge_by_row(self, repository: Path) -> None:
        _write_run(repository, [ROW, {**ROW, "key": "other", "speedup": 9.0}])
        _write_run(repository, [{**ROW, "speedup": 2.5}])
        runs = json.loads((results.FOLDER / "forward.json").read_text())["runs"]
        found = {row["key"]: row["speedup"] for run in runs for row in run["rows"]}
        assert found == {ROW["key"]: 2.5, "other": 9.0}
        assert len(runs) == 2

    def test_sources_are_named_as_git_names_them(self, repository: Path) -> None:
        tree = _git(repository, "ls-tree", "-r", "HEAD", "--", "dit_graphs/runner.py")
        assert results.sources(repository)["dit_graphs/runner.py"] == tree.split()[2]


def _failures(root: Path, readme: str) -> list[str]:
    (root / "README.md").write_text(readme)
    return check.check(root)[0]


class TestCheck:
    @pytest.mark.parametrize(
        "text", ["2.29x", "2.3x", "229 %", "1,014 MiB", "0.99 GiB", "84.4 ms", "2 at 512²"]
    )
    def test_a_measured_number_passes(self, repository: Path, text: str) -> None:
        _write_run(repository, [ROW])
        assert _failures(repository, f"[{text}](benchmarks/results/forward.json)\n") == []

    @pytest.mark.parametrize(
        "text", ["2.28x", "2.4x", "230 %", "1,015 MiB", "77.77 ms", "3 at 512²"]
    )
    def test_another_number_fails(self, repository: Path, text: str) -> None:
        _write_run(repository, [ROW])
        assert len(_failures(repository, f"[{text}](benchmarks/results/forward.json)\n")) == 1

    def test_the_row_restricts(self, repository: Path) -> None:
        _write_run(repository, [ROW, {"key": "sana 512", "speedup": 9.0}])
        link = "[9.0x](benchmarks/results/forward.json#{})\n"
        assert _failures(repository, link.format("sana%20512")) == []
        assert len(_failures(repository, link.format("z-image"))) == 1

    def test_a_missing_file_fails(self, repository: Path) -> None:
        (failure,) = _failures(repository, "[1x](benchmarks/results/nothing.json)\n")
        assert "nothing.json" in failure

    def test_marked_tables_are_checked_past_the_first_column(self, repository: Path) -> None:
        _write_run(repository, [ROW])
        table = (
            "<!-- results: forward.json -->\n| size | speed-up |\n|---|---|\n| 512 | {} |\n\n"
            "| unmarked | 7 |\n|---|---|\n| 1 | 7 |\n"
        )
        assert _failures(repository, table.format("2.29x")) == []
        (failure,) = _failures(repository, table.format("2.30x"))
        assert failure.startswith("README.md:4: 2.30x")

    def test_uncommitted_sources_prove_nothing(self, repository: Path) -> None:
        _write_run(repository, [ROW], is_dirty=True)
        assert len(_failures(repository, "[2.29x](benchmarks/results/forward.json)\n")) == 1

    def test_a_run_of_other_sources_than_its_commit_fails(self, repository: Path) -> None:
        _write_run(repository, [ROW])
        assert _failures(repository, "") == []
        sources = {**results.sources(repository), "dit_graphs/runner.py": "0" * 40}
        _write_run(repository, [ROW], sources=sources)
        (failure,) = _failures(repository, "")
        assert "dit_graphs/runner.py" in failure

    def test_a_stale_run_is_listed(self, repository: Path) -> None:
        _write_run(repository, [ROW])
        (repository / "dit_graphs" / "runner.py").write_text("x = 3\n")
        failures, remarks = check.check(repository)
        assert failures == []
        assert any("stale" in line and "runner.py" in line for line in remarks)


def test_whole_pictures_are_compared_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = dit_graphs.accelerate(pipelines.build("z-image", "cpu", small=True), backend="recorded")
    row, _ = whole.measure("z-image", pipe, Size.parse("64"), 2, protocol.MIN_ROUNDS, Turns())
    assert row["is_equal"] and row["replays"] and row["plain_ms"]
    draw, calls = pipelines.picture, []

    def wrong_when_replayed(*given: object) -> torch.Tensor:
        calls.append(given)
        return draw(*given) + (len(calls) > len(whole.SEEDS))  # the plain ones come first

    monkeypatch.setattr(pipelines, "picture", wrong_when_replayed)
    row, _ = whole.measure("z-image", pipe, Size.parse("64"), 2, protocol.MIN_ROUNDS, Turns())
    assert not row["is_equal"] and "plain_ms" not in row
