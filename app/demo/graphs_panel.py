"""Owns the Graphs panel: the timeline, hits and misses, memory against the budget, signatures.

Must never claim more than was measured: without a GPU it says that nothing is faster here. The
surprising fact: it shows copies. The counters it reads were taken between two jobs; while a run
goes on, what its own steps did is added to them: a panel shows its own page's run and no other's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

from dit_graphs.errors import Reason

from .markup import bytes_words, millis, plural, table, text
from .problems import without_places
from .studio import GraphSnapshot
from .timeline import reason_words, timeline_html
from .trace import Calls, RunTrace

__all__ = ["CPU_SENTENCE", "panel_html", "running_panel_html"]

Report: TypeAlias = "Mapping[str, object]"
CPU_SENTENCE = "Replayed by the CPU recorder: no CUDA graphs, no speed-up."


def running_panel_html(snapshot: GraphSnapshot, trace: RunTrace, total: int) -> str:
    """The panel of a run that goes on: `total` steps; `snapshot` was taken before it began."""
    steps = [span.source for span in trace.spans if span.stage == "step"]
    kinds = {"graph": "from a graph", "eager": "eager", "mixed": "part graph, part eager"}
    parts = [f"{steps.count(kind)} {words}" for kind, words in kinds.items() if kind in steps]
    said = f": {', '.join(parts)}" if parts else ""
    line = f"Running, {len(steps)} of {plural(total, 'step')} done{said}."
    return panel_html(snapshot, trace, line, is_running=True)


def panel_html(
    snapshot: GraphSnapshot, trace: RunTrace | None, line: str = "", *, is_running: bool = False
) -> str:
    """Everything the graphs did in the last run of this page, and hold now.

    `is_running`: `trace` goes on, and `snapshot` does not hold it yet.
    """
    reports = cast("Mapping[str, Report]", snapshot.stats.get("components") or {})
    return (
        f'<section class="dg-card dg-graphs" aria-labelledby="dg-graphs-title"'
        f' data-state="{"running" if is_running else "still"}">'
        f'<header class="dg-card-head"><h2 id="dg-graphs-title">Graphs</h2>'
        f'<p class="dg-verdict">{text(line or _verdict(reports))}</p></header>'
        f"{_timeline(trace, is_running)}"
        '<div class="dg-columns">'
        f"<div><h3>Hits and misses</h3>{_hits(reports, trace, is_running)}</div>"
        f"<div><h3>Memory</h3>{_memory(snapshot, reports)}</div></div>"
        f"<h3>Signatures held</h3>{_signatures(reports)}"
        f"{'' if is_running else _explanation(snapshot)}</section>"
    )


def _explanation(snapshot: GraphSnapshot) -> str:
    return (
        "<details class='dg-details'><summary>Why calls missed, in full</summary>"
        f'<pre class="dg-pre" tabindex="0" role="region" aria-label="Explanation">'
        f"{text(without_places(snapshot.explanation) or 'nothing is wrapped')}</pre>"
        "</details>"
    )


def _timeline(trace: RunTrace | None, is_running: bool) -> str:
    if trace is None or not trace.spans:
        return (
            '<p class="dg-empty">Make a picture: every step appears here, coloured by what '
            "answered it: a graph, or plain eager, and why.</p>"
        )
    return timeline_html(trace, has_numbers=not is_running)


def _verdict(reports: Mapping[str, Report]) -> str:
    backends = {str(report.get("backend")) for report in reports.values()}
    if backends == {"recorded"}:
        return CPU_SENTENCE
    if backends <= {"none"}:
        return "No CUDA device: every call is plain eager."
    if backends <= {"off"}:
        return "Graphs are off: every call is plain eager."
    return "Nothing has run yet."


def _hits(reports: Mapping[str, Report], trace: RunTrace | None, is_running: bool) -> str:
    if not reports:
        return '<p class="dg-empty">Nothing is wrapped.</p>'
    last = trace.calls if trace is not None else {}
    rows = []
    for label, report in reports.items():
        since_start = _calls_of(report)
        if is_running:
            since_start += last.get(label, Calls())
        if not since_start.graph and not since_start.num_eager and label not in last:
            continue
        run = last.get(label, Calls())
        rows.append(
            [
                text(label),
                _share(run) if label in last else '<span class="dg-quiet">–</span>',
                _share(since_start),
                _why(run, since_start),
            ]
        )
    if not rows:
        return '<p class="dg-empty">No call yet.</p>'
    heads = (
        "component",
        "this run" if is_running else "last run",
        "since start",
        "eager calls, and why",
    )
    return table("Hits and misses", heads, rows)


def _why(run: Calls, since_start: Calls) -> str:
    """The reasons of the last run; those of earlier runs where it had none."""
    if run.num_eager:
        return reason_words(run.eager)
    if since_start.num_eager:
        return f'<span class="dg-earlier">earlier runs:</span>{reason_words(since_start.eager)}'
    return '<span class="dg-quiet">every call came from a graph</span>'


def _calls_of(report: Report) -> Calls:
    """Calls since the start, less those of plain runs that Compare made on purpose."""
    fallbacks = cast("Mapping[str, int]", report.get("fallbacks") or {})
    is_off = report.get("backend") == "off"
    eager = {
        reason: number
        for name, number in fallbacks.items()
        if (reason := Reason(name)) is not Reason.DISABLED or is_off
    }
    return Calls(int(str(report.get("replays") or 0)), eager)


def _share(calls: Calls) -> str:
    total = calls.graph + calls.num_eager
    share = calls.graph / total if total else 0.0
    return (
        f'<span class="dg-share"><span class="dg-meter" aria-hidden="true">'
        f'<i style="width:{100 * share:.0f}%"></i></span>{calls.graph}/{total}</span>'
    )


def _memory(snapshot: GraphSnapshot, reports: Mapping[str, Report]) -> str:
    held, budget = snapshot.held_bytes, snapshot.budget_bytes
    count = sum(len(_graphs(report)) for report in reports.values())
    if budget is None:
        limit = "no limit: main memory is not budgeted"
        share = 0.0
    else:
        limit = f"budget {bytes_words(budget)}"
        share = min(1.0, held / budget) if budget else 1.0
    counters: Counter[str] = Counter()
    for report in reports.values():
        for name in ("capture", "eviction"):
            counters[name] += int(str(report.get(f"{name}s") or 0))
    words = ", ".join(plural(counters[name], name) for name in ("capture", "eviction"))
    bar = (
        ""
        if budget is None
        else (
            f'<span class="dg-meter dg-meter-wide" aria-hidden="true">'
            f'<i style="width:{100 * share:.1f}%"></i></span>'
        )
    )
    return (
        f'<p class="dg-figure"><b>{bytes_words(held)}</b> in {plural(count, "graph")}</p>{bar}'
        f'<p class="dg-quiet">{text(limit)}</p><p class="dg-quiet">{text(words)}</p>'
    )


def _graphs(report: Report) -> Sequence[Report]:
    return cast("Sequence[Report]", report.get("graphs") or [])


def _signatures(reports: Mapping[str, Report]) -> str:
    rows = [
        _signature_row(label, graph)
        for label, report in reports.items()
        for graph in _graphs(report)
    ]
    if not rows:
        return '<p class="dg-empty">None yet. A signature is captured when it is used again.</p>'
    heads = ("component", "signature", "graph", "captured", "eager → replay", "replays", "memory")
    return table("Signatures held", (*heads, "verified"), rows)


def _signature_row(label: str, graph: Report) -> list[str]:
    fraction = graph.get("captured_fraction")
    eager, replay = graph.get("eager_ms"), graph.get("replay_ms")
    times = "–"
    if isinstance(eager, (int, float)) and isinstance(replay, (int, float)):
        times = f"{millis(eager)} → {millis(replay)}"
    return [
        text(label),
        text(graph.get("signature")),
        f"{text(graph.get('backend'))}, {plural(int(str(graph.get('segments') or 0)), 'segment')}",
        f"{fraction:.0%}" if isinstance(fraction, (int, float)) else "–",
        times,
        text(graph.get("replays")),
        bytes_words(int(str(graph.get("nbytes") or 0))),
        text(graph.get("verified")),
    ]
