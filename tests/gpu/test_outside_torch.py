"""Device work that no op shows, and code that behaves otherwise while a stream is captured."""

from __future__ import annotations

import pytest
import torch
from blocks import Denoiser, build, inputs
from legacy_kernel import twice_plus_one

import dit_graphs
from dit_graphs import GraphConfig, wrap
from dit_graphs.wrapping import runner_of

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for other platforms comes without it
    triton = None


def _serve(module: Denoiser, reference: Denoiser, seeds: range, **shape: int) -> dict:
    with torch.no_grad(), dit_graphs.request(total_steps=len(seeds)):
        for seed in seeds:
            got, want = module(**inputs(seed, **shape))[0], reference(**inputs(seed, **shape))[0]
            assert torch.isfinite(want).all()
            assert torch.equal(got, want), f"seed {seed}"
    return runner_of(module).report()


class OnLegacyStream(Denoiser):
    """The kernel reads what torch is still computing: 5 ms of sleep lie before it."""

    warp = staticmethod(twice_plus_one)

    def forward(self, x, t, text=None):
        torch.cuda._sleep(10_000_000)
        warped = self.warp((x.float() * 0.25).contiguous())
        return super().forward(warped.to(x.dtype), t, text)


@torch.library.custom_op("dit_graphs_test::twice_plus_one", mutates_args=())
def _as_op(x: torch.Tensor) -> torch.Tensor:
    return twice_plus_one(x)


@torch.library.custom_op("dit_graphs_test::sageattention_twice", mutates_args=())
def _as_known_op(x: torch.Tensor) -> torch.Tensor:
    return twice_plus_one(x)


@pytest.mark.alone
@pytest.mark.parametrize("how", ["function", "op"])
def test_b43_a_kernel_on_the_legacy_stream_is_caught_and_not_believed(how):
    """No graph holds it, so every replay would show yesterday's values: the compare must see it."""
    assert torch.equal(
        twice_plus_one(torch.arange(4.0, device="cuda")).cpu(), torch.tensor([1.0, 3.0, 5.0, 7.0])
    )
    module, reference = build(OnLegacyStream), build(OnLegacyStream)
    if how == "op":
        module.warp = reference.warp = _as_op
    wrap(module, GraphConfig(backend="full"))
    report = _serve(module, reference, range(10))
    assert report["replays"] == 0
    assert set(report["fallbacks"]) & {"verify_mismatch", "capture_failed"}
    assert not report["graphs"]
    healthy = build(seed=4)
    wrap(healthy, GraphConfig(backend="full"))
    assert _serve(healthy, build(seed=4), range(8))["replays"] == 5


def test_b43_a_legacy_stream_op_that_is_known_by_name_is_an_eager_break():
    module, reference = build(OnLegacyStream), build(OnLegacyStream)
    module.warp = reference.warp = _as_known_op
    wrap(module, GraphConfig(backend="breakable"))
    report = _serve(module, reference, range(10))
    assert report["replays"] == 7
    assert report["graphs"][0]["breaks"] == 1


def test_b43_code_that_asks_whether_it_is_captured():
    """Another branch in the capture than in the warm-up is another result: the compare sees it."""

    class Asks(Denoiser):
        def forward(self, x, t, text=None):
            factor = 1.5 if torch.cuda.is_current_stream_capturing() else 1.0
            return super().forward(x * factor, t, text)

    module, reference = build(Asks), build(Asks)
    wrap(module, GraphConfig(backend="full"))
    report = _serve(module, reference, range(8))
    assert report["replays"] == 0
    assert report["fallbacks"]["verify_mismatch"] >= 5


@pytest.mark.skipif(triton is None, reason="needs triton")
def test_b43_an_autotuned_kernel_meets_a_new_shape():
    """The first call of a shape times its variants, which no capture allows: it comes before."""
    key = ["count"]
    variants = [triton.Config({"BLOCK": size}) for size in (128, 512)]

    @triton.autotune(configs=variants, key=key)
    @triton.jit
    def scale(source, target, count, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        tl.store(target + at, tl.load(source + at, mask=inside) * 1.5, mask=inside)

    class Tuned(Denoiser):
        def forward(self, x, t, text=None):
            target = torch.empty_like(x)
            scale[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, target, x.numel())
            return super().forward(target, t, text)

    module, reference = build(Tuned), build(Tuned)
    wrap(module, GraphConfig(backend="full"))
    for tokens in (64, 96, 128):
        report = _serve(module, reference, range(8), tokens=tokens)
    assert report["replays"] >= 15
    assert set(report["fallbacks"]) == {"warming_up"}


@pytest.mark.parametrize("where", ["pageable", "pinned"])
def test_b29_weights_that_are_copied_from_the_host_in_the_forward(where):
    """A pinned copy could be captured and would read host memory for ever; both are honoured."""

    class Streams(Denoiser):
        def __init__(self, **options):
            super().__init__(**options)
            self.away = torch.zeros(256, device="cpu")

        def forward(self, x, t, text=None):
            return super().forward(x + self.away.to("cuda", x.dtype, non_blocking=True), t, text)

    module, reference = build(Streams), build(Streams)
    for each in (module, reference):
        values = torch.randn(256, generator=torch.Generator().manual_seed(0), device="cpu")
        each.away = values.pin_memory() if where == "pinned" else values
    wrap(module, GraphConfig(backend="full"))
    for number in range(3):
        _serve(module, reference, range(10 * number, 10 * number + 6))
        for each in (module, reference):
            torch.cuda.synchronize()
            each.away.mul_(-0.5)  # in place: its address is what it was
    for each in (module, reference):
        each.away = torch.full((256,), 0.25, device="cpu")
    _serve(module, reference, range(50, 56))
