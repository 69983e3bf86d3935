"""Owns what users read: `stats`, `explain`, and `disabled` for comparing by hand.

Must never know how parts are wrapped. The surprising fact: a module that was only wrapped, in a
loop of the user's own, is reported like a pipeline with one denoiser; a method beside `forward`
goes by its own name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from torch import nn

from dit_graphs.counters import counted
from dit_graphs.errors import ConfigError
from dit_graphs.worth import MOSTLY_EAGER
from dit_graphs.wrapping import runners_of

from .acceleration import acceleration_of
from .installed import InstalledRunner

__all__ = ["disabled", "explain", "misses", "not_called", "stats", "verified"]

_KEYS = {"forward": "denoiser"}
_TEXT_PHASES = ("decode", "prefill")


def _runners_of(target: object) -> dict[str, InstalledRunner]:
    """The runners of an accelerated pipeline or a wrapped module. Raises `ConfigError`."""
    found = acceleration_of(target)
    if found is not None:
        return found.runners
    wrapped = runners_of(target) if isinstance(target, nn.Module) else {}
    if wrapped:
        return {_KEYS.get(method, method): runner for method, runner in wrapped.items()}
    raise ConfigError(
        f"{type(target).__name__} is not accelerated: call accelerate(), or wrap() for one module, "
        "first"
    )


def _refused(target: object) -> dict[str, str]:
    found = acceleration_of(target)
    return dict(found.refused) if found is not None else {}


def stats(target: object) -> dict[str, object]:
    """Counters per component and one record per graph, as plain JSON-serialisable values.

    Raises `ConfigError` where the target was never accelerated.
    """
    runners = _runners_of(target)
    components = {label: runner.report() for label, runner in runners.items()}
    graphs = any(runner.holds_graphs() for runner in runners.values())
    return {
        "mode": "graphs" if graphs else "eager",
        "components": components,
        "refused": _refused(target),
    }


def explain(target: object) -> str:
    """What ran from graphs and what did not, with each reason in words."""
    lines: list[str] = []
    idle: list[str] = []
    is_pipeline = acceleration_of(target) is not None
    for label, runner in _runners_of(target).items():
        label = label if is_pipeline else runner.stats.component  # as the log names it
        told = list(_explain_runner(label, runner))
        if len(told) == 1 and not runner.stats.replays:  # no call, no graph, no miss
            idle.append(label)
        else:
            lines.extend(told)
    if idle:
        lines.append(not_called(idle))
    lines.extend(f"{label}: eager. {why}" for label, why in _refused(target).items())
    return "\n".join(lines) or "nothing is wrapped"


def _explain_runner(label: str, runner: InstalledRunner) -> Iterator[str]:
    yield f"{label}: {runner.stats.line()} calls from graphs"
    report = runner.report()
    expected = report.get("expected_speedup")
    if expected is not None:
        yield f"  expect {expected:.2f}x over eager, by calls that were measured both ways"
    graphs = report["graphs"]
    assert isinstance(graphs, list)
    for graph in graphs:
        mostly = "mostly eager: " if graph["captured_fraction"] < MOSTLY_EAGER else ""
        parts = [counted(graph[what], what[:-1]) for what in ("segments", "breaks", "replays")]
        parts.insert(2, f"{mostly}{graph['captured_fraction']:.0%} captured")
        yield (
            f"  graph {graph['signature']}: {graph['backend']}, {', '.join(parts)}, "
            f"{verified(graph)}"
        )
    for reason, count in runner.stats.fallbacks.most_common():
        detail = runner.stats.details.get(reason, "")
        yield f"  {count} eager: {reason}: {reason.told(detail)}"
    yield from misses(runner)


def not_called(labels: Sequence[str]) -> str:
    """The parts that wait for a first call; `decode` alone would be taken for the VAE's."""
    named = (f"{label} (of text)" if label in _TEXT_PHASES else label for label in labels)
    return f"not called: {', '.join(named)}"


def verified(graph: Mapping[str, object]) -> str:
    """How many inputs had another value in a compare than in the capture."""
    return f"verified {str(graph['verified']).replace('leaves', 'inputs')}"


def misses(runner: InstalledRunner) -> Iterator[str]:
    """Signatures without a graph; one that is there in several states of the module is one line."""
    for line, number in Counter(runner.explain_misses()).items():
        yield line if number == 1 else f"{line} ({number} times)"


@contextmanager
def disabled(target: object) -> Iterator[None]:
    """Plain eager inside the block; graphs are kept for afterwards."""
    runners = _runners_of(target)
    with ExitStack() as stack:
        for runner in runners.values():
            stack.enter_context(runner.switched_off())
        yield
