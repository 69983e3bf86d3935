"""How the bundled model is trained: what a captured step owns, and when training goes back.

Knows nothing of pictures. Surprise: the first test fakes `torch.cuda`, because what it is about,
who keeps a tensor alive, is decided by Python.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dit_graphs.app.demo_model.training.models import TINY, build_transformer
from dit_graphs.app.demo_model.training.stepping import (
    Log,
    Step,
    build_optimizer,
    first_that_works,
)
from dit_graphs.app.demo_model.training.train_flow import Guard


def _step_with_a_table_of_its_own(
    total: torch.Tensor, optimizer: torch.optim.Optimizer
) -> tuple[Step, Callable[[], torch.Tensor | None]]:
    """A captured step adding a table that only its closure owns, and a weak reference to that."""
    table = torch.ones_like(total)

    def function() -> None:
        total.add_(table)

    return Step(function, optimizer, capture=True), weakref.ref(table)


def test_a_captured_step_keeps_what_its_function_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph holds addresses: freed tables were overwritten by the first sampling in between."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda s: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": lambda g: contextlib.nullcontext(),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    total = torch.zeros(4)
    optimizer = build_optimizer([torch.nn.Parameter(torch.zeros(1))], (0.9, 0.95), 0.0)
    step, table = _step_with_a_table_of_its_own(total, optimizer)
    assert table() is not None
    del step
    assert table() is None, "the step alone owned it"


@pytest.mark.gpu
def test_replays_read_the_table_after_other_work_took_memory() -> None:
    total = torch.zeros(128, device="cuda")
    optimizer = build_optimizer([torch.nn.Parameter(total.clone())], (0.9, 0.95), 0.0)
    step, _ = _step_with_a_table_of_its_own(total, optimizer)
    taken = [torch.full_like(total, 7) for _ in range(64)]  # takes freed blocks of this size
    total.zero_()
    step()
    assert torch.equal(total, torch.ones_like(total)), taken[0][0]


def test_the_time_embedding_is_bounded_smooth_and_frozen() -> None:
    torch.manual_seed(0)
    transformer = build_transformer(TINY)
    times = torch.linspace(0, 1000, 101)
    made = transformer.t_embedder(times)
    assert made.std(0).sub(1).abs().max() < 0.1
    assert made.mean(0).abs().max() < 0.1
    assert made.diff(dim=0).square().mean().sqrt() < 0.3  # a hundredth of the schedule
    assert not any(p.requires_grad for p in transformer.t_embedder.parameters())


def test_a_climbing_loss_goes_back_to_the_best_weights() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    averaged = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = build_optimizer([parameter], (0.9, 0.95), 0.0)
    parameter.grad = torch.ones(1)
    optimizer.step()
    guard = Guard([parameter], [averaged], optimizer)
    with torch.no_grad():
        averaged.fill_(3.0)
    assert not guard.has_rewound(0.5)  # best so far: keeps 3
    with torch.no_grad():
        averaged.fill_(4.0)
    assert not guard.has_rewound(0.64)  # 1.28 times the best: borne, not kept
    with torch.no_grad():
        averaged.fill_(100.0)
        parameter.fill_(200.0)
    assert guard.has_rewound(0.66)
    assert (parameter.item(), averaged.item()) == (3.0, 3.0)
    assert all(value.eq(0).all() for value in optimizer.state[parameter].values())


def test_a_step_that_trains_on_noise_is_refused(tmp_path: Path) -> None:
    """Its loss may look like any other: only its gradients' norm gives it away."""
    norms = {(False, False): 1.0, (True, True): 60.0, (False, True): 0.3, (True, False): 1.2}
    log = Log(tmp_path / "log.jsonl")

    def chosen(compiled: bool, capture: bool) -> tuple[bool, bool]:
        return first_that_works(
            lambda *choice: choice, compiled, capture, log, trial=lambda built: [0.5, norms[built]]
        )

    assert chosen(True, True) == (True, False)
    assert chosen(False, True) == (False, False)
    events = [json.loads(line)["error"] for line in (tmp_path / "log.jsonl").open()]
    assert len(events) == 3 and "60" in events[0] and "0.3" in events[1]
