"""Owns the sentence for what graphs did in one run, and whether they did anything.

Must never let plain eager pass for graphs. The surprising fact: graphs may be on and still serve no
call, on a CPU above all; two such runs have the same pixels and prove nothing.
"""

from __future__ import annotations

import torch

from dit_graphs.errors import Reason
from dit_graphs.pipelines.generate.usage import GraphUse

__all__ = ["reasons_in_words", "source_of", "use_line"]


def source_of(use: GraphUse) -> str:
    """Where the calls of a run came from: graph, eager or mixed."""
    if not use.replays:
        return "eager"
    return "mixed" if use.eager_calls else "graph"


def reasons_in_words(use: GraphUse) -> str:
    """Why calls were eager, the most frequent reason first; "" where none was."""
    known = {reason.value: reason.sentence for reason in Reason}
    named = sorted(use.reasons.items(), key=lambda item: -item[1])
    return "; ".join(known.get(name, name) for name, _ in named)


def use_line(use: GraphUse, device: torch.device) -> str:
    """The line of `generate`; without a GPU and without a replay, no word of CUDA graphs."""
    line = use.line(device)
    if device.type == "cuda" or not line.startswith("cuda graph"):
        return line
    num_calls = use.replays + use.eager_calls
    return f"{use.replays} of {num_calls} calls from a graph: {reasons_in_words(use)}"
