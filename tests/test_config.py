"""GraphConfig refuses what it cannot do, in a sentence, before anything is wrapped."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import dit_graphs
from dit_graphs import ConfigError, GraphConfig


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@pytest.mark.parametrize(
    ("field", "instead"),
    [
        ({"numerics": "fused"}, "leave numerics out for eager's own kernels"),
        ({"manifest": "graphs.json"}, r"call warmup\(pipe, \[...\]\) at start"),
    ],
    ids=["numerics", "manifest"],
)
@pytest.mark.parametrize("entry", [dit_graphs.wrap, dit_graphs.accelerate])
def test_a_value_without_effect_is_refused_and_nothing_is_wrapped(entry, field, instead) -> None:
    module = Doubling()
    before = dict(vars(module))
    with pytest.raises(ConfigError, match=f"not available in this version.*{instead}"):
        entry(module, GraphConfig(**field))
    assert vars(module) == before


def test_help_does_not_offer_what_is_refused() -> None:
    says = {field.name: field.metadata["help"] for field in dataclasses.fields(GraphConfig)}
    for name in ("numerics", "manifest"):
        assert "not in this version" in says[name]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("backend", "fast", "backend: expected one of"),
        ("backend", {"unet": "full"}, "mapping key"),
        ("capture", "always", "capture: expected one of"),
        ("attention", True, "attention: expected one of"),
        ("verify", 1, "verify: expected one of"),
        ("components", "denoiser", "components: expected a tuple"),
        ("components", ("unet",), "components: expected one of"),
        ("memory_budget", -1, "bytes ≥ 0"),
        ("memory_budget", True, "bytes ≥ 0"),
        ("max_graphs", 0, "whole number ≥ 1"),
        ("prompt_buckets", (64, 32), "lengths must rise"),
        ("max_size", {"encode": 4}, "max_size: phase"),
        ("strict", 1, "strict: expected one of"),
        ("manifest", 3, "manifest: expected a path"),
    ],
)
def test_a_wrong_value_names_the_field_and_what_it_takes(field, value, says) -> None:
    with pytest.raises(ConfigError, match=says):
        GraphConfig(**{field: value})


def test_an_unknown_field_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="max_graphs"):
        GraphConfig().with_overrides(max_graph=3)


@pytest.mark.parametrize("variable", ["DIT_GRAPHS", "DIT_GRAPHS_BACKEND"])
@pytest.mark.parametrize("entry", [dit_graphs.wrap, dit_graphs.accelerate])
def test_a_word_in_the_environment_that_is_none_is_refused(entry, variable, monkeypatch) -> None:
    monkeypatch.setenv(variable, "0")
    module = Doubling()
    before = dict(vars(module))
    with pytest.raises(ConfigError, match=rf"^{variable}: expected one of .*'off'.*, got '0'$"):
        entry(module)
    assert vars(module) == before


@pytest.mark.parametrize("word", ["off", "OFF", "on", ""])
def test_the_kill_switch_is_off_or_on(word, monkeypatch) -> None:
    monkeypatch.setenv("DIT_GRAPHS", word)
    module = dit_graphs.wrap(Doubling(), backend="recorded")
    with torch.no_grad():
        module(torch.ones(1))
    fallbacks = dit_graphs.stats(module)["components"]["denoiser"]["fallbacks"]
    assert fallbacks == {"kill_switch" if word.lower() == "off" else "warming_up": 1}
