"""The real command line, as a process, on the bundled model: what a user sees and is left with."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from cli_process import MODEL, Done, run, run_many
from PIL import Image

RECORDER = r"^(\d+) of (\d+) calls replayed by the CPU recorder: no CUDA graphs, no speed-up$"
BATCH = ["batch", "b.jsonl", "--num-inference-steps", "2", "--output", "out", *MODEL]
GRAPHS = r"^cuda graph: (\d+)/(\d+)( \(\d+ eager: [\w ,]+\))?$"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """The README's command in an empty folder."""
    folder = tmp_path_factory.mktemp("first")
    return folder, run("generate", "a red heart", "--seed", "7", *MODEL, cwd=folder)


def test_the_first_command_makes_a_picture_and_says_what_happened(
    first: tuple[Path, Done],
) -> None:
    folder, done = first
    assert done.code == 0, done.err
    assert "[transformers]" not in done.err, "what a library tells its developers"
    lines = done.out.splitlines()
    stages = [line.split()[0] for line in lines[:5]]
    assert stages == ["load", "encode", "denoise", "decode", "save"]
    assert all(re.match(r"\w+ +\d+\.\d\d s", line) for line in lines[:5])
    assert lines[2].endswith("8 steps")
    path = folder / "outputs" / "a-red-heart-7.png"
    assert re.fullmatch(
        r"outputs/a-red-heart-7\.png  128x128, seed 7, \d+\.\d\d s after loading", lines[5]
    )
    with Image.open(path) as picture:
        assert picture.size == (128, 128)
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "a-red-heart-7.json",
        "a-red-heart-7.png",
    ]


def test_the_last_line_is_what_the_sidecar_counted(first: tuple[Path, Done]) -> None:
    folder, done = first
    use = json.loads((folder / "outputs" / "a-red-heart-7.json").read_text())["graph_use"]
    has_cuda = torch.cuda.is_available()
    match = re.fullmatch(GRAPHS if has_cuda else RECORDER, done.out.splitlines()[-1])
    assert match is not None, done.out
    assert int(match[1]) == use["replays"]
    # On a GPU eight steps may not pay for a capture; the recorder is never asked to pay.
    assert has_cuda or use["replays"] >= 4
    assert int(match[2]) == use["replays"] + use["eager_calls"] >= 8
    assert sum(use["reasons"].values()) == use["eager_calls"]


def test_b73_from_a_png_or_a_sidecar_gives_the_same_bytes(first: tuple[Path, Done]) -> None:
    folder, _ = first
    source = folder / "outputs" / "a-red-heart-7.png"
    done = run("generate", "--from", str(source), "--output", "again", cwd=folder)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == f"same bytes as {source}"
    assert (folder / "again" / source.name).read_bytes() == source.read_bytes()


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A batch in which two of four lines fail."""
    folder = tmp_path_factory.mktemp("batch")
    (folder / "b.jsonl").write_text(
        '{"prompt": "a red heart", "seed": 7}\n'
        '{"prompt": "a cat", "width": 100}\n'
        "\n"
        '{"prompt": "a cat", "frames": 3}\n'
        '{"prompt": "a cat", "num_images": 2}\n'
    )
    return folder, run(*BATCH, cwd=folder)


def test_a_batch_goes_on_after_a_failed_line_and_ends_badly(batch: tuple[Path, Done]) -> None:
    folder, done = batch
    assert done.code == 1
    errors = done.err.splitlines()
    assert any(e.startswith("line 2: width: ZImagePipeline refuses it: ") for e in errors), errors
    assert any(e.startswith("line 4: frames: no such key; a request has") for e in errors)
    assert done.out.splitlines()[-1] == "3 made, 0 already there, 2 failed (line 2, 4)"
    names = [p.name for p in (folder / "out").iterdir()]
    assert len(names) == 6 and "0001-a-red-heart-7.png" in names


@pytest.fixture(scope="module")
def more(
    first: tuple[Path, Done], batch: tuple[Path, Done]
) -> tuple[Path, dict[str, Done], dict[str, int]]:
    """Many command lines in the batch's folder; and the files' ages before them."""
    folder = batch[0]
    record = first[0] / "outputs" / "a-red-heart-7.json"
    aged = json.loads(record.read_text())
    aged["record"]["environment"]["versions"]["torch"] = "2.0.0"
    aged["record"]["pixels_sha256"] = ["0"]
    aged["files"][0]["sha256"] = "0"
    (folder / "aged.json").write_text(json.dumps(aged))
    before = {p.name: p.stat().st_mtime_ns for p in (folder / "out").iterdir()}
    (folder / "out" / "0001-a-red-heart-7.png").unlink()
    fixed = (folder / "b.jsonl").read_text().replace("100", "64").replace("frames", "seed")
    (folder / "b.jsonl").write_text(fixed)
    steps = ["--num-inference-steps", "2", *MODEL]
    size = ["--height", "64", "--width", "64", "--num-inference-steps", "3", *MODEL]
    size += ["--backend", "full"] if torch.cuda.is_available() else []
    commands = {
        "cats": ["generate", "a cat", "A cat!", "--seed", "3", "--num-images", "2", *steps],
        "again": ["generate", "--from", "outputs/a-cat-4.png"],
        "other seed": ["generate", "--from", "outputs/a-cat-4.json", "--seed", "5"],
        "aged": ["generate", "--from", "aged.json", "--output", "aged"],
        "no guidance": ["generate", "a cat", "--seed", "3", "--guidance-scale", "0", *steps],
        "no seed": ["generate", "a cat", *steps, "--output", "x"],
        "rewritten": ["generate", "a cat", "--seed", "3", "--rewrite-prompt", *steps],
        "rewritten again": ["generate", "--from", "r/a-cat-3.png", "--output", "r"],
        "resumed": [*BATCH],
        "no file": ["batch", "missing.jsonl"],
        "empty file": ["batch", "empty.jsonl"],
        "inspect": ["inspect", "a cat", *size],
        "numbers": ["inspect", "--json", *size],
        "doctor": ["doctor"],
    }
    commands["no guidance"] += ["--output", "x"]
    commands["rewritten"] += ["--output", "r"]
    (folder / "empty.jsonl").write_text("\n")
    results = run_many(list(commands.values()), cwd=folder)
    return folder, dict(zip(commands, results, strict=True)), before


More = tuple[Path, dict[str, Done], dict[str, int]]


def test_a_batch_resumes_without_touching_what_is_there(more: More) -> None:
    folder, results, before = more
    assert results["resumed"].code == 0, results["resumed"].err
    assert results["resumed"].out.splitlines()[-1] == "3 made, 2 already there, 0 failed"
    now = {p.name: p.stat().st_mtime_ns for p in (folder / "out").iterdir()}
    kept = {name: age for name, age in before.items() if "red-heart" not in name}
    assert len(kept) == 4
    assert {name: now[name] for name in kept} == kept
    assert len([name for name in now if name.endswith(".png")]) == 5


def test_a_batch_without_lines_is_refused(more: More) -> None:
    _, results, _ = more
    assert results["no file"].code == results["empty file"].code == 2
    assert results["no file"].err.startswith("dit-graphs: FILE.jsonl: no such file: 'missing")
    assert results["empty file"].err == "dit-graphs: FILE.jsonl: 'empty.jsonl' holds no line\n"


def test_b74_names_never_collide_and_carry_the_seed_that_was_used(more: More) -> None:
    folder, results, _ = more
    assert results["cats"].code == 0, results["cats"].err
    made = sorted(p.name for p in (folder / "outputs").glob("*.png"))
    assert made == [
        "a-cat-3-2.png",
        "a-cat-3.png",
        "a-cat-4-2.png",
        "a-cat-4-3.png",
        "a-cat-4.png",
        "a-cat-5.png",
    ]
    for path in (folder / "outputs").glob("*.png"):
        sidecar = json.loads(path.with_suffix(".json").read_text())
        assert f"-{sidecar['record']['request']['seed']}" in path.stem
    drawn = re.search(r"seed (\d+),", results["no seed"].out)
    assert drawn is not None and (folder / "x" / f"a-cat-{drawn[1]}.png").exists()
    outputs, x = folder / "outputs", folder / "x"
    assert (x / "a-cat-3.png").read_bytes() != (outputs / "a-cat-3.png").read_bytes()


def test_from_gives_the_same_bytes_or_says_what_changed(more: More) -> None:
    folder, results, _ = more
    outputs = folder / "outputs"
    assert results["again"].code == 0
    assert (outputs / "a-cat-4-3.png").read_bytes() == (outputs / "a-cat-4.png").read_bytes()
    assert "same bytes as outputs/a-cat-4.png" in results["again"].out
    assert results["other seed"].code == 0
    assert "request.seed: 4 → 5" in results["other seed"].out
    assert results["aged"].code == 1
    assert "not the same as aged.json:" in results["aged"].out
    assert "environment.versions.torch: 2.0.0 → " in results["aged"].out


def test_a_rewritten_prompt_is_told_recorded_and_drawn(more: More) -> None:
    folder, results, _ = more
    done = results["rewritten"]
    assert done.code == 0, done.err
    told = re.search(r"^rewrite +\d+\.\d\d s  (.*)$", done.out, re.M)
    assert told is not None
    sidecar = json.loads((folder / "r" / "a-cat-3.json").read_text())
    assert sidecar["rewritten_from"] == "a cat"
    assert sidecar["record"]["request"]["prompt"] == told[1] != "a cat"
    assert "same bytes as r/a-cat-3.png" in results["rewritten again"].out


def test_inspect_measures_and_writes_no_file(more: More) -> None:
    folder, results, _ = more
    text, numbers = results["inspect"], results["numbers"]
    assert text.code == numbers.code == 0, text.err + numbers.err
    assert "ZImagePipeline: 64x64, 3 steps, CFG batched" in text.out
    heads = re.findall(r"^(\w+): ", text.out, re.M)
    assert heads.count("denoiser") == heads.count("vae") == 1
    assert re.search(r"^not called: .*decode \(of text\), prefill \(of text\)$", text.out, re.M)
    assert "1 segment, 0 breaks" in text.out and "1 segments" not in text.out
    assert re.search(r"^denoiser: [1-9]\d* captured, [1-9]\d* replayed, \d+ eager", text.out, re.M)
    assert re.search(r"captured \d+\.\d %, .* eager \d+\.\d+ ms, replay \d+\.\d+ ms", text.out)
    assert "warming_up: the signature was new" in text.out
    shown = r"^denoiser: .* eager, (\d+\.\d) MiB.*\n.*\n.*captured \d+\.\d %, (\d+\.\d) MiB, "
    part, graph = re.search(shown, text.out, re.M).groups()
    assert part == graph, "one graph: the part holds what it holds"
    found = json.loads(numbers.out)
    assert found["guidance"] == "CFG batched"
    assert found["runs"][0]["reasons"]["warming_up"] >= 2
    assert found["stats"]["components"]["denoiser"]["graphs"][0]["segments"] >= 1
    assert not list(folder.glob("*.png"))


def test_doctor_makes_graphs_on_this_machine(more: More) -> None:
    doctor = more[1]["doctor"]
    assert doctor.code == 0, doctor.out
    assert re.search(r"torch \d+\.\d+", doctor.out)
    ok = r"^(full ok, breakable ok, debug ok, rng ok|recorded ok, rng ok)$"
    assert re.search(ok, doctor.out, re.M), doctor.out


def _heeds_ctrl_c() -> None:
    """A shell's background jobs ignore it, and so would whatever they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for child processes")
def test_ctrl_c_leaves_finished_files_and_names_them(tmp_path: Path) -> None:
    many = ["--num-images", "500", "--num-inference-steps", "2", "--seed", "1", *MODEL]
    process = subprocess.Popen(
        [sys.executable, "-m", "dit_graphs.app", "generate", "a cat", *many],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_heeds_ctrl_c,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("outputs/a-cat-2.png"):
                break
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    made = sorted(str(p.relative_to(tmp_path)) for p in (tmp_path / "outputs").glob("*.png"))
    assert 2 <= len(made) < 500
    listed = [line.strip() for line in errors.splitlines() if line.strip().endswith(".png")]
    assert sorted(listed) == made
    for name in made:
        with Image.open(tmp_path / name) as picture:
            picture.load()
    assert not [p for p in (tmp_path / "outputs").iterdir() if p.name.startswith(".")]


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for child processes")
def test_ctrl_c_that_a_library_loses_is_still_one(tmp_path: Path) -> None:
    """A library in C, interrupted while it is imported, answers with an error without a cause."""
    code = """
import os, signal, sys
from dit_graphs.app import cli
from dit_graphs.app.cli import generate

def imported(given):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        signal.sigtimedwait([], 1)
    except KeyboardInterrupt:
        pass
    raise ImportError("initialisation failed")

generate.run = imported
sys.exit(cli.main(["generate", "a cat"]))
"""
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        preexec_fn=_heeds_ctrl_c,
        timeout=100,
    )
    assert process.stderr == "interrupted; no file was finished\n"
    assert process.returncode == 130


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for child processes")
def test_ctrl_c_before_the_first_picture_says_so(tmp_path: Path) -> None:
    code = (
        "import sys; from dit_graphs.app.cli import generate, main; print('ready', flush=True);"
        "sys.exit(main(['generate', 'a cat']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_heeds_ctrl_c,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.5)  # the libraries take longer than that
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors == "interrupted; no file was finished\n"
    assert not list(tmp_path.iterdir())
