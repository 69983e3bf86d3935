"""Every wrong option: exit code 2, one sentence with its name and what is allowed, nothing written.

All command lines run in one real process, because each would spend seconds on importing torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_process import MODEL, Done, run, run_many
from PIL import Image

from dit_graphs.app.cli import main
from dit_graphs.app.cli.flags import graph_flags, model_flags, option_name, request_flags

TAKES = "ZImagePipeline does not take it; it takes --guidance-scale, --height, --negative-prompt, "
# option -> (its text, a part of the sentence); a flag may be wrong in several ways.
REFUSED: list[tuple[str, str, str]] = [
    ("--height", "abc", "integer"),
    ("--height", "0", "expected a whole number ≥ 1, got 0"),
    ("--height", "100", "ZImagePipeline refuses it: Height must be divisible by 16"),
    ("--width", "-8", "expected a whole number ≥ 1, got -8"),
    ("--num-frames", "17", TAKES),
    ("--num-inference-steps", "0", "expected a whole number ≥ 1, got 0"),
    ("--guidance-scale", "nan", "expected a finite number, got nan"),
    ("--negative-prompt", "", ""),
    ("--seed", "-1", "expected a whole number ≥ 0"),
    ("--num-images", "0", "expected a whole number ≥ 1 and ≤ 4294967296, got 0"),
    ("--image", "missing.png", "no such file: 'missing.png'"),
    ("--image", "text.png", "'text.png' is not a picture that can be read"),
    ("--mask-image", "in.png", "; ZImageInpaintPipeline takes it beside an image"),
    ("--strength", "1.5", "expected a number from 0 to 1, got 1.5"),
    ("--strength", "0.5", "; ZImageImg2ImgPipeline takes it beside an image"),
    ("--control-image", "in.png", TAKES),
    ("--last-image", "in.png", TAKES),
    ("--ip-adapter-image", "in.png", TAKES),
    ("--fps", "0", "expected a whole number ≥ 1, got 0"),
    ("--fps", "8", "ZImagePipeline makes no video"),
    (
        "--set",
        "num_frames=17",
        "ZImagePipeline does not take 'num_frames'; it takes --guid",
    ),
    ("--set", "generator=1", "and by --set KEY=JSON cfg_normalization, cfg_truncation, "),
    ("--set", "max_sequence_length=99999", "expected a number from 1 to 1024, got 99999"),
    ("--set", "sigmas", "expected KEY=JSON, got 'sigmas'"),
    ("--set", "sigmas=abc", "expected JSON after sigmas="),
    ("--model", "/nowhere", "no such folder or file, and no hub id (owner/name)"),
    ("--model", "broken", "'broken' holds no model_index.json"),
    ("--model", "in.png", "expected a .safetensors, .gguf or .ckpt file"),
    ("--pipeline", "NoSuchPipeline", "has no pipeline 'NoSuchPipeline'"),
    ("--base", "/nowhere", "no such folder or file, and no hub id (owner/name)"),
    ("--pipeline", "ZImageImg2ImgPipeline", "ZImageImg2ImgPipeline needs one"),
    ("--revision", "abc", "expected a hub id as model, and "),
    ("--variant", "nope", "expected none for "),
    ("--dtype", "int8", "expected auto, float32, float16 or bfloat16, got 'int8'"),
    ("--device", "tpu", "expected auto, cpu, cuda, cuda:N, mps or xpu, got 'tpu'"),
    ("--device", "cuda:99", "torch sees "),
    ("--lora", "missing.safetensors:0.5", "no such file or folder, and no hub id (owner/name)"),
    ("--lora", "in.png:strong", "expected PATH:SCALE with a number as SCALE"),
    ("--lora", "in.png:0.5", "cannot be loaded: "),
    ("--ip-adapter", "missing.bin", "no such file or folder, and no hub id (owner/name)"),
    ("--ip-adapter", "in.png", "ZImagePipeline takes no IP-Adapter"),
    (
        "--scheduler",
        "DDIMScheduler",
        "expected FlowMatchEulerDiscreteScheduler for ZImagePipeline, got 'DDIMScheduler'",
    ),
    ("--offload", "model", "expected none where the device is cpu, got 'model'"),
    ("--offload", "sequential", "expected none where the device is cpu, got 'sequential'"),
    ("--offload", "group", "expected none where the device is cpu, got 'group'"),
    ("--offload", "some", "expected none, model, sequential or group, got 'some'"),
    ("--backend", "fast", "expected auto, full, breakable, debug, recorded, off or KEY=VALUE"),
    ("--backend", "foo=full", "expected denoiser, vae, text_encoder, prefill or decode, got"),
    ("--numerics", "fused", "is not available in this version"),
    ("--manifest", "m.json", "is not available in this version"),
    ("--numerics", "fast", "expected exact or fused, got 'fast'"),
    ("--capture", "never", "expected second_use, first_use or warmup_only, got 'never'"),
    ("--attention", "flash", "expected auto, captured or eager, got 'flash'"),
    ("--components", "clip", "expected a comma list of denoiser, vae or text_encoder"),
    ("--verify", "maybe", "expected true, false or always, got 'maybe'"),
    ("--memory-budget", "6GB", "(bytes: a number, or one ending in KiB, MiB or GiB), got"),
    ("--max-graphs", "0", "expected a whole number ≥ 1, got 0"),
    ("--prompt-buckets", "64,32", "lengths must rise"),
    ("--prompt-buckets", "32,64", "gives padded tokens a meaning of their own"),
    ("--decode-max-size", "0", "expected a whole number ≥ 1, got 0"),
    ("--prefill-max-size", "x", "integer"),
    ("--output", "in.png", "expected a folder, and 'in.png' is a file"),
    ("--output", "new.png", "expected a folder, not a file name: 'new.png'"),
    ("--from", "missing.png", "no such file: 'missing.png'"),
    ("--from", "in.png", "holds no record of dit-graphs"),
    ("--max", "3", "No such option: --max (did you mean --max-graphs"),
    ("--bogus", "3", "No such option"),
]
# Flags that take any text or have no wrong value, with the reason.
CANNOT_BE_WRONG = {
    "--negative-prompt": "any text",
    "--vae-tiling": "a switch; refused by pipelines without it, below",
    "--vae-slicing": "a switch; refused by pipelines without it, below",
    "--strict": "a switch",
}
NEEDS_IMAGE = "ZImageImg2ImgPipeline"
WRONG = [(option, text, part) for option, text, part in REFUSED if part]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, str], Done]]:
    folder = tmp_path_factory.mktemp("refused")
    Image.new("RGB", (8, 8)).save(folder / "in.png")
    (folder / "text.png").write_text("no picture")
    (folder / "broken").mkdir()
    commands = []
    for option, text, _ in WRONG:
        prompt = [] if option == "--from" else ["a cat"]
        model = [] if option in ("--model", "--backend", "--from") else list(MODEL)
        if option == "--backend":
            model = list(MODEL[:2])
        device = [] if option in ("--device", "--from") else ["--device", "cpu"]
        commands.append(["generate", *prompt, *model, *device, option, text])
    results = run_many(commands, cwd=folder)
    return folder, {wrong[:2]: done for wrong, done in zip(WRONG, results, strict=True)}


@pytest.mark.parametrize(("option", "text", "part"), WRONG, ids=lambda value: value[:24])
def test_b75_a_wrong_option_is_one_sentence_and_exit_code_2(
    refused: tuple[Path, dict[tuple[str, str], Done]], option: str, text: str, part: str
) -> None:
    done = refused[1][option, text]
    assert done.code == 2, done
    sentence = done.err.strip().splitlines()[-1]
    assert sentence.startswith("dit-graphs: ")
    named = "--image" if text == NEEDS_IMAGE else option
    assert named in sentence and part in sentence, sentence
    assert "Traceback" not in done.err


def test_a_size_is_refused_before_the_weights_are_read(
    refused: tuple[Path, dict[tuple[str, str], Done]],
) -> None:
    assert refused[1]["--height", "100"].out == ""


def test_nothing_was_written_for_any_of_them(
    refused: tuple[Path, dict[tuple[str, str], Done]],
) -> None:
    assert {p.name for p in refused[0].iterdir()} == {"in.png", "text.png", "broken"}


def test_every_flag_is_in_the_table_of_wrong_values() -> None:
    flags = {option_name(f.name) for f in [*request_flags(), *model_flags(), *graph_flags()]}
    tried = {option for option, _, _ in WRONG}
    assert flags - tried == set(CANNOT_BE_WRONG)


def test_a_wrong_flag_of_the_script_itself_ends_the_process_with_2(tmp_path: Path) -> None:
    done = run("generate", "a cat", "--heigth", "64", cwd=tmp_path)
    assert done.code == 2 and done.out == ""
    assert len(done.err.strip().splitlines()) == 1
    assert "No such option: --heigth" in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("variable", ["DIT_GRAPHS", "DIT_GRAPHS_BACKEND"])
def test_a_wrong_word_in_the_environment_is_named_as_what_it_is(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "0")
    assert main(["generate", "a cat"]) == 2
    assert capsys.readouterr().err.startswith(f"dit-graphs: {variable}: expected ")


WRONG_BY_ITSELF = [
    ["generate", "a cat", "--dtype", "int8"],
    ["generate", "a cat", "--backend", "fast"],
    ["generate", "a cat", "--numerics", "fused"],
    ["generate", "a cat", "--lora", "missing.safetensors"],
    ["generate", "--from", "missing.png"],
    ["batch", "missing.jsonl"],
    ["inspect", "--device", "tpu"],
    ["demo", "--max-graphs", "0"],
]


def test_a_word_that_is_wrong_by_itself_is_refused_before_any_library_is_loaded(
    tmp_path: Path,
) -> None:
    code = (
        "import json, sys; from dit_graphs.app.cli import main\n"
        "for words in json.load(sys.stdin):\n"
        "    code = main(words)\n"
        "    print(code, [m for m in ('torch', 'diffusers', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(WRONG_BY_ITSELF),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["2 []"] * len(WRONG_BY_ITSELF), done.stdout + done.stderr
