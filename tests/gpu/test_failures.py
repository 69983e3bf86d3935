"""Captures that fail on purpose: the process, its generator and the shared pool stay healthy."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from blocks import Denoiser, build, inputs

import dit_graphs
from dit_graphs import GraphConfig, eager_on_graph, wrap
from dit_graphs.backends.cuda import CudaBackend
from dit_graphs.memory import CudaState
from dit_graphs.wrapping import runner_of

pytestmark = pytest.mark.alone


class HostRead(Denoiser):
    def forward(self, x, t, text=None):
        factor = 2.0 if x.float().mean().item() > -1e9 else 1.0
        return super().forward(x * factor, t, text)


class HostReadInside(Denoiser):
    class Reader(torch.nn.Module):
        def forward(self, x):
            return x * (1.0 if bool(x.float().sum() > -1e9) else 2.0)

    def __init__(self, **options):
        super().__init__(**options)
        self.reader = HostReadInside.Reader()

    def forward(self, x, t, text=None):
        return super().forward(self.reader(x), t, text)


FAILURES = {"host_read", "host_copy", "constant_changed", "capture_failed"}


class PageableCopy(Denoiser):
    """Copies host memory of the module that the user changes between calls: never a constant."""

    def __init__(self, **options):
        super().__init__(**options)
        self.host_bias = torch.zeros(256, device="cpu")

    def forward(self, x, t, text=None):
        return super().forward(x + self.host_bias.to("cuda", x.dtype), t, text)


class Raises(Denoiser):
    """Fails inside the capture only, after kernels were captured."""

    def forward(self, x, t, text=None):
        y = super().forward(x, t, text)[0]
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()  # illegal: invalidates the capture itself
        return (y,)


def healthy(module, reference, seeds) -> None:
    """Random numbers, eager calls, memory and a new capture all work."""
    torch.manual_seed(5)
    first = torch.randn(16, device="cuda")
    torch.cuda.manual_seed(5)
    assert torch.equal(torch.randn(16, device="cuda"), first)
    with torch.no_grad():
        for seed in seeds:
            assert torch.equal(module(**inputs(seed))[0], reference(**inputs(seed))[0])
    junk = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    held = torch.cuda.memory_reserved()
    del junk
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= held - (256 << 20)
    fresh, plain = build(seed=9), build(seed=9)
    wrap(fresh, GraphConfig(backend="full"))
    with torch.no_grad(), dit_graphs.request(total_steps=6):
        for seed in range(6):
            assert torch.equal(fresh(**inputs(seed))[0], plain(**inputs(seed))[0])
    assert runner_of(fresh).report()["replays"] == 3
    dit_graphs.unwrap(fresh)


@pytest.mark.parametrize("kind", [HostRead, PageableCopy, Raises])
def test_a_failing_capture_leaves_the_process_healthy(kind):
    good, good_reference = build(seed=3), build(seed=3)
    wrap(good, GraphConfig(backend="full"))
    with torch.no_grad(), dit_graphs.request(total_steps=5):
        for seed in range(5):
            good(**inputs(seed))
    module, reference = build(kind), build(kind)
    wrap(module, GraphConfig(backend="auto", capture="first_use"))
    for attempt in range(3):
        with torch.no_grad():
            for seed in range(6):
                module.host_bias = torch.full((256,), float(seed + attempt))
                reference.host_bias = module.host_bias.clone()
                kwargs = inputs(seed, tokens=64 + 32 * attempt)
                assert torch.equal(module(**kwargs)[0], reference(**kwargs)[0])
        if kind is Raises:
            healthy(good, good_reference, range(30, 36))
    stats = runner_of(module).report()
    assert stats["replays"] == 0
    if kind is PageableCopy:
        assert (
            stats["invalidations"] >= 10
        )  # each new host tensor drops what was baked from the last
    else:
        assert set(stats["fallbacks"]) & FAILURES
    healthy(good, good_reference, range(30, 36))
    assert runner_of(good).report()["replays"] >= 2


def test_a_host_read_in_a_submodule_becomes_an_eager_break():
    module, reference = build(HostReadInside), build(HostReadInside)
    wrap(module, GraphConfig(backend="breakable"))
    with torch.no_grad(), dit_graphs.request(total_steps=9):
        for seed in range(9):
            assert torch.equal(module(**inputs(seed))[0], reference(**inputs(seed))[0])
    stats = runner_of(module).report()
    assert stats["replays"] >= 4
    assert stats["graphs"][0]["breaks"] == 1


def test_the_random_stream_is_that_of_a_process_that_never_captured():
    def stream(kind):
        module = build(kind)
        if kind is not Denoiser:
            wrap(module, GraphConfig(backend="full", capture="first_use"))
        torch.manual_seed(17)
        with torch.no_grad():
            for seed in range(4):
                module(**inputs(seed))
        return torch.randn(64, device="cuda"), torch.rand(64)

    plain, failed = stream(Denoiser), stream(Raises)
    assert torch.equal(plain[0], failed[0]) and torch.equal(plain[1], failed[1])


@pytest.mark.parametrize("when", ["capture", "replay"])
def test_an_error_inside_a_break_reaches_the_user_as_the_models_own(when):
    bomb = {"armed": False}

    @eager_on_graph
    def fragile(x):
        if bomb["armed"]:
            raise ValueError("the model says no")
        return x + 1

    class Fragile(Denoiser):
        def forward(self, x, t, text=None):
            return super().forward(fragile(x), t, text)

    module, reference = build(Fragile), build(Fragile)
    wrap(module, GraphConfig(backend="breakable"))
    calls = 1 if when == "capture" else 6
    with torch.no_grad(), dit_graphs.request(total_steps=12):
        for seed in range(calls):
            module(**inputs(seed))
        bomb["armed"] = True
        with pytest.raises(ValueError, match="the model says no"):
            module(**inputs(50))
        bomb["armed"] = False
        for seed in range(60, 66):
            assert torch.equal(module(**inputs(seed))[0], reference(**inputs(seed))[0])
    healthy(build(seed=3), build(seed=3), range(2))


def test_b31_running_out_of_memory_releases_graphs_and_retries_once():
    module, reference = build(dim=1024, heads=8), build(dim=1024, heads=8)
    wrap(module, GraphConfig(backend="full"))
    with torch.no_grad(), dit_graphs.request(total_steps=5):
        for seed in range(5):
            module(**inputs(seed, dim=1024, tokens=4096))
    state = runner_of(module).state
    assert state.pool_bytes() > 0
    big = inputs(1, dim=1024, tokens=8192)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    try:
        torch.cuda.set_per_process_memory_fraction(
            (torch.cuda.memory_reserved() + (96 << 20)) / total
        )
        # where it is still too big without graphs, the error is the user's to see
        with torch.no_grad(), contextlib.suppress(torch.OutOfMemoryError):
            module(**big)
        assert runner_of(module).report()["fallbacks"].get("out_of_memory", 0) >= 1
        assert state.pool_bytes() == 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    with torch.no_grad(), dit_graphs.request(total_steps=8):
        for seed in range(8):
            kwargs = inputs(seed, dim=1024, tokens=128)
            assert torch.equal(module(**kwargs)[0], reference(**kwargs)[0])


def test_b36_garbage_graphs_are_not_destroyed_during_a_capture():
    enabled = gc.isenabled()
    gc.set_threshold(1)
    try:
        for seed in range(12):
            module, reference = build(seed=seed), build(seed=seed)
            wrap(module, GraphConfig(backend="full"))
            with torch.no_grad(), dit_graphs.request(total_steps=5):
                for step in range(5):
                    assert torch.equal(module(**inputs(step))[0], reference(**inputs(step))[0])
            assert runner_of(module).report()["replays"] == 2
            loop = [module]
            loop.append(loop)  # a cycle that only the collector can free
            del module, loop
    finally:
        gc.set_threshold(700, 10, 10)
    assert gc.isenabled() == enabled


def test_b36_an_old_graph_whose_last_reference_goes_during_a_capture():
    """No collector is needed for that: a forward that drops a graph destroys it on the spot."""
    old: list[torch.cuda.CUDAGraph] = []

    class Drops(Denoiser):
        def forward(self, x, t, text=None):
            y = super().forward(x, t, text)
            if torch.cuda.is_current_stream_capturing() and old:
                old.pop()
            return y

    x = torch.ones(64, device="cuda")
    for _ in range(20):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.mul_(2)
        old.append(graph)
    del graph
    for seed in range(6):
        module, reference = build(Drops, seed=seed), build(Drops, seed=seed)
        wrap(module, GraphConfig(backend="full"))
        with torch.no_grad(), dit_graphs.request(total_steps=6):
            for step in range(6):
                assert torch.equal(module(**inputs(step))[0], reference(**inputs(step))[0])
        report = runner_of(module).report()
        assert set(report["fallbacks"]) <= {"warming_up", "capture_failed"}
    assert len(old) < 20, "graphs were dropped during captures"
    torch.cuda.synchronize()
    fresh, plain = build(seed=9), build(seed=9)
    wrap(fresh, GraphConfig(backend="full"))
    with torch.no_grad(), dit_graphs.request(total_steps=6):
        for step in range(6):
            assert torch.equal(fresh(**inputs(step))[0], plain(**inputs(step))[0])
    assert runner_of(fresh).report()["replays"] == 3, "captures work as before"


def test_b37_no_capture_is_started_without_headroom(monkeypatch):
    module, reference = build(), build()
    wrap(module, GraphConfig(backend="full"))
    monkeypatch.setattr(CudaState, "HEADROOM_BYTES", 1 << 60)
    with torch.no_grad(), dit_graphs.request(total_steps=6):
        for seed in range(6):
            assert torch.equal(module(**inputs(seed))[0], reference(**inputs(seed))[0])
    assert runner_of(module).report()["fallbacks"]["low_memory"] >= 1
    assert runner_of(module).report()["captures"] == 0


def test_only_a_capture_beside_other_graphs_is_tried_in_a_scratch_pool(monkeypatch):
    """Where there are none, a failure ruins no pool of theirs; the last one's end counts too."""
    trials: list[bool] = []
    capture = CudaBackend.capture

    def told(self, fn, plan):
        trials.append(plan.is_trial)
        return capture(self, fn, plan)

    monkeypatch.setattr(CudaBackend, "capture", told)
    modules = [build(seed=seed) for seed in range(3)]

    def serve(module):
        wrap(module, GraphConfig(backend="full"))
        with torch.no_grad():
            for seed in range(6):
                module(**inputs(seed))
        assert runner_of(module).stats.replays > 0

    serve(modules[0])
    assert trials == [False]
    serve(modules[1])
    assert trials == [False, True, False]
    for module in modules[:2]:
        dit_graphs.unwrap(module)
    serve(modules[2])
    assert trials == [False, True, False, False]
