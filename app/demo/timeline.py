"""Owns the picture of one run: a bar per stage, coloured by what answered its calls.

Must never use colour alone: eager bars are hatched, and the same numbers stand in a table. The
surprising fact: widths are true. A step that captured is several times wider than its neighbours,
and that is exactly what the reader should see.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from dit_graphs.errors import Reason

from .markup import millis, plural, table, text
from .trace import Calls, RunTrace, Span

__all__ = ["LEGEND", "reason_words", "timeline_html"]

_STEP_LABEL, _STAGE_LABEL = 1.9, 6.0  # percent of the width that a label needs
_STRIDES = (1, 5, 10, 20, 25, 50, 100, 200, 500)
_WORDS = {
    "graph": "from a graph",
    "eager": "eager",
    "mixed": "part graph, part eager",
    "none": "no wrapped call",
}
LEGEND = "".join(
    f'<span class="dg-key"><i class="dg-swatch dg-{name}" aria-hidden="true"></i>{words}</span>'
    for name, words in (*_WORDS.items(), ("capture", "captured here"))
)


def timeline_html(trace: RunTrace, *, has_numbers: bool = True) -> str:
    """The bars, the GPU's lane or why there is none, and the numbers in a table."""
    total = trace.total_ms or 1.0
    stride = _stride(trace, total)
    bars = "".join(_bar(span, total, stride) for span in trace.spans)
    numbers = (
        f"<details class='dg-details'><summary>Every stage in numbers</summary>{_numbers(trace)}"
        "</details>"
    )
    return (
        f'<div class="dg-lanes"><span class="dg-lane-name">calls</span>'
        f'<div class="dg-lane" role="img" aria-label="{text(_summary(trace))}">{bars}</div>'
        f'<span class="dg-lane-name">GPU</span>{_gpu_lane(trace, total)}'
        f'<span></span><div class="dg-axis" aria-hidden="true">{"".join(_ticks(total))}</div></div>'
        f'<div class="dg-legend">{LEGEND}</div>{numbers if has_numbers else ""}'
    )


def _stride(trace: RunTrace, total: float) -> int:
    """Every how many steps a number fits: labels are even, whatever single steps took."""
    steps = [span.end_ms - span.start_ms for span in trace.spans if span.stage == "step"]
    if not steps:
        return 1
    usual = 100 * statistics.median(steps) / total
    return next((stride for stride in _STRIDES if stride * usual > _STEP_LABEL), _STRIDES[-1])


def _bar(span: Span, total: float, stride: int) -> str:
    left, width = 100 * span.start_ms / total, 100 * (span.end_ms - span.start_ms) / total
    if span.stage == "step":
        label = f"<b>{span.index}</b>" if span.index % stride == 0 else ""
    else:
        is_wide = width > _STAGE_LABEL
        label = f'<b class="dg-stage-name">{text(span.stage)}</b>' if is_wide else ""
    mark = '<i class="dg-capture-mark"></i>' if span.total.captures else ""
    return (
        f'<span class="dg-bar dg-{span.source}" title="{text(_sentence(span))}" '
        f'style="left:{left:.3f}%;width:{width:.3f}%">{label}{mark}</span>'
    )


def _name(span: Span) -> str:
    return f"step {span.index}" if span.stage == "step" else span.stage


def _sentence(span: Span) -> str:
    """`step 3: 42 ms, from a graph (denoiser 1 graph)`."""
    parts = [f"{label}: {_calls_words(calls)}" for label, calls in span.calls.items()]
    return f"{_name(span)}: {millis(span.end_ms - span.start_ms)}, " + (
        "; ".join(parts) or _WORDS["none"]
    )


def _calls_words(calls: Calls) -> str:
    words = [f"{calls.graph} from graphs"] if calls.graph else []
    words += [f"{number} eager ({reason.value})" for reason, number in calls.eager.items()]
    words += [plural(calls.captures, "capture")] if calls.captures else []
    return ", ".join(words)


def _summary(trace: RunTrace) -> str:
    """What a reader who does not see the bars needs."""
    steps = [span for span in trace.spans if span.stage == "step"]
    counts = {name: sum(span.source == name for span in steps) for name in _WORDS}
    said = ", ".join(f"{n} {_WORDS[name]}" for name, n in counts.items() if n)
    return f"Timeline of {millis(trace.total_ms)}: {plural(len(steps), 'step')}, {said}."


def _gpu_lane(trace: RunTrace, total: float) -> str:
    if trace.device != "cuda":
        return '<div class="dg-lane dg-none-lane">no GPU: busy/idle not measured</div>'
    measured = [(span, span.gpu) for span in trace.spans if span.gpu is not None]
    if not measured:
        return '<div class="dg-lane dg-none-lane">busy/idle not measured in this run</div>'
    parts = []
    for span, (busy, length) in measured:
        share = busy / length if length else 0.0
        left, width = 100 * span.start_ms / total, 100 * (span.end_ms - span.start_ms) / total
        parts.append(
            f'<span class="dg-gpu" style="left:{left:.3f}%;width:{width:.3f}%" '
            f'title="{text(_name(span))}: GPU busy {share:.0%}, idle {1 - share:.0%}">'
            f'<i class="dg-busy" style="width:{100 * share:.1f}%"></i></span>'
        )
    whole = sum(length for _, (_, length) in measured) or 1.0
    share = sum(busy for _, (busy, _) in measured) / whole
    label = f"GPU busy {share:.0%} of the run, idle {1 - share:.0%}"
    lane = "".join(parts)
    return (
        f'<div class="dg-lane dg-gpu-lane" role="img" aria-label="{label}">{lane}'
        f'<span class="dg-gpu-words" aria-hidden="true">{label}</span></div>'
    )


def _ticks(total: float) -> Iterator[str]:
    """Three to six round numbers along the axis."""
    step = 10.0 ** len(str(int(total))) / 10
    for size in (step / 5, step / 2, step, step * 2):
        if total / size <= 6:
            step = size
            break
    number = 0
    while number * step <= total:
        yield f'<span style="left:{100 * number * step / total:.2f}%">{_tick(number * step)}</span>'
        number += 1


def _tick(value: float) -> str:
    return f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms"


def _numbers(trace: RunTrace) -> str:
    rows = [
        [
            text(_name(span)),
            millis(span.end_ms - span.start_ms),
            millis(span.gpu[0] if span.gpu is not None else None),
            "; ".join(
                f"{text(label)}: {text(_calls_words(calls))}" for label, calls in span.calls.items()
            )
            or _WORDS["none"],
        ]
        for span in trace.spans
    ]
    return table("Every stage in numbers", ("stage", "time", "GPU busy", "calls"), rows)


def reason_words(eager: Mapping[Reason, int]) -> str:
    """One line per reason: how many calls, and why in words."""
    lines = sorted(eager.items(), key=lambda item: -item[1])
    return "".join(
        f'<span class="dg-reason"><b>{number} ×</b> {text(reason.sentence)} '
        f"<code>{text(reason.value)}</code></span>"
        for reason, number in lines
        if number
    )
