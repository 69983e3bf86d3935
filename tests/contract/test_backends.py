"""The interface below the runner: one capture, its recording, and what neither may do.

The same sentences for every backend: a capture runs nothing, a replay gives values for the inputs'
current contents, an output is valid until the next replay, and `close` lets everything go.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from twin import Where, random_state

from dit_graphs.backends import CapturePlan, Recording, make_backend
from dit_graphs.constants import ConstantTable
from dit_graphs.errors import CaptureAborted, Reason
from dit_graphs.escapes import Escapes
from dit_graphs.memory import device_state
from dit_graphs.observer import CaptureLog, Guard
from dit_graphs.watch import BreakPolicy


class Net(nn.Module):
    def __init__(self, body: Callable[[nn.Module, Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(()))
        self.body = body

    def forward(self, x: Tensor) -> object:
        return self.body(self, self.linear(x))


def _capture(where: Where, net: Net, x: Tensor, *externals: Tensor) -> Recording[object]:
    state = device_state(where.device)

    def forward(log: CaptureLog | None) -> object:
        with torch.inference_mode(False), torch.no_grad():
            if log is None:
                return net(x)
            with Guard(net, where.device, BreakPolicy(), ConstantTable(), log, Escapes()):
                return net(x)

    forward(None)  # library handles and lazy tables exist
    plan = CapturePlan(state=state, inputs=(x,), externals=externals)
    return make_backend(where.backend).capture(forward, plan)


def test_a_replay_computes_for_what_the_inputs_hold_now(where: Where) -> None:
    net, x = Net(lambda m, h: h.sin()).to(where.device), where.randn(3, 8)
    recording = _capture(where, net, x)
    assert isinstance(recording.output, Tensor)
    for seed in (5, 6, 5):
        x.copy_(where.randn(3, 8, seed=seed))
        recording.poison()
        assert recording.output.isnan().all()
        recording.replay()
        assert torch.equal(recording.output, net(x))


def test_a_capture_runs_nothing(where: Where) -> None:
    def body(module: nn.Module, h: Tensor) -> Tensor:
        module.steps.add_(1.0)
        return h * module.steps + torch.rand_like(h)

    net, x = Net(body).to(where.device), where.randn(3, 8)
    net(x)
    steps, stream, values = net.steps.clone(), random_state(where.device), x.clone()
    _capture(where, net, x, net.steps)
    # _capture's own warm-up ran once
    assert torch.equal(net.steps, steps + 1)
    assert torch.equal(x, values)
    net.steps.copy_(steps)
    after = random_state(where.device)
    torch.set_rng_state(stream[0])
    if len(stream) > 1:
        torch.cuda.set_rng_state(stream[1], where.device)
    net(x)
    warm = random_state(where.device)
    assert all(torch.equal(a, b) for a, b in zip(after, warm, strict=True))


def test_the_recorders_outputs_are_garbage_until_the_first_replay() -> None:
    where = Where("recorded", torch.device("cpu"))
    with torch.no_grad():
        recording = _capture(where, Net(lambda m, h: (h, h > 0)), where.randn(3, 8))
    values, flags = recording.output
    assert values.isnan().all()
    with torch.no_grad():
        recording.replay()
    assert not values.isnan().any()
    assert torch.equal(flags, values > 0)


def test_what_is_not_produced_here_is_not_poisoned(where: Where) -> None:
    """A weight or an input handed through is the module's memory, not the recording's."""
    net, x = Net(lambda m, h: (h, m.linear.weight.detach())).to(where.device), where.randn(3, 8)
    weight = net.linear.weight.detach().clone()
    recording = _capture(where, net, x)
    recording.poison()
    assert torch.equal(net.linear.weight, weight)
    recording.replay()
    assert torch.equal(recording.output[1], weight)


def test_a_recording_counts_what_it_holds(graphing: Where) -> None:
    net = Net(lambda m, h: h.sin() + 1).to(graphing.device)
    recording = _capture(graphing, net, graphing.randn(3, 8))
    assert (recording.segments, recording.breaks) == (1, 0)
    assert recording.captured_fraction == 1.0
    assert recording.nbytes >= 0


@pytest.mark.parametrize("kind", ["item", "tolist", "nonzero", "a constant nobody saw"])
def test_host_traffic_ends_a_capture_before_it_harms(graphing: Where, kind: str) -> None:
    def body(module: nn.Module, h: Tensor) -> object:
        return {
            "item": lambda: h * h.max().item(),
            "tolist": lambda: h * h[0].tolist()[0],
            "nonzero": lambda: h.nonzero(),
            "a constant nobody saw": lambda: h * torch.tensor([2.0] * 8, device=h.device),
        }[kind]()

    net = Net(body).to(graphing.device)
    with pytest.raises(CaptureAborted) as caught:
        _capture(graphing, net, graphing.randn(3, 8))
    wanted = Reason.CONSTANT_CHANGED if kind.startswith("a constant") else Reason.HOST_READ
    assert caught.value.reason is wanted
    # the process goes on: the next capture, random numbers, plain calls
    torch.randn(3, device=graphing.device)
    again = _capture(graphing, Net(lambda m, h: h + 1).to(graphing.device), graphing.randn(3, 8))
    again.replay()


def test_an_error_of_the_forward_ends_a_capture_as_a_failure(graphing: Where) -> None:
    calls = []

    def body(module: nn.Module, h: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise ZeroDivisionError("in the capture")
        return h

    with pytest.raises(CaptureAborted, match="ZeroDivisionError: in the capture") as caught:
        _capture(graphing, Net(body).to(graphing.device), graphing.randn(3, 8))
    assert caught.value.reason is Reason.CAPTURE_FAILED


def test_close_lets_everything_go(where: Where) -> None:
    net, x = Net(lambda m, h: h * m.table).to(where.device), where.randn(3, 8)
    net.table = where.randn(8, seed=3)
    recording = _capture(where, net, x)
    held = weakref.ref(x)
    recording.replay()
    recording.close()
    del x
    gc.collect()
    assert held() is None
    assert recording.segments >= 0, "the closed recording itself is still here"


def test_the_recorder_refuses_another_device_and_cuda_a_cpu() -> None:
    cpu = device_state(torch.device("cpu"))
    plan = CapturePlan(state=cpu, inputs=())
    for name in ("full", "breakable"):
        with pytest.raises(CaptureAborted) as caught:
            make_backend(name).capture(lambda log: None, plan)
        assert caught.value.reason is Reason.NO_CUDA
