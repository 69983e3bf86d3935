"""NCCL beside graphs: its watchdog thread polls events while this one captures.

Under CUDA's global capture mode such a poll is illegal, and the watchdog's answer is to abort the
process. Only whole processes can show it, so each rank is one.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from blocks import Denoiser, build, inputs

from dit_graphs import GraphConfig, unwrap, wrap
from dit_graphs.wrapping import runner_of

ROUNDS = 50
IN_FLIGHT_CYCLES = 800_000_000  # some 0.4 s, well into the capture
POLLED_S = 0.15  # the watchdog looks about ten times a second


class Lingering(Denoiser):
    """Stays in the capture until the watchdog has polled."""

    def forward(self, x, t, text=None):
        y = super().forward(x, t, text)
        if torch.cuda.is_current_stream_capturing():
            time.sleep(POLLED_S)
        return y


def _one_round(module: Denoiser, plain: Denoiser, number: int, rank: int, world: int) -> None:
    """A collective is under way on a stream of its own while the module's first call captures."""
    wrap(module, GraphConfig(backend="full", capture="first_use"))
    summed = torch.full((1 << 20,), float(rank + 1), device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(IN_FLIGHT_CYCLES)
        pending = dist.all_reduce(summed, async_op=True)
    assert not pending.is_completed()
    with torch.no_grad():
        for seed in (number, number + 1, number + 2):
            given = inputs(seed)
            assert torch.equal(module(**given)[0], plain(**given)[0])
    pending.wait()
    assert torch.equal(summed, torch.full_like(summed, world * (world + 1) / 2))
    report = runner_of(module).report()
    assert report["captures"] == 1 and report["replays"] >= 1
    assert set(report["fallbacks"]) <= {"warming_up"}
    unwrap(module)


def _work(rank: int, world: int, folder: str) -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # not every machine has NVLink multicast
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", world)
    module, plain = build(Lingering), build(Lingering)
    with torch.no_grad():
        plain(**inputs(0))  # loads its kernels, which would outlast the collective
    for number in range(ROUNDS):
        dist.init_process_group(
            "nccl",
            store=dist.PrefixStore(str(number), store),
            rank=rank,
            world_size=world,
            device_id=torch.device("cuda", rank),
        )
        dist.all_reduce(torch.ones(1, device="cuda"))  # connects the ranks, which takes seconds
        dist.barrier()
        torch.cuda.synchronize()
        _one_round(module, plain, number, rank, world)
        dist.destroy_process_group()
    Path(folder, f"done-{rank}").touch()


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.multigpu)])
def test_b68_a_capture_while_a_collective_is_under_way(world: int, tmp_path: Path) -> None:
    """Fifty times: a new process group, one all_reduce in flight, and a capture at once."""
    context = mp.spawn(_work, args=(world, str(tmp_path)), nprocs=world, join=False)
    deadline = time.monotonic() + 230
    try:
        while not context.join(timeout=max(deadline - time.monotonic(), 0.1)):
            assert time.monotonic() < deadline, "a rank hangs"
    finally:
        for process in context.processes:
            process.kill()
    assert {path.name for path in tmp_path.glob("done-*")} == {f"done-{r}" for r in range(world)}
