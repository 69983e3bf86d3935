"""The Graphs panel says what was counted, in words, and no more."""

from __future__ import annotations

import re

from dit_graphs.app.demo.graphs_panel import CPU_SENTENCE, panel_html, running_panel_html
from dit_graphs.app.demo.studio import GraphSnapshot
from dit_graphs.app.demo.telling_apart import told_apart
from dit_graphs.app.demo.timeline import timeline_html
from dit_graphs.app.demo.trace import Calls, RunTrace, Span
from dit_graphs.errors import Reason

WARMING = Calls(0, {Reason.WARMING_UP: 1}, 1)
SPANS = (
    Span("encode", 0, 0.0, 100.0, {}),
    Span("step", 1, 100.0, 200.0, {"denoiser": WARMING}),
    Span("step", 2, 200.0, 240.0, {"denoiser": Calls(1, {Reason.HOST_READ: 1})}),
    Span("step", 3, 240.0, 280.0, {"denoiser": Calls(2)}),
    Span("decode", 0, 280.0, 400.0, {"vae": Calls(0, {Reason.OFFLOAD: 1})}),
)
TRACE = RunTrace(SPANS, "cpu")
GRAPH = {
    "signature": "latent 16×16, <b>batch</b> 2",
    "backend": "full",
    "segments": 1,
    "captured_fraction": 0.875,
    "nbytes": 3 << 20,
    "eager_ms": 30.0,
    "replay_ms": 10.0,
    "replays": 7,
    "verified": "3/5 leaves",
}


def _snapshot(**changes: object) -> GraphSnapshot:
    report: dict[str, object] = {
        "captures": 1,
        "replays": 3,
        "eager_calls": 2,
        "fallbacks": {"warming_up": 1, "host_read": 1},
        "evictions": 0,
        "backend": "recorded",
        "graphs": [GRAPH],
    }
    return GraphSnapshot({"components": {"denoiser": report | changes}}, "why & how", 3 << 20)


def test_every_stage_is_a_bar_of_its_true_width_and_colour() -> None:
    page = timeline_html(TRACE)
    bars = re.findall(r'class="dg-bar dg-(\w+)" title="[^"]*" style="left:([\d.]+)%;width:', page)
    assert bars == [
        ("none", "0.000"),
        ("eager", "25.000"),
        ("mixed", "50.000"),
        ("graph", "60.000"),
        ("eager", "70.000"),
    ]
    assert page.count("dg-capture-mark") == 1


def test_the_timeline_can_be_read_without_seeing_it() -> None:
    page = timeline_html(TRACE)
    label = "Timeline of 400 ms: 3 steps, 1 from a graph, 1 eager, 1 part graph, part eager."
    assert f'aria-label="{label}"' in page
    assert "denoiser: 1 from graphs, 1 eager (host_read)" in page


def test_without_a_gpu_nothing_is_said_about_busy_or_idle() -> None:
    assert "no GPU: busy/idle not measured" in timeline_html(TRACE)
    page = timeline_html(RunTrace(SPANS, "cuda"))
    assert "busy/idle not measured in this run" in page


def test_with_a_gpu_busy_and_idle_add_up() -> None:
    trace = RunTrace(SPANS, "cuda").with_gpu(
        [(10.0, 100.0), (30.0, 100.0), (40.0, 40.0), (40.0, 40.0), (80.0, 120.0)]
    )
    assert 'aria-label="GPU busy 50% of the run, idle 50%"' in timeline_html(trace)
    assert TRACE.with_gpu([(1.0, 2.0)]) is TRACE  # counts that do not fit are not shown


def test_hits_and_misses_with_reasons_in_words() -> None:
    page = panel_html(_snapshot(), TRACE, "8 of 9 calls")
    assert "8 of 9 calls" in page
    assert "3/5" in page  # both: this run and since start
    assert Reason.HOST_READ.sentence in page
    assert "<code>host_read</code>" in page
    assert "offload hooks" not in page  # the VAE is not among the reports


def test_a_run_without_misses_says_so_and_keeps_the_earlier_reasons_apart() -> None:
    trace = RunTrace((Span("step", 1, 0.0, 1.0, {"denoiser": Calls(1)}),), "cpu")
    page = panel_html(_snapshot(), trace)
    assert "earlier runs:" in page
    clean = panel_html(_snapshot(fallbacks={}), trace)
    assert "every call came from a graph" in clean


def test_memory_against_the_budget_and_signatures() -> None:
    snapshot = _snapshot()
    page = panel_html(snapshot, None)
    assert "<b>3.0 MiB</b> in 1 graph<" in page
    assert "no limit: main memory is not budgeted" in page
    limited = GraphSnapshot(snapshot.stats, "", 3 << 20, 12 << 20)
    page = panel_html(limited, None)
    assert "budget 12.0 MiB" in page
    assert "width:25.0%" in page
    for words in ("88%", "30 ms → 10 ms", "3/5 leaves", "full, 1 segment"):
        assert words in page


def test_a_running_panel_counts_the_steps_done_and_adds_them_to_those_before() -> None:
    """The snapshot has 3 replays of 5 calls; the run so far adds 1 and 2 of them eager."""
    page = running_panel_html(_snapshot(), RunTrace(SPANS[:3], "cpu"), 8)
    assert "Running, 2 of 8 steps done: 1 eager, 1 part graph, part eager." in page
    assert page.count('class="dg-bar ') == 3
    assert re.findall(r"</span>(\d+/\d+)</span>", page) == ["1/3", "4/8"]
    assert "this run" in page
    assert "last run" in panel_html(_snapshot(), TRACE)
    assert "<details" not in page  # it would close under the reader's hand at every step


def test_plain_runs_made_on_purpose_are_no_misses() -> None:
    fallbacks = {"warming_up": 1, "disabled": 8}
    page = panel_html(_snapshot(fallbacks=fallbacks), None)
    assert "3/4</span>" in page
    assert "graphs are off here" not in page
    off = panel_html(_snapshot(fallbacks=fallbacks, backend="off"), None)
    assert "3/12</span>" in off
    assert "graphs are off here" in off


def test_equal_names_are_numbered_and_say_what_differs() -> None:
    names = ["a 8×8", "b", "a 8×8", "a 8×8"]
    found = told_apart(names, lambda first, other: [f"{first} → {other}"] if other == 2 else [])
    assert found == ["a 8×8 (1 of 3)", "b", "a 8×8 (2 of 3: 0 → 2)", "a 8×8 (3 of 3)"]


def test_numbers_on_a_long_timeline_are_even_however_long_single_steps_took() -> None:
    """60 steps of 10 ms, every third of 25 ms: 15 ms on average, 1.1 % for the usual one."""
    spans, now = [], 0.0
    for index in range(1, 61):
        end = now + (25.0 if index % 3 == 0 else 10.0)
        spans.append(Span("step", index, now, end, {"denoiser": Calls(1)}))
        now = end
    page = timeline_html(RunTrace(tuple(spans), "cpu"))
    labels = [int(number) for number in re.findall(r"<b>(\d+)</b>", page)]
    assert labels == list(range(5, 61, 5))
    few = timeline_html(TRACE)
    assert re.findall(r"<b>(\d+)</b>", few) == ["1", "2", "3"]


def test_text_is_escaped() -> None:
    page = panel_html(_snapshot(), None)
    assert "&lt;b&gt;batch&lt;/b&gt;" in page
    assert "why &amp; how" in page


def test_the_recorder_is_never_called_a_speed_up() -> None:
    assert CPU_SENTENCE in panel_html(_snapshot(), None)
    assert "no CUDA graphs, no speed-up" in CPU_SENTENCE
    assert "No CUDA device" in panel_html(_snapshot(backend="none", graphs=[]), None)
