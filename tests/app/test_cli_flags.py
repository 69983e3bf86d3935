"""`GraphConfig`, `--help` and docs/cli.md say the same: all three are held to the fields."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_type_hints

import pytest

from dit_graphs import GraphConfig, config
from dit_graphs.app.cli import COMMANDS, main
from dit_graphs.app.cli.flags import (
    Flag,
    Given,
    graph_flags,
    model_flags,
    option_name,
    request_flags,
)
from dit_graphs.app.cli.words import parse
from dit_graphs.pipelines.generate import GenerateRequest, InputError, ModelSpec

ROOT = Path(__file__).resolve().parents[2]
DOCS = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
ALL = [*request_flags(), *model_flags(), *graph_flags()]
WITH_ALL = ("generate", "batch", "inspect")


def _words(flag: Flag) -> list[str]:
    name = option_name(flag.name)
    return [name, f"--no-{name[2:]}"] if flag.kind == bool | None else [name]


@pytest.fixture
def help_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def text(*command: str) -> str:
        monkeypatch.setenv("COLUMNS", "400")
        monkeypatch.setenv("TERMINAL_WIDTH", "400")
        assert main([*command, "--help"]) == 0
        return capsys.readouterr().out

    return text


def test_every_field_has_exactly_one_flag_with_its_word() -> None:
    flags = [flag for flag in graph_flags() if not flag.is_hidden]
    for field in fields(GraphConfig):
        names = [flag.name for flag in flags if flag.field == field.name]
        per_phase = [f"{phase}_{field.name}" for phase in ("decode", "prefill")]
        assert names in ([field.name], per_phase), field.name
    assert {flag.field for flag in flags} == {field.name for field in fields(GraphConfig)}
    assert [f.name for f in request_flags()] == [
        f.name for f in fields(GenerateRequest) if f.name != "prompt"
    ]
    assert [f.name for f in model_flags()] == [f.name for f in fields(ModelSpec)]


def test_no_two_flags_share_a_name() -> None:
    for module in COMMANDS.values():
        names = [flag.name for flag in module.flags()]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("command", WITH_ALL)
def test_help_names_every_flag_and_says_what_it_does(command: str, help_of) -> None:
    text = " ".join(help_of(command).split())
    for flag in ALL:
        for word in _words(flag):
            assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text), word
        assert flag.help in text, flag.name


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_narrow_terminal_shows_every_name_whole(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    for flag in COMMANDS[command].flags():
        if not flag.is_hidden:
            assert re.search(rf"{re.escape(option_name(flag.name))}(?![\w…-])", text), flag.name


@pytest.mark.parametrize(
    ("word", "first"),
    [
        ("--max", "--max-graphs"),
        ("--steps", "--num-inference-steps"),
        ("--heigth", "--height"),
        ("--negative", "--negative-prompt"),
        ("--num_images", "--num-images"),
        ("--frames", "--num-frames"),
        ("--out", "--output"),
        ("--scale", "--guidance-scale"),
    ],
)
def test_an_option_that_does_not_exist_proposes_what_was_meant(
    word: str, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "x", word, "3"]) == 2
    expected = f"dit-graphs: No such option: {word} (did you mean {first}"
    assert capsys.readouterr().err.startswith(expected)


def test_a_word_like_nothing_proposes_nothing_and_a_prompt_with_dashes_is_told_how(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "x", "--bogus", "3"]) == 2
    assert capsys.readouterr().err == "dit-graphs: No such option: --bogus\n"
    assert main(["generate", "--a prompt"]) == 2
    assert "(a PROMPT that begins with - goes after --)" in capsys.readouterr().err
    assert main(["paint"]) == 2
    assert "; there are generate, batch, inspect, doctor, demo" in capsys.readouterr().err


def test_every_choice_of_a_field_is_named_in_its_help() -> None:
    hints = get_type_hints(GraphConfig)
    for flag in graph_flags():
        choices = re.findall(r"Literal\[([^]]*)\]", str(hints[flag.field]))
        for word in re.findall(r"'(\w+)'", " ".join(choices)):
            assert word in flag.help, (flag.name, word)


def test_docs_have_one_row_per_flag_with_its_help_and_no_other() -> None:
    for flag in ALL:
        cell = r" / ".join(rf"`{re.escape(word)}(?: [^`]*)?`" for word in _words(flag))
        rows = re.findall(rf"^\| {cell} \| (.*) \|$", DOCS, re.MULTILINE)
        assert rows == [flag.help], flag.name
    for module in COMMANDS.values():
        for flag in module.flags():
            assert re.search(rf"`{re.escape(_words(flag)[0])}[ `]", DOCS), flag.name
    known = {word for flag in ALL for word in _words(flag)}
    every = [flag for module in COMMANDS.values() for flag in module.flags()]
    known |= {word for flag in every for word in _words(flag)}
    known |= {"--help", "--max"}  # --max is the example of an error
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", DOCS)) <= known


def test_docs_and_help_name_every_command(help_of) -> None:
    text = help_of()
    for command in COMMANDS:
        assert re.search(rf"\b{command}\b", text)
        assert re.search(rf"^\| `{command}\b", DOCS, re.MULTILINE), command


def test_help_loads_neither_torch_nor_diffusers() -> None:
    code = (
        "import sys; from dit_graphs.app.cli import main; main(['generate', '--help']);"
        "print([m for m in ('torch', 'diffusers', 'transformers', 'gradio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_defaults_are_the_dataclass_defaults() -> None:
    assert Given({}).graphs() == GraphConfig()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"backend": "full"}, {"backend": "full"}),
        (
            {"backend": "denoiser=full,decode=off"},
            {"backend": {"denoiser": "full", "decode": "off"}},
        ),
        ({"numerics": "fused"}, {"numerics": "fused"}),
        ({"components": "denoiser,vae"}, {"components": ("denoiser", "vae")}),
        ({"verify": "false"}, {"verify": False}),
        ({"verify": "always"}, {"verify": "always"}),
        ({"memory_budget": "auto"}, {"memory_budget": "auto"}),
        ({"memory_budget": "1.5GiB"}, {"memory_budget": 1610612736}),
        (
            {"memory_budget": "denoiser=2MiB,vae=7"},
            {"memory_budget": {"denoiser": 2097152, "vae": 7}},
        ),
        ({"max_graphs": 3}, {"max_graphs": 3}),
        ({"prompt_buckets": "32,64"}, {"prompt_buckets": (32, 64)}),
        ({"prompt_buckets": "none"}, {"prompt_buckets": None}),
        (
            {"decode_max_size": 8, "prefill_max_size": 64},
            {"max_size": {"decode": 8, "prefill": 64}},
        ),
        ({"strict": True}, {"strict": True}),
        ({"strict": False}, {"strict": False}),
        ({"manifest": "a/b.json"}, {"manifest": "a/b.json"}),
    ],
)
def test_a_flag_reaches_its_field(
    flags: Mapping[str, object], expected: Mapping[str, object]
) -> None:
    assert Given(flags).graphs() == GraphConfig(**expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("backend", "fast", "expected auto, full, breakable, debug, recorded, off or KEY=VALUE"),
        ("backend", "denoiser=fast", "expected auto, full"),
        ("backend", "unet=full", "expected denoiser, vae, text_encoder, prefill or decode"),
        ("backend", "denoiser=full,vae", "expected auto, full"),
        ("verify", "maybe", "expected true, false or always"),
        ("components", "denoiser,clip", "expected a comma list of denoiser, vae or text_encoder"),
        ("memory_budget", "-1", "expected BYTES, auto or KEY=VALUE"),
        ("memory_budget", "0.3", "expected BYTES, auto or KEY=VALUE"),
        ("prompt_buckets", "64,32", "lengths must rise"),
        ("prompt_buckets", "a,b", "expected N,N,… or none"),
        ("max_graphs", 0, "expected a whole number ≥ 1"),
        ("decode_max_size", 0, "expected a whole number ≥ 1"),
    ],
)
def test_a_wrong_value_names_the_flag_and_the_allowed_values(
    name: str, value: object, message: str
) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        Given({name: value}).graphs()
    assert caught.value.option == name


def test_parse_reads_types_and_not_names() -> None:
    assert parse("x", Literal["a"] | int, "7") == 7
    assert get_args(Literal["a"]) == ("a",)
    with pytest.raises(InputError, match=r"expected a, BYTES or none \(bytes: .* GiB\), got 'b'"):
        parse("x", Literal["a"] | int | None, "b")


def test_a_former_name_works_and_warns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(config.RENAMED, "graph_limit", "max_graphs")
    assert main(["generate", "x", "--graph-limit", "0"]) == 2
    error = capsys.readouterr().err
    assert "--graph-limit is now called --max-graphs" in error
    assert "--max-graphs: expected a whole number ≥ 1, got 0" in error
    assert main(["generate", "--help"]) == 0
    assert "--graph-limit" not in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--max", "--num", "--prom", "--back", "--decode"])
def test_flags_cannot_be_shortened(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", option, "3"]) == 2
    assert f"No such option: {option}" in capsys.readouterr().err


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "generate" in capsys.readouterr().out
