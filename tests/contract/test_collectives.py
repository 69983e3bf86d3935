"""A forward that exchanges tensors with other processes stays eager: they must stay in step.

The surprising fact: a compare alone would put one process a collective ahead of the others, and
from then on every result would be another call's.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import dit_graphs
from dit_graphs.wrapping import runner_of


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        dist.all_reduce(hidden)
        return hidden * 2


def _work(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    module = Summed()
    plain = copy.deepcopy(module)
    for backend in ("recorded", "debug"):
        dit_graphs.wrap(module, backend=backend)
        with torch.no_grad():
            for index in range(6):
                x = torch.full((3, 8), float(rank + index))
                assert torch.equal(module(x), plain(x)), f"{backend}, call {index}"
        fallbacks = {r.value: n for r, n in runner_of(module).stats.fallbacks.items()}
        assert fallbacks == {"warming_up": 2, "collective": 4}
        dit_graphs.unwrap(module)
    dist.destroy_process_group()
    Path(folder, f"done-{rank}").touch()


def test_b67_a_forward_with_a_collective_stays_eager_and_in_step(tmp_path: Path) -> None:
    context = mp.spawn(_work, args=(str(tmp_path),), nprocs=2, join=False)
    for _ in range(2):
        if context.join(timeout=60):
            break
    assert {path.name for path in tmp_path.glob("done-*")} == {"done-0", "done-1"}
