"""What users see of graphs: stats, explain, the log. Numbers are those of runs counted by hand."""

from __future__ import annotations

import json
import logging

import pytest
import tiny
import torch
from accelerate import cpu_offload

import dit_graphs


def test_stats_are_plain_json_with_every_number() -> None:
    pipe = tiny.build("flux")
    dit_graphs.accelerate(pipe, backend="recorded")
    assert dit_graphs.stats(pipe)["mode"] == "eager"
    tiny.latents(pipe, tiny.call_kwargs("flux", size=32, steps=6))
    found = json.loads(json.dumps(dit_graphs.stats(pipe)))
    assert found["mode"] == "graphs"
    denoiser = found["components"]["denoiser"]
    # six steps: plain, observed, compared, three replays
    assert (denoiser["captures"], denoiser["replays"], denoiser["eager_calls"]) == (1, 3, 3)
    assert denoiser["fallbacks"] == {"warming_up": 3}
    assert denoiser["evictions"] == denoiser["invalidations"] == 0
    (graph,) = denoiser["graphs"]
    assert set(graph) >= {
        "signature",
        "backend",
        "segments",
        "breaks",
        "captured_fraction",
        "nbytes",
        "output_bytes",
        "capture_ms",
        "replays",
        "eager_ms",
        "replay_ms",
        "verified",
    }
    assert graph["replays"] == 3
    assert graph["nbytes"] > 0
    assert graph["capture_ms"] > 0 and graph["eager_ms"] > 0 and graph["replay_ms"] > 0


def test_the_memory_that_outputs_share_is_that_of_the_largest() -> None:
    pipe = tiny.build("sdxl")
    dit_graphs.accelerate(pipe, backend="recorded")
    for size in (32, 64, 48):
        tiny.latents(pipe, tiny.call_kwargs("sdxl", size=size, steps=4))
    denoiser = dit_graphs.stats(pipe)["components"]["denoiser"]
    each = sorted(graph["output_bytes"] for graph in denoiser["graphs"])
    assert each == [2 * 4 * side * side * 4 for side in (4, 6, 8)], (
        "batch, channels, latent, float32"
    )
    assert denoiser["output_bytes"] == each[-1]


def test_signatures_are_named_as_a_user_thinks() -> None:
    names = {}
    for name in ("sdxl", "wan", "flux"):
        pipe = tiny.build(name)
        dit_graphs.accelerate(pipe, backend="recorded")
        tiny.latents(pipe, tiny.call_kwargs(name, size=(32, 64), steps=3))
        names[name] = dit_graphs.stats(pipe)["components"]["denoiser"]["graphs"][0]["signature"]
    assert "4×8" in names["sdxl"] and "batch 2" in names["sdxl"]
    assert "2 latent frames" in names["wan"]
    assert "prompt 32 tokens" in names["flux"]
    assert all("float32" in text for text in names.values())


def test_explain_says_what_ran_what_did_not_and_how_they_differ() -> None:
    pipe = tiny.build("sdxl")
    dit_graphs.accelerate(pipe, backend="recorded")
    tiny.latents(pipe, tiny.call_kwargs("sdxl", size=32, steps=5))
    tiny.latents(pipe, tiny.call_kwargs("sdxl", size=48, steps=1))
    text = dit_graphs.explain(pipe)
    assert "denoiser: 2/6 (4 eager: warming_up) calls from graphs" in text
    assert "recorded, 1 segment, 0 breaks, 100% captured" in text
    assert "no graph for latent 6×6" in text
    assert "2×4×4×4 float32 → 2×4×6×6 float32" in text, "the nearest signature's difference"


def test_a_part_that_stays_eager_says_why_and_advises_nothing_that_would_not_help(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipe = tiny.build("flux")
    cpu_offload(pipe.transformer, execution_device=torch.device("cpu"))
    pipe.text_encoder.to("meta")
    dit_graphs.accelerate(pipe, backend="recorded")
    offloaded = "offload hooks move the weights during the call"
    where = "AlignDevicesHook on FluxTransformer2DModel"
    missing = "CLIPTextModel is on the meta device: load its weights before wrapping"
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"denoiser: eager (offload): {offloaded} ({where})",
        f"text_encoder: eager (unsupported_model): {missing}",
    ]
    text = dit_graphs.explain(pipe)
    assert f"denoiser: eager. offload: {offloaded} ({where})" in text
    assert f"text_encoder: eager. unsupported_model: {missing}" in text


def test_explain_names_once_what_was_not_called_and_what_came_in_many_states() -> None:
    pipe = tiny.build("flux")
    dit_graphs.accelerate(pipe, backend="recorded")
    labels = list(dit_graphs.stats(pipe)["components"])
    assert dit_graphs.explain(pipe) == f"not called: {', '.join(labels)}"
    for number in range(4):
        pipe.transformer.config_of_mine = number
        tiny.latents(pipe, tiny.call_kwargs("flux", size=32, steps=1))
    text = dit_graphs.explain(pipe)
    assert text.endswith("\nnot called: vae, vae:vae.encode")
    assert text.count("no graph for 4 image tokens") == 1
    assert (
        "no graph for 4 image tokens, batch 1, prompt 32 tokens, float32: "
        "called before, may be captured when it is called again (4 times)"
    ) in text


def test_one_line_per_component_capture_and_request(caplog: pytest.LogCaptureFixture) -> None:
    pipe = tiny.build("flux")
    with caplog.at_level(logging.INFO, logger="dit_graphs"):
        dit_graphs.accelerate(pipe, backend="recorded")
        told = [record.getMessage() for record in caplog.records]
        assert "denoiser: recorded" in told
        caplog.clear()
        tiny.latents(pipe, tiny.call_kwargs("flux", size=32, steps=6))
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("denoiser")]
    assert len(told) == 2, "one capture, one request; nothing per replay"
    assert "captured" in told[0]
    assert told[1] == "denoiser cpu recorder: 3/6 (3 eager: warming_up)"


def test_b38_auto_on_the_cpu_says_that_nothing_will_happen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipe = tiny.build("flux")
    with caplog.at_level(logging.WARNING, logger="dit_graphs"):
        dit_graphs.accelerate(pipe)
        tiny.latents(pipe, tiny.call_kwargs("flux", size=32, steps=3))
    if not torch.cuda.is_available():
        assert [r.getMessage() for r in caplog.records if "no_cuda" in r.getMessage()] == [
            "FluxPipeline: no part is on a CUDA device: every call stays eager (no_cuda) until it "
            "is moved to one"
        ]
        assert dit_graphs.stats(pipe)["components"]["denoiser"]["fallbacks"] == {"no_cuda": 3}
        assert dit_graphs.stats(pipe)["mode"] == "eager"
