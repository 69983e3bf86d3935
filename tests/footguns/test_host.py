"""What the host does inside a forward: reads, copies, Python numbers, failures."""

from __future__ import annotations

import io
import logging
from contextlib import redirect_stdout

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where, random_state

import dit_graphs


class Inner(nn.Module):
    def __init__(self, body: object) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.linear(x))  # type: ignore[operator]


_BODIES = {
    "an item() branch": lambda h: h * 2 if h.sum().item() > 0 else h * 3,
    "a constant on the device": lambda h: h * torch.tensor(0.5, device=h.device),
    "nonzero()": lambda h: h + h.nonzero().shape[0],
    "print(t)": lambda h: print(h.sum()) or h,
    "an f-string": lambda h: h * float(f"{h.max():.2f}"),
    "boolean indexing": lambda h: h + h[h > 0].mean(),
}


@pytest.mark.parametrize("kind", _BODIES)
def test_b41_a_host_read_is_eager_once_named_and_left_alone(
    segmenting: Where, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """'operation not permitted when stream is capturing' must never reach anybody."""
    twin = Twin(Inner(_BODIES[kind]), segmenting)
    with caplog.at_level(logging.WARNING, logger="dit_graphs"), redirect_stdout(io.StringIO()):
        for index in range(8):
            twin(segmenting.randn(3, 8, seed=index))
    warnings = [r.getMessage() for r in caplog.records]
    if kind == "a constant on the device":
        assert twin.replays == 5
        assert not warnings
    else:
        assert twin.replays == 0
        assert len(warnings) == 1
        assert "test_host.py:" in warnings[0]


def test_b42_random_numbers_go_on_after_a_failed_capture(graphing: Where) -> None:
    """A capture that dies half-way must not leave the generator "capturing"."""

    class Dies(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand_like(x) * torch.rand_like(x).max().item()

    twin = Twin(Dies(), graphing)
    torch.manual_seed(3)
    for index in range(5):
        twin(graphing.randn(4, seed=index))
    assert twin.replays == 0
    after = random_state(graphing.device)
    torch.manual_seed(3)
    for index in range(5):
        twin.plain(graphing.randn(4, seed=index))
    expected = random_state(graphing.device)
    assert all(torch.equal(a, b) for a, b in zip(after, expected, strict=True))
    torch.randn(3, device=graphing.device)
    torch.manual_seed(4)
    healthy = Twin(nn.Linear(8, 8), graphing)
    healthy.until_replayed(lambda i: (graphing.randn(2, 8, seed=i),))


@pytest.mark.parametrize("kind", ["0-dim host tensor", "1-dim device tensor", "python float"])
def test_b44_a_timestep_of_any_kind_is_the_timestep(where: Where, kind: str) -> None:
    """A CPU scalar among the inputs is part of the call, not a reason to bake its first value."""

    class Steps(nn.Module):
        def forward(self, x: Tensor, t: Tensor | float) -> Tensor:
            return x * t + 1

    make = {
        "0-dim host tensor": lambda value: torch.tensor(value),
        "1-dim device tensor": lambda value: torch.tensor([value], device=where.device),
        "python float": lambda value: value,
    }[kind]
    twin = Twin(Steps(), where)
    for _ in range(2):
        with dit_graphs.request(total_steps=10):
            for step in range(10):
                twin(where.randn(4, seed=step), make(1.0 - 0.09 * step))
    assert twin.captures <= 3, "not one capture per step"
    if kind == "1-dim device tensor":
        assert twin.replays == 17


@pytest.mark.parametrize("draws", [False, True])
def test_b44_a_host_scalar_is_taken_in_its_own_precision(where: Where, draws: bool) -> None:
    """Beside bf16, eager's kernels take it in float32; a copy on the device would be rounded."""

    class Steps(nn.Module):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return x * t + (torch.rand_like(x) if draws else 1)

    twin = Twin(Steps(), where)
    for _ in range(2):
        with dit_graphs.request(total_steps=10):
            for step in range(10):
                x = where.randn(64, seed=step).to(torch.bfloat16)
                twin(x, torch.tensor(1.0 - 0.0931 * step))


@pytest.mark.parametrize("style", ["positional", "keyword"])
@pytest.mark.parametrize("when", ["before wrapping", "after the capture"])
def test_b45_a_patched_forward_is_honoured(where: Where, when: str, style: str) -> None:
    """Community code replaces `module.forward`, under other argument names, at any time."""
    module = Inner(lambda h: h * 2).to(where.device)
    history: list[int] = []
    original = type(module).forward

    def patched(hidden: Tensor, extra: float = 1.0) -> Tensor:
        history.append(len(history))
        return original(module, hidden) * extra

    def plain(x: Tensor) -> Tensor:
        return original(module, x)

    if when == "before wrapping":
        module.forward = patched
    dit_graphs.wrap(module, backend=where.backend)
    if when == "after the capture":
        for index in range(5):
            module(where.randn(3, 8, seed=index))
        module.forward = patched
    for index in range(8):
        x = where.randn(3, 8, seed=10 + index)
        result = module(x, 3.0) if style == "positional" else module(hidden=x, extra=3.0)
        assert torch.equal(result, plain(x) * 3.0)
    assert history
    with pytest.raises(TypeError):
        module(x, 1.0, 2.0)


def test_b45_a_pre_hook_added_after_the_capture_runs(where: Where) -> None:
    """A hook that a replay skips is a hook that silently stopped working."""
    module = Inner(lambda h: h.sin()).to(where.device)
    dit_graphs.wrap(module, backend=where.backend)
    for index in range(5):
        module(where.randn(3, 8, seed=index))
    handle = module.linear.register_forward_pre_hook(lambda child, args: (args[0] * 0.5,))
    x = where.randn(3, 8, seed=20)
    assert torch.equal(module(x), module.linear.forward(x * 0.5).sin())
    handle.remove()
    assert torch.equal(module(x), module.linear.forward(x).sin())


def test_b45_a_hook_added_in_the_middle_of_a_request_runs_from_then_on(where: Where) -> None:
    """In a loop of one's own nobody says that a step has ended; torch counts hooks, though."""
    module = Inner(lambda h: h.sin()).to(where.device)
    dit_graphs.wrap(module, backend=where.backend)
    seen: list[int] = []
    with dit_graphs.request(total_steps=10):
        for index in range(10):
            if index == 6:
                module.linear.register_forward_hook(lambda *given: seen.append(1))
            module(where.randn(3, 8, seed=index))
    assert len(seen) == 4


def test_a_global_hook_runs_on_every_call(where: Where) -> None:
    """torch keeps hooks for all modules in one global table, on no module's own list."""
    twin = Twin(Inner(lambda h: h.sin()), where)
    twin.until_replayed(lambda i: (where.randn(3, 8, seed=i),))
    seen = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *args: seen.append(1))
    try:
        twin.module(where.randn(3, 8))
    finally:
        handle.remove()
    assert len(seen) == 2
    assert twin.fallbacks["hooks"] == 1
    twin(where.randn(3, 8))


def test_b47_many_lengths_do_not_make_many_graphs(where: Where) -> None:
    """Each new prompt length costs a plain call; graphs stay few, whatever comes."""
    twin = Twin(Inner(lambda h: h.sin()), where, max_graphs=4)
    lengths = torch.randint(1, 200, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    for number, length in enumerate(lengths):
        with dit_graphs.request(total_steps=4):
            x = where.randn(length, 8, seed=number)
            for _ in range(4):
                assert torch.equal(twin.module(x), twin.plain(x))
    assert twin.graphs <= 4
    # 200 lengths, 129 of them different: a length seen often enough may push out one that was not
    assert twin.captures <= 30


def test_b60_a_new_seed_reaches_the_graph(where: Where) -> None:
    """Old torch replayed the seed of the capture: every picture had the same noise."""

    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand_like(x)

    twin = Twin(Noisy(), where)
    x = where.randn(64)
    twin.until_replayed(lambda i: (where.randn(64, seed=i),))
    found = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        found.append(twin(x))
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
