"""Owns what the graphs did during one call: the difference of two `stats`, in numbers and words.

Must never round up: a call that a graph did not answer is named with its reason. The surprising
fact: on a CPU the recorder replays the same calls without any CUDA graph, and the line says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from diffusers import DiffusionPipeline

import dit_graphs

from .request import Json

__all__ = ["GraphUse", "counts"]

# Reasons that mean: nothing was recorded at all.
_NOT_RECORDED = {"no_cuda", "disabled", "kill_switch"}
_Counts = dict[str, Counter[str]]


@dataclass(frozen=True, slots=True)
class GraphUse:
    """Calls of all wrapped components during one pipeline call."""

    replays: int = 0
    eager_calls: int = 0
    captures: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def between(cls, before: _Counts, after: _Counts) -> GraphUse:
        """What happened from one reading of the counters to the next."""
        total: Counter[str] = Counter()
        for name, counters in after.items():
            total.update(counters)
            total.subtract(before.get(name, Counter()))
        reasons = {k.removeprefix("reason "): n for k, n in total.items() if k[:7] == "reason "}
        return cls(
            replays=total["replays"],
            eager_calls=total["eager_calls"],
            captures=total["captures"],
            reasons={reason: n for reason, n in sorted(reasons.items()) if n},
        )

    def to_mapping(self) -> dict[str, Json]:
        """Plain JSON for a sidecar."""
        return {
            "replays": self.replays,
            "eager_calls": self.eager_calls,
            "captures": self.captures,
            "reasons": dict(self.reasons),
        }

    def line(self, device: torch.device) -> str:
        """`cuda graph: 16/18 (2 eager: warming_up)`, or what the CPU recorder did instead."""
        calls = self.replays + self.eager_calls
        if device.type != "cuda" and not _NOT_RECORDED & set(self.reasons):
            return (
                f"{self.replays} of {calls} calls replayed by the CPU recorder: "
                "no CUDA graphs, no speed-up"
            )
        if not self.eager_calls:
            return f"cuda graph: {self.replays}/{calls}"
        named = self._named()
        reasons = [f"{n} {name}" if len(named) > 1 else name for name, n in named]
        return (
            f"cuda graph: {self.replays}/{calls} ({self.eager_calls} eager: {', '.join(reasons)})"
        )

    def _named(self) -> list[tuple[str, int]]:
        unnamed = self.eager_calls - sum(self.reasons.values())
        named = sorted(self.reasons.items(), key=lambda item: -item[1])
        return [*named, *([("unnamed", unnamed)] if unnamed > 0 else [])] or [("unnamed", 0)]


def counts(pipe: DiffusionPipeline) -> _Counts:
    """The counters of every wrapped component of `pipe` now; empty where nothing is wrapped."""
    result: _Counts = {}
    try:
        components = cast("dict[str, dict[str, Any]]", dit_graphs.stats(pipe)["components"])
    except dit_graphs.ConfigError:
        return result  # a plain pipeline
    for name, component in components.items():
        counter: Counter[str] = Counter()
        for key in ("replays", "eager_calls", "captures"):
            counter[key] = int(component.get(key, 0))
        for reason, number in component.get("fallbacks", {}).items():
            counter[f"reason {reason}"] = int(number)
        result[name] = counter
    return result
