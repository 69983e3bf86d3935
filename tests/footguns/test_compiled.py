"""Compiled modules, compiled before or after, as a wrapper or in place: they run as compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dit_graphs
from dit_graphs.wrapping import runner_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Counter:
    """A compiler that counts what it compiled and runs it as it is."""

    def __init__(self) -> None:
        self.graphs = 0
        self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: object) -> object:
        self.graphs += 1

        def run(*args: object) -> object:
            self.calls += 1
            return graph.forward(*args)

        return run


@pytest.fixture(autouse=True)
def _fresh_compiler() -> object:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def _check(module: nn.Module, plain: nn.Module, compiler: Counter, calls: int) -> None:
    for index in range(5):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(index))
        assert torch.equal(module(x), plain(x))
    assert compiler.calls == calls, "the compiled code was not what ran"


def _pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    module, plain = Model(), Model()
    plain.load_state_dict(module.state_dict())
    return module, plain


def test_b15_compiled_as_a_wrapper_then_wrapped() -> None:
    module, plain = _pair()
    compiler = Counter()
    compiled = torch.compile(module, backend=compiler)
    dit_graphs.wrap(compiled, backend="recorded")
    _check(compiled, plain, compiler, 5)
    assert {r.value for r in runner_of(compiled).stats.fallbacks} == {"compiled"}
    dit_graphs.unwrap(compiled)
    assert runner_of(compiled) is None
    _check(compiled, plain, compiler, 10)


def test_compiled_around_a_wrapped_module_its_graphs_serve() -> None:
    module, plain = _pair()
    dit_graphs.wrap(module, backend="recorded")
    compiler = Counter()
    _check(torch.compile(module, backend=compiler), plain, compiler, 0)
    assert runner_of(module).stats.replays == 2

    def around(x: Tensor) -> Tensor:  # Dynamo looks into the module from here: no graphs
        return module(x) * 2

    compiled = torch.compile(around, backend=compiler)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(9))
    assert torch.equal(compiled(x), plain(x) * 2)
    assert torch.equal(module(x), plain(x))
    assert runner_of(module).stats.replays == 3


def test_b15_compiled_in_place_then_wrapped() -> None:
    module, plain = _pair()
    compiler = Counter()
    module.compile(backend=compiler)
    impl = module._compiled_call_impl
    dit_graphs.wrap(module, backend="recorded")
    _check(module, plain, compiler, 5)
    assert {r.value for r in runner_of(module).stats.fallbacks} == {"compiled"}
    dit_graphs.unwrap(module)
    assert module._compiled_call_impl is impl


def test_b15_blocks_compiled_then_wrapped() -> None:
    module, plain = _pair()
    compiler = Counter()
    for block in module.blocks:
        block.compile(backend=compiler)
    dit_graphs.wrap(module, backend="recorded")
    _check(module, plain, compiler, 10)
    assert {r.value for r in runner_of(module).stats.fallbacks} == {"compiled"}


def test_b15_blocks_compiled_after_graphs_existed() -> None:
    module, plain = _pair()
    dit_graphs.wrap(module, backend="recorded")
    compiler = Counter()
    _check(module, plain, compiler, 0)
    assert runner_of(module).stats.replays == 2
    for block in module.blocks:
        block.compile(backend=compiler)
    _check(module, plain, compiler, 10)
    assert runner_of(module).stats.replays == 2, "a graph of the uncompiled blocks answered"


def test_b15_a_pipeline_whose_denoiser_is_compiled_afterwards() -> None:
    """`module.compile()` puts itself where our intercept was: the next request notices."""
    import tiny

    pipe, plain = tiny.build("flux"), tiny.build("flux")
    dit_graphs.accelerate(pipe, backend="recorded", components=("denoiser",))
    tiny.latents(pipe, tiny.call_kwargs("flux", size=32, steps=4))
    compiler = Counter()
    pipe.transformer.compile(backend=compiler)
    for seed in range(2):
        mine, theirs = (
            tiny.latents(p, tiny.call_kwargs("flux", size=32, steps=4, seed=seed))
            for p in (pipe, plain)
        )
        assert torch.equal(mine, theirs)
    assert compiler.calls >= 8
    fallbacks = dit_graphs.stats(pipe)["components"]["denoiser"]["fallbacks"]
    assert set(fallbacks) == {"compiled"}
