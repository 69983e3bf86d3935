"""Forwards with threads of their own, which call wrapped modules while their own is captured."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from twin import Where

import dit_graphs
from dit_graphs import Reason
from dit_graphs.errors import CaptureAborted
from dit_graphs.gate import CaptureGate
from dit_graphs.wrapping import runner_of


def test_a_forward_may_wait_for_a_thread_that_calls_a_wrapped_part_of_it(
    graphing: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture lets nobody in, and this one would wait for the call that it keeps out."""
    monkeypatch.setattr(CaptureGate, "CALLS_PATIENCE_S", 0.2)

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.linear = nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with ThreadPoolExecutor(1) as pool:
                return self.linear(x) + pool.submit(self._served, x).result()

        def _served(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return self.part(x) + self.part(x)

    module = Apart().to(graphing.device)
    plain = copy.deepcopy(module)
    for each in (module.part, module):
        dit_graphs.wrap(each, backend=graphing.backend)

    def serve() -> bool:
        with torch.no_grad():
            inputs = [graphing.randn(3, 8, seed=seed) for seed in range(6)]
            return all(torch.equal(module(x), plain(x)) for x in inputs)

    caller = threading.Thread(target=lambda: found.append(serve()), daemon=True)
    found: list[bool] = []
    caller.start()
    caller.join(60)
    assert found == [True]
    fallbacks = runner_of(module.part).stats.fallbacks
    assert fallbacks[Reason.CAPTURE_GATE_BUSY] >= 2


def test_calls_wait_for_a_capture_that_does_not_end_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CaptureGate, "CALLS_PATIENCE_S", 0.3)
    gate = CaptureGate()

    def calls() -> list[float]:
        took = []
        for _ in range(3):
            started = time.perf_counter()
            with pytest.raises(CaptureAborted):
                gate.enter_soon()
            took.append(time.perf_counter() - started)
        return took

    with ThreadPoolExecutor(1) as pool:
        with gate.exclusive():
            took = pool.submit(calls).result(timeout=60)
        pool.submit(gate.enter_soon).result(timeout=60)
        pool.submit(gate.leave).result(timeout=60)
    assert took[0] >= 0.3 > took[1] + took[2]


def test_who_cannot_do_without_the_gate_waits_for_the_end_of_a_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A text that is being written goes on where it was, however long another's capture takes."""
    monkeypatch.setattr(CaptureGate, "CALLS_PATIENCE_S", 0.05)
    gate = CaptureGate()

    def write() -> bool:
        with gate.shared():
            return True

    def give_up() -> None:
        with pytest.raises(CaptureAborted):
            gate.enter_soon()

    with ThreadPoolExecutor(2) as pool:
        with gate.exclusive():
            writing = pool.submit(write)
            pool.submit(give_up).result(timeout=60)  # and nobody else gives up with it
            time.sleep(0.1)
            assert not writing.done()
        assert writing.result(timeout=60)


def test_what_another_thread_exchanges_during_a_compare_is_compared_once_more(
    segmenting: Where,
) -> None:
    """The result was equal without it, which says nothing of the state that it left."""

    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.kept = torch.ones(8)

        def forward(self, x: Tensor, value: float | None = None) -> Tensor:
            if value is not None:
                self.kept = torch.full((8,), value, device=x.device)
                return self.linear(x)
            kept = self.kept  # which no graph is seen to read: its break closes over it

            @dit_graphs.eager_on_graph
            def add(h: Tensor) -> Tensor:
                return h + kept

            h = add(self.linear(x)) + 1
            for do in meanwhile:
                do()
            return h

    def exchange(value: float) -> None:
        with torch.no_grad():
            module(segmenting.randn(4, 8), value)

    def other() -> None:
        meanwhile.clear()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(exchange, 3.0).result(timeout=60)

    meanwhile: list[Callable[[], None]] = []
    module = Waits().to(segmenting.device)
    dit_graphs.wrap(module, backend=segmenting.backend)
    exchange(2.0)
    with torch.no_grad():
        for seed in range(2):
            module(segmenting.randn(3, 8, seed=seed))
        meanwhile.append(other)
        x, compares = segmenting.randn(3, 8, seed=5), runner_of(module).stats.compares
        module(x)
        assert runner_of(module).stats.compares == compares + 1
        assert torch.equal(module(x), module.linear(x) + 3 + 1)
