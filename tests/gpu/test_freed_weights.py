"""Weights that somebody moves by hand, their memory given back: no replay may read it.

Each in a process of its own, because a launch that reads unmapped memory ends the context.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

_HERE = Path(__file__).resolve().parent
_START = """
import contextlib, torch, dit_graphs
from torch import nn
from blocks import build, inputs
from dit_graphs import wrap
from dit_graphs.wrapping import runner_of

class Picks(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = build(dim=1024, heads=8)
        self.table = nn.Embedding(64, 1024, device="cuda", dtype=torch.bfloat16)
        self.register_buffer("which", torch.arange(32, device="cuda").repeat(1 << 16)[: 1 << 20])
    def forward(self, x, t, text=None):
        return self.inner(x + self.table(self.which[: x.shape[1]]), t, text)

torch.manual_seed(0)
module = Picks().eval()
reference = Picks().eval()
reference.load_state_dict(module.state_dict())
wrap(module, backend="full")
scope = dit_graphs.request(total_steps=20) if {by_hand} else contextlib.nullcontext()

def check(seeds):
    for seed in seeds:
        call = inputs(seed, dim=1024)
        with torch.no_grad(), contextlib.nullcontext() if {by_hand} else dit_graphs.request(8):
            assert torch.equal(module(**call)[0], reference(**call)[0]), seed

with scope:
    check(range(6))
    assert runner_of(module).stats.replays > 0
    torch.cuda.synchronize()
"""
_MOVED = """
    for weight in module.parameters():
        weight.data = weight.data.cpu()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    kept = [torch.empty(64 << 20, device="cuda") for _ in range(2)]
    for weight in module.parameters():
        weight.data = weight.data.cuda()
    check(range(6, 12))
    torch.cuda.synchronize()
"""
_OVERWRITTEN = """
    shape = module.which.shape
    module.which = torch.arange(shape[0], device="cuda") % 7
    reference.which = module.which.clone()
    junk = [torch.full(shape, 1 << 40, dtype=torch.int64, device="cuda") for _ in range(8)]
    check(range(6, 12))
    torch.cuda.synchronize()
"""


@pytest.mark.parametrize("by_hand", [True, False], ids=["one request", "a request per call"])
@pytest.mark.parametrize("change", [_MOVED, _OVERWRITTEN], ids=["unmapped", "overwritten"])
def test_memory_that_a_weight_gave_back_is_not_read(change: str, by_hand: bool) -> None:
    body = _START.replace("{by_hand}", str(by_hand)) + textwrap.indent(
        textwrap.dedent(change), "    "
    )
    paths = [str(_HERE), *sys.path]
    result = subprocess.run(
        [sys.executable, "-c", body],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
