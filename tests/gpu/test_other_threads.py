"""Threads: workers that replay, and others that use the device while a graph is captured."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny
import torch
from blocks import Denoiser, build, inputs

import dit_graphs
from dit_graphs import GraphConfig, wrap
from dit_graphs.wrapping import runner_of


class SlowToCapture(Denoiser):
    """Stays in the capture for a while, so that other threads surely meet it."""

    capturing = threading.Event()

    def forward(self, x, t, text=None):
        y = super().forward(x, t, text)
        if torch.cuda.is_current_stream_capturing():
            self.capturing.set()
            time.sleep(0.3)
            self.capturing.clear()
        return y


def _allocates(buffers: list[torch.Tensor]) -> None:
    del buffers[:-4]
    buffers.append(torch.full((1 << 20,), 1.0, device="cuda"))


def _copies(buffers: list[torch.Tensor]) -> None:
    pinned = torch.ones(1 << 18).pin_memory()
    moved = pinned.to("cuda", non_blocking=True)
    assert float(moved.sum().cpu()) == 1 << 18


def _computes(buffers: list[torch.Tensor]) -> None:
    x = torch.ones(256, 256, device="cuda")
    assert float((x @ x).sum()) == 256**3


@pytest.mark.parametrize("work", [_allocates, _copies, _computes])
def test_b64_another_thread_works_on_the_device_during_a_capture(work: Callable) -> None:
    """Only what this thread does belongs to the capture; the other's work goes on unharmed."""
    module, reference = build(SlowToCapture), build(SlowToCapture)
    SlowToCapture.capturing.clear()
    wrap(module, GraphConfig(backend="full"))
    stop, rounds, during = threading.Event(), [0], [0]

    def other() -> None:
        buffers: list[torch.Tensor] = []
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            while not stop.is_set():
                was_capturing = SlowToCapture.capturing.is_set()
                work(buffers)
                rounds[0] += 1
                during[0] += was_capturing and SlowToCapture.capturing.is_set()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(other)
        while not rounds[0] and not done.done():
            time.sleep(0.01)  # its first round loads kernels
        try:
            with torch.no_grad(), dit_graphs.request(total_steps=12):
                for seed in range(12):
                    assert torch.equal(module(**inputs(seed))[0], reference(**inputs(seed))[0])
        finally:
            stop.set()
            done.result(timeout=60)
    assert rounds[0] > during[0] > 0, "whole rounds lay within the capture, and some did not"
    report = runner_of(module).report()
    assert set(report["fallbacks"]) <= {"warming_up"}
    assert report["replays"] == 9


@pytest.mark.alone
def test_b64_another_thread_that_waits_for_the_device_spoils_one_capture_at_most() -> None:
    """A device-wide wait is illegal while any stream captures: that call is eager, all go on."""
    module, reference = build(SlowToCapture), build(SlowToCapture)
    SlowToCapture.capturing.clear()
    wrap(module, GraphConfig(backend="full"))
    stop, refused = threading.Event(), []

    def other() -> None:
        SlowToCapture.capturing.wait(timeout=60)
        while not stop.is_set():
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:  # told, not harmed
                refused.append(str(error))
            time.sleep(0.01)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(other)
        try:
            with torch.no_grad(), dit_graphs.request(total_steps=12):
                for seed in range(12):
                    assert torch.equal(module(**inputs(seed))[0], reference(**inputs(seed))[0])
        finally:
            stop.set()
            done.result(timeout=60)
    torch.cuda.synchronize()
    assert torch.equal(torch.ones(4, device="cuda").cpu(), torch.ones(4))
    fresh, plain = build(seed=8), build(seed=8)
    wrap(fresh, GraphConfig(backend="full"))
    with torch.no_grad(), dit_graphs.request(total_steps=6):
        for seed in range(6):
            assert torch.equal(fresh(**inputs(seed))[0], plain(**inputs(seed))[0])
    assert runner_of(fresh).report()["replays"] == 3


def test_b65_three_workers_call_one_accelerated_pipeline_in_turn() -> None:
    fast, plain = tiny.build("flux").to("cuda"), tiny.build("flux").to("cuda")
    dit_graphs.accelerate(fast, backend="full")

    def latents(pipe: object, seed: int) -> torch.Tensor:
        return tiny.latents(pipe, tiny.call_kwargs("flux", size=64, steps=5, seed=seed))

    def work(seed: int) -> torch.Tensor:
        with lock:  # one call at a time per pipeline
            return latents(fast, seed).cpu()

    lock = threading.Lock()
    assert torch.equal(latents(fast, 0), latents(plain, 0))
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(work, range(9)))
    for seed, result in enumerate(found):
        assert torch.equal(result, latents(plain, seed).cpu()), f"seed {seed}"
    denoiser = dit_graphs.stats(fast)["components"]["denoiser"]
    assert denoiser["captures"] == 1
    assert set(denoiser["fallbacks"]) == {"warming_up"}


def test_two_pipelines_at_once_share_the_pool_and_keep_their_pictures() -> None:
    names = ("flux", "sd3")
    fast = {name: tiny.build(name).to("cuda") for name in names}
    plain = {name: tiny.build(name).to("cuda") for name in names}
    for pipe in fast.values():
        dit_graphs.accelerate(pipe, backend="full")

    def work(name: str) -> list[torch.Tensor]:
        found = []
        with torch.cuda.stream(torch.cuda.Stream()):
            for seed in range(8):
                arguments = tiny.call_kwargs(name, size=64, steps=5, seed=seed)
                found.append(tiny.latents(fast[name], arguments).cpu())
        return found

    with ThreadPoolExecutor(2) as pool:
        results = dict(zip(names, pool.map(work, names), strict=True))
    for name, found in results.items():
        for seed, result in enumerate(found):
            arguments = tiny.call_kwargs(name, size=64, steps=5, seed=seed)
            assert torch.equal(result, tiny.latents(plain[name], arguments).cpu()), (name, seed)
        denoiser = dit_graphs.stats(fast[name])["components"]["denoiser"]
        assert denoiser["replays"] > 0
        assert set(denoiser["fallbacks"]) <= {"warming_up", "capture_gate_busy"}
