"""Weights that somebody moves or exchanges by hand: no replay reads memory that is another's.

Each alone, because a launch that reads unmapped memory or a wrong index ends the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import pytest
import torch
from blocks import build, inputs
from torch import Tensor, nn

import dit_graphs
from dit_graphs import wrap
from dit_graphs.wrapping import runner_of


class Picks(nn.Module):
    """Picks rows of a table by a large buffer: where that holds anything else, the kernel dies."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build(dim=1024, heads=8)
        self.table = nn.Embedding(64, 1024, device="cuda", dtype=torch.bfloat16)
        self.register_buffer("which", torch.arange(1 << 20, device="cuda") % 64)

    def forward(self, x: Tensor, t: Tensor, text: Tensor | None = None) -> tuple[Tensor]:
        picked: tuple[Tensor] = self.inner(x + self.table(self.which[: x.shape[1]]), t, text)
        return picked


def _moved(module: Picks, reference: Picks) -> object:
    for weight in module.parameters():
        weight.data = weight.data.cpu()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    junk = [torch.full((8 << 20,), float("nan"), device="cuda") for _ in range(8)]
    for weight in module.parameters():
        weight.data = weight.data.cuda()
    return junk


def _exchanged(module: Picks, reference: Picks) -> object:
    shape = module.which.shape
    module.which = torch.arange(shape[0], device="cuda") % 7
    reference.which = module.which.clone()
    return [torch.full(shape, 1 << 40, dtype=torch.int64, device="cuda") for _ in range(8)]


@pytest.mark.alone
@pytest.mark.parametrize("by_hand", [True, False], ids=["one request", "a request per call"])
@pytest.mark.parametrize("change", [_moved, _exchanged], ids=["moved", "exchanged"])
def test_a_replay_reads_no_memory_that_a_weight_gave_back(
    change: Callable[[Picks, Picks], object], by_hand: bool
) -> None:
    module, reference = Picks().eval(), Picks().eval()
    reference.load_state_dict(module.state_dict())
    wrap(module, backend="full")

    def check(seeds: Iterable[int]) -> None:
        for seed in seeds:
            call = inputs(seed, dim=1024)
            inner = contextlib.nullcontext() if by_hand else dit_graphs.request(8)
            with torch.no_grad(), inner:
                assert torch.equal(module(**call)[0], reference(**call)[0]), seed

    with dit_graphs.request(20) if by_hand else contextlib.nullcontext():
        check(range(6))
        replays = runner_of(module).stats.replays
        assert replays > 0
        kept = change(module, reference)
        check(range(6, 12))
        torch.cuda.synchronize()
    assert runner_of(module).stats.replays > replays and kept
