"""Replays on a GPU: equal bits with changed inputs, breaks, order between streams, memory."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from blocks import Denoiser, DynamicDenoiser, build, inputs
from torch import nn

import dit_graphs
from dit_graphs import GraphConfig, wrap
from dit_graphs.memory import device_state
from dit_graphs.wrapping import runner_of


def report(module: nn.Module) -> dict:
    return runner_of(module).report()


def check_equal(module, reference, seeds, **shape) -> None:
    for seed in seeds:
        kwargs = inputs(seed, **shape)
        with torch.no_grad():
            got, want = module(**kwargs)[0], reference(**kwargs)[0]
        assert torch.isfinite(want).all() and 1e-3 < want.float().std() < 1e3
        assert torch.equal(got, want), f"seed {seed}"


@pytest.mark.parametrize("backend", ["full", "breakable", "debug"])
def test_replays_equal_eager_with_changed_inputs(backend):
    module, reference = build(), build()
    wrap(module, GraphConfig(backend=backend))
    with dit_graphs.request(total_steps=10):
        check_equal(module, reference, range(10))
    assert report(module)["replays"] == 7
    assert report(module)["graphs"][0]["verified"] == "3/3 leaves"


def test_every_sdpa_call_is_a_break_when_attention_is_eager():
    module, reference = build(), build()
    wrap(module, GraphConfig(backend="breakable", attention="eager"))
    with dit_graphs.request(total_steps=8):
        check_equal(module, reference, range(8))
    graph = report(module)["graphs"][0]
    assert (graph["breaks"], graph["segments"]) == (4, 5)
    assert report(module)["replays"] == 5


def test_dynamic_attention_reads_its_lengths_at_every_replay():
    module, reference = build(DynamicDenoiser), build(DynamicDenoiser)
    wrap(module, GraphConfig(backend="breakable"))
    with torch.no_grad(), dit_graphs.request(total_steps=9):
        for seed, length in enumerate([7, 19, 7] * 3):
            kwargs = inputs(seed, tokens=32)
            lengths = torch.tensor([length, 26 - length], device="cuda")
            call = {"x": kwargs["x"], "t": kwargs["t"], "lengths": lengths}
            assert torch.equal(module(**call)[0], reference(**call)[0])
    assert report(module)["replays"] == 6
    assert report(module)["graphs"][0]["breaks"] == 4


def test_sizes_share_one_pool_and_evicting_one_leaves_the_others_right():
    module, reference = build(), build()
    wrap(module, GraphConfig(backend="full"))
    for tokens in (256, 128, 64):
        with dit_graphs.request(total_steps=6):
            check_equal(module, reference, range(6), tokens=tokens)
    runner = runner_of(module)
    held = runner.cache.held()
    assert len(held) == 3
    runner._evict(held[0])
    torch.cuda.empty_cache()
    junk = [torch.full((n << 18,), float("nan"), device="cuda") for n in (1, 2, 4, 8, 16)]
    with dit_graphs.request(total_steps=6):
        check_equal(module, reference, range(20, 26), tokens=64)
        check_equal(module, reference, range(20, 26), tokens=128)
    del junk


def test_results_stay_the_callers_own():
    module, reference = build(), build()
    wrap(module, GraphConfig(backend="full"))
    with torch.no_grad(), dit_graphs.request(total_steps=12):
        check_equal(module, reference, range(4))
        first, second = module(**inputs(50))[0], module(**inputs(51))[0]
        assert torch.equal(first, reference(**inputs(50))[0])
        assert torch.equal(second, reference(**inputs(51))[0])


def test_chained_output_as_next_input_is_right_from_the_first_call():
    module, reference = build(), build()
    wrap(module, GraphConfig(backend="full"))
    kwargs = inputs(0)
    mine = theirs = kwargs["x"]
    with torch.no_grad(), dit_graphs.request(total_steps=8):
        for _ in range(8):
            mine = module(mine, kwargs["t"], kwargs["text"])[0]
            theirs = reference(theirs, kwargs["t"], kwargs["text"])[0]
            assert torch.equal(mine, theirs)


def test_host_built_constants_are_captured_and_checked():
    class Constants(Denoiser):
        factor = 2.0

        def forward(self, x, t, text=None):
            scale = torch.tensor([self.factor, 3.0], device=x.device)
            picked = x[:, [0, -1]].mean(1, keepdim=True)
            table = torch.arange(x.shape[1]).to(x.device)
            y = super().forward(x * scale[0] + picked + table[None, :, None].to(x.dtype), t, text)[
                0
            ]
            return (y * scale[1],)

    module, reference = build(Constants), build(Constants)
    wrap(module, GraphConfig(backend="full"))
    with dit_graphs.request(total_steps=8):
        check_equal(module, reference, range(8))
    assert report(module)["replays"] == 5


def test_cpu_inputs_become_device_buffers():
    class HostTime(Denoiser):
        def forward(self, x, t, text=None):
            return super().forward(x, t.to(x.device).expand(x.shape[0]), text)

    module, reference = build(HostTime), build(HostTime)
    wrap(module, GraphConfig(backend="full"))
    with torch.no_grad(), dit_graphs.request(total_steps=8):
        for step in range(8):
            kwargs = inputs(step)
            t = torch.tensor(step / 8.0)
            got = module(kwargs["x"], t, kwargs["text"])[0]
            assert torch.equal(got, reference(kwargs["x"], t, kwargs["text"])[0])
    assert report(module)["replays"] == 5


def test_random_numbers_follow_the_stream_of_plain_eager():
    class Noisy(Denoiser):
        def forward(self, x, t, text=None):
            return super().forward(x + torch.rand_like(x), t, text)

    module, reference = build(Noisy), build(Noisy)
    wrap(module, GraphConfig(backend="full"))
    sequences = []
    for target in (reference, module):
        torch.manual_seed(11)
        with torch.no_grad(), dit_graphs.request(total_steps=7):
            out = [target(**inputs(seed))[0] for seed in range(7)]
        sequences.append([*out, torch.randn(8, device="cuda"), torch.rand(4)])
    assert all(torch.equal(a, b) for a, b in zip(*sequences, strict=True))
    assert report(module)["replays"] == 4


def test_b10_calls_on_side_streams_see_inputs_that_arrive_late():
    module, reference = build(), build()
    wrap(module, GraphConfig(backend="full"))
    side = torch.cuda.Stream()
    with torch.no_grad(), dit_graphs.request(total_steps=60):
        for seed in range(50):
            stream = side if seed % 2 else torch.cuda.default_stream()
            stream.wait_stream(torch.cuda.default_stream())
            stream.wait_stream(side)
            source = inputs(seed)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)
                late = {name: value.clone() for name, value in source.items()}
                got = module(**late)[0] * 1.0
            stream.synchronize()
            assert torch.equal(got, reference(**source)[0] * 1.0), seed


def test_two_pipelines_on_two_streams_from_two_threads():
    pairs = [(build(seed=s), build(seed=s)) for s in (1, 2)]
    for module, _ in pairs:
        wrap(module, GraphConfig(backend="full"))
    with torch.no_grad():
        for _, reference in pairs:
            reference(**inputs(0))  # plain modules too differ where two threads race for torch's
    torch.cuda.synchronize()  # first attention, at which it decides its order of kernels
    wrong: list[str] = []

    def work(index: int) -> None:
        module, reference = pairs[index]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad(), dit_graphs.request(total_steps=60):
            for seed in range(60):
                kwargs = inputs(100 * index + seed)
                if not torch.equal(module(**kwargs)[0], reference(**kwargs)[0]):
                    wrong.append(f"thread {index} seed {seed}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    [t.start() for t in threads]
    [t.join(120) for t in threads]
    assert not wrong
    assert all(report(module)["replays"] for module, _ in pairs)


def test_a_thousand_mixed_replays_do_not_grow_memory():
    module = build()
    wrap(module, GraphConfig(backend="full"))
    shapes = [{"tokens": n, "batch": b} for n in (64, 96, 128) for b in (1, 2)]
    calls = [inputs(i, **shape) for i, shape in enumerate(shapes)]
    with torch.no_grad():
        for call in calls:
            with dit_graphs.request(total_steps=5):
                for _ in range(5):
                    module(**call)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        with dit_graphs.request(total_steps=1000):
            for step in range(1000):
                module(**calls[step % len(calls)])
        torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before[0]
    assert torch.cuda.memory_reserved() <= before[1]
    assert report(module)["replays"] >= 1000


@pytest.mark.alone
def test_b34_restore_gives_the_memory_back():
    module, warm = build(dim=1024, heads=8), build()
    with torch.no_grad():
        module(**inputs(0, dim=1024))
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    start = torch.cuda.memory_allocated()
    for _ in range(5):
        wrap(module, GraphConfig(backend="full"))
        with torch.no_grad(), dit_graphs.request(total_steps=6):
            for seed in range(6):
                module(**inputs(seed, dim=1024, tokens=512))
        assert report(module)["replays"] == 3
        dit_graphs.unwrap(module)
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        assert abs(torch.cuda.memory_allocated() - start) <= 1 << 20
    assert device_state(torch.device("cuda", 0)).pool_bytes() == 0
    del warm


def test_a_larger_graphs_memory_serves_the_smaller_ones():
    module = build(dim=1024, heads=8)
    wrap(module, GraphConfig(backend="full"))
    state = device_state(torch.device("cuda", 0))
    grown = []
    for tokens in (2048, 1024, 512, 256):
        before = state.pool_bytes()
        with torch.no_grad(), dit_graphs.request(total_steps=5):
            for seed in range(5):
                module(**inputs(seed, dim=1024, tokens=tokens))
        grown.append(state.pool_bytes() - before)
    assert grown[0] > 0
    assert sum(grown[1:]) <= 0.05 * grown[0] + (4 << 20)
