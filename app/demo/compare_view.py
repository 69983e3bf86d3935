"""Owns how a comparison looks: eager, graphs and their difference side by side, times as bars.

Must never call equal what is not. The surprising fact: the times are those of the denoising steps
and of the whole call, because a graph makes only the wrapped calls faster.
"""

from __future__ import annotations

from PIL import Image

from .compare import Comparison, Difference
from .markup import data_uri, millis, text
from .verdict import reasons_in_words, source_of
from .work import Finished

__all__ = ["comparison_html", "empty_comparison_html"]


def empty_comparison_html() -> str:
    """Before the first comparison."""
    return (
        '<p class="dg-empty">Draws the prompt twice with one seed, once with plain eager calls and '
        "once from graphs, and marks every pixel that differs in red. Equal pictures leave the "
        "difference grey.</p>"
    )


def comparison_html(comparison: Comparison, device: str) -> str:
    """Both pictures, their difference and the times of one comparison."""
    eager, graphs = comparison.eager, comparison.graphs
    state = "equal" if comparison.is_equal else "different"
    return (
        f'<div class="dg-compare" data-state="{state}">{_verdict(comparison)}'
        '<div class="dg-compare-row">'
        f"{_figure(_picture(eager), 'Plain eager', millis(_seconds(eager) * 1e3))}"
        f"{_figure(_picture(graphs), _title(comparison), millis(_seconds(graphs) * 1e3))}"
        f"{_figure(_worst(comparison).picture, 'Difference', _pixels(_worst(comparison)))}"
        f"</div>{_times(comparison)}{_in_sum(comparison, device)}</div>"
    )


def _title(comparison: Comparison) -> str:
    return "With graphs" if comparison.uses_graphs else "No graph was used"


def _verdict(comparison: Comparison) -> str:
    if comparison.is_equal and not comparison.uses_graphs:
        why = reasons_in_words(comparison.graphs.item.graph_use)
        return (
            '<p class="dg-verdict-big dg-note"><strong>Nothing to compare.</strong> No call '
            f"came from a graph{text(f': {why}' * bool(why))}. All three runs were plain eager, so "
            "equal pixels say nothing about graphs.</p>"
        )
    if comparison.is_equal:
        return (
            '<p class="dg-verdict-big dg-good"><strong>Same pixels.</strong> '
            f"0 of {comparison.difference.num_pixels:,} differ, in the first run with graphs and "
            "in the timed one.</p>"
        )
    worst = _worst(comparison)
    return (
        '<p class="dg-verdict-big dg-bad" role="alert"><strong>Not the same picture.</strong> '
        f"{worst.num_different:,} of {worst.num_pixels:,} pixels differ, by up to "
        f"{worst.largest} of 255.</p>"
    )


def _worst(comparison: Comparison) -> Difference:
    pair = (comparison.difference, comparison.first_difference)
    return max(pair, key=lambda difference: difference.num_different)


def _picture(finished: Finished) -> Image.Image:
    frames = finished.item.media[0].frames
    return frames[len(frames) // 2]


def _pixels(difference: Difference) -> str:
    return f"{difference.num_different:,} pixels differ"


def _figure(picture: Image.Image, title: str, words: str) -> str:
    return (
        f'<figure><img alt="{text(title)}" src="{data_uri(picture)}">'
        f"<figcaption><strong>{text(title)}</strong><span>{text(words)}</span></figcaption></figure>"
    )


def _seconds(finished: Finished) -> float:
    return finished.item.total_seconds


def _denoise(finished: Finished) -> float:
    seconds = finished.item.seconds
    return seconds.get("denoise", finished.item.total_seconds)


def _source(finished: Finished) -> str:
    return source_of(finished.item.graph_use)


def _times(comparison: Comparison) -> str:
    runs = [
        ("plain eager", "eager", comparison.eager, "every call eager, graphs off"),
        ("graphs, first run", _source(comparison.first), comparison.first, comparison.first.line),
        (
            "graphs, timed run",
            _source(comparison.graphs),
            comparison.graphs,
            comparison.graphs.line,
        ),
    ]
    longest = max(_seconds(run) for _, _, run, _ in runs) or 1.0
    rows = "".join(
        f'<div class="dg-time"><span>{text(name)}</span><span class="dg-time-track">'
        f'<i class="dg-{kind}" style="width:{100 * _seconds(run) / longest:.1f}%"></i></span>'
        f"<span>{millis(_seconds(run) * 1e3)}</span>"
        f"<span>denoise {millis(_denoise(run) * 1e3)}</span>"
        f'<span class="dg-quiet">{text(line)}</span></div>'
        for name, kind, run, line in runs
    )
    return f'<h2 class="dg-subtitle">Times</h2><div class="dg-times">{rows}</div>'


def _in_sum(comparison: Comparison, device: str) -> str:
    """How much faster, where that means anything."""
    if not comparison.uses_graphs:
        return ""
    if device == "cuda":
        ratio = _denoise(comparison.eager) / max(_denoise(comparison.graphs), 1e-9)
        return (
            f'<p class="dg-quiet">Denoising: {ratio:.2f}x as fast as plain eager, one run each.</p>'
        )
    return (
        '<p class="dg-note">No GPU here: the CPU recorder replays the same operations one by one. '
        "It shows that the pixels are the same; a difference between these times means nothing.</p>"
    )
