"""When a signature is captured, how it is proven, and every way to have it eager instead."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where

import dit_graphs
from dit_graphs import FallbackError, Reason
from dit_graphs.backends.base import Recording
from dit_graphs.errors import GraphError

RECORDED = Where("recorded", torch.device("cpu"))


class _Hidden:
    """Out of reach of every look at a module: a class's own values belong to the key."""

    shift = 0.0


_hidden = _Hidden()


class Baked(nn.Module):
    """The forward looks at a global: what it was at capture is baked into the graph."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return x * t + _hidden.shift


@pytest.fixture(autouse=True)
def _no_shift() -> None:
    _hidden.shift = 0.0


def _args(where: Where, index: int) -> tuple[Tensor, Tensor]:
    return where.randn(4, seed=index), where.randn(1, seed=50 + index)


def test_second_use_runs_plain_first(where: Where) -> None:
    """No mode is on the stack during the first sight: its cost would be the user's."""
    depths = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            from torch.utils._python_dispatch import _len_torch_dispatch_stack

            depths.append(_len_torch_dispatch_stack())
            return x * 2

    module = dit_graphs.wrap(Looks(), backend=where.backend)
    for index in range(4):
        module(where.randn(4, seed=index))
    assert depths[0] == 0
    assert depths[1] > 0, "the second pass is observed"


def test_first_use_serves_from_the_second_call_on(where: Where) -> None:
    twin = Twin(Baked(), where, capture="first_use")
    for index in range(5):
        twin(*_args(where, index))
    assert twin.captures == 1
    assert twin.replays == 4
    assert twin.fallbacks == {"warming_up": 1}
    assert twin.runner.report()["graphs"][0]["verified"] == "2/2 leaves"


def test_first_use_does_not_trust_the_inputs_of_the_capture() -> None:
    """A graph that baked an input equals eager on that input: it must be found at once."""

    class Bakes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.from_numpy(x.detach().numpy().copy())

    with torch.no_grad():
        twin = Twin(Bakes(), RECORDED, capture="first_use")
        for index in range(4):
            twin(RECORDED.randn(4, seed=index))
    assert twin.replays == 0


def test_warmup_only_never_captures_while_serving(where: Where) -> None:
    twin = Twin(Baked(), where, capture="warmup_only")
    for index in range(4):
        twin(*_args(where, index))
    assert twin.captures == 0
    assert twin.fallbacks == {"warmup_only": 4}
    with twin.runner.warming_up():
        twin(*_args(where, 5))
        twin(*_args(where, 6))
    assert twin.captures == 1
    for index in range(10, 14):
        twin(*_args(where, index))
    assert twin.captures == 1
    assert twin.replays >= 3
    twin(where.randn(7), where.randn(1))
    assert twin.fallbacks["warmup_only"] == 5, "another size was not warmed up"


def test_a_wrong_graph_is_never_used(graphing: Where, caplog: pytest.LogCaptureFixture) -> None:
    twin = Twin(Baked(), graphing)
    twin(*_args(graphing, 0))
    twin(*_args(graphing, 1))
    _hidden.shift = 1.0  # from here on the graph is wrong
    with caplog.at_level(logging.WARNING, logger="dit_graphs"):
        for index in range(2, 6):
            twin(*_args(graphing, index))
    assert twin.replays == 0
    assert twin.fallbacks["verify_mismatch"] == 4
    told = [r for r in caplog.records if "verify_mismatch" in r.getMessage()]
    assert len(told) == 1, "said once, not on every call"
    assert "100.0% of 4 elements" in told[0].getMessage()


def test_a_leaf_that_changes_late_and_was_baked_is_found(graphing: Where) -> None:
    class Late(nn.Module):
        """Bakes its second argument: the value is copied through memory no op shows."""

        def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
            return x * Late.read(prompt)

    values: dict[int, Tensor] = {}

    def read(prompt: Tensor) -> Tensor:
        # the capture's own values, found again under a key that does not change
        return values.setdefault(0, prompt.clone())

    Late.read = staticmethod(read)
    module = dit_graphs.wrap(Late().to(graphing.device), backend=graphing.backend)
    prompt = graphing.randn(4, seed=1)
    values[0] = prompt.clone()
    for index in range(5):
        module(graphing.randn(4, seed=index), prompt)
    replays = dit_graphs.stats(module)["components"]["denoiser"]["replays"]
    assert replays == 2
    # a plain forward that reads the real argument from now on: the graph does not
    values[0] = other = graphing.randn(4, seed=2)
    x = graphing.randn(4, seed=9)
    assert torch.equal(module(x, other), x * other)
    fallbacks = dit_graphs.stats(module)["components"]["denoiser"]["fallbacks"]
    assert fallbacks["verify_mismatch"] == 1


def test_verify_false_trusts_the_capture(where: Where) -> None:
    twin = Twin(Baked(), where, verify=False)
    for index in range(5):
        twin(*_args(where, index))
    assert (twin.replays, twin.runner.stats.compares) == (3, 0)


def test_verify_always_compares_every_call(graphing: Where) -> None:
    twin = Twin(Baked(), graphing, verify="always")
    for index in range(6):
        twin(*_args(graphing, index))
    assert (twin.replays, twin.runner.stats.compares) == (0, 4)
    _hidden.shift = 2.0
    twin(*_args(graphing, 7))
    assert twin.fallbacks["verify_mismatch"] == 1


@pytest.mark.parametrize("every", [1, 3])
def test_eager_that_disagrees_with_itself_is_told_apart(graphing: Where, every: int) -> None:
    calls = itertools.count(1)  # where nobody sees it: a counter of the class is part of the key

    class Unsteady(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(next(calls) // every)

    module = dit_graphs.wrap(Unsteady(), backend=graphing.backend, verify="always")
    for index in range(12):
        module(graphing.randn(4, seed=index))
    fallbacks = dit_graphs.stats(module)["components"]["denoiser"]["fallbacks"]
    assert fallbacks.get("eager_nondeterministic", 0) >= 1
    assert "verify_mismatch" not in fallbacks


def test_strict_raises_what_would_have_been_eager(where: Where) -> None:
    twin = Twin(Baked(), where, strict=True)
    twin.until_replayed(lambda i: _args(where, i))
    with torch.enable_grad(), pytest.raises(FallbackError, match="gradients are on") as caught:
        twin.module(*_args(where, 1))
    assert caught.value.reason is Reason.GRAD_ENABLED
    assert isinstance(caught.value, GraphError)
    with pytest.raises(FallbackError, match="register_leaf"):
        twin.module(where.randn(4), iter(()))
    twin(*_args(where, 30))


def test_strict_does_not_raise_where_eager_was_asked_for(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = Twin(Baked(), where, strict=True)
    with dit_graphs.disabled(twin.module):
        twin(*_args(where, 1))
    monkeypatch.setenv("DIT_GRAPHS", "off")
    twin(*_args(where, 2))


def test_disabled_is_plain_eager_and_keeps_the_graphs(where: Where) -> None:
    twin = Twin(Baked(), where)
    twin.until_replayed(lambda i: _args(where, i))
    before = twin.replays
    with dit_graphs.disabled(twin.module), dit_graphs.disabled(twin.module):
        twin(*_args(where, 20))
    assert (twin.replays, twin.fallbacks["disabled"]) == (before, 1)
    twin(*_args(where, 21))
    assert twin.replays == before + 1


def test_the_kill_switch_is_read_on_every_call(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = Twin(Baked(), where)
    twin.until_replayed(lambda i: _args(where, i))
    before = twin.replays
    monkeypatch.setenv("DIT_GRAPHS", "off")
    twin(*_args(where, 20))
    assert (twin.replays, twin.fallbacks["kill_switch"]) == (before, 1)
    monkeypatch.delenv("DIT_GRAPHS")
    twin(*_args(where, 21))
    assert twin.replays == before + 1


def test_backend_off_never_captures(where: Where) -> None:
    twin = Twin(Baked(), where, backend="off")
    for index in range(4):
        twin(*_args(where, index))
    assert twin.fallbacks == {"disabled": 4}


def test_the_environment_overrides_the_backend(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIT_GRAPHS_BACKEND", where.backend)
    twin = Twin(Baked(), where, backend="off")
    twin.until_replayed(lambda i: _args(where, i))
    assert twin.runner.report()["graphs"][0]["backend"] == where.backend


def test_auto_on_the_cpu_is_eager_with_a_reason() -> None:
    with torch.no_grad():
        twin = Twin(Baked(), Where("auto", torch.device("cpu")))
        for index in range(4):
            twin(*_args(twin.where, index))
    assert twin.fallbacks == {"no_cuda": 4}


def _failing(monkeypatch: pytest.MonkeyPatch, where: Where, fail: Callable[[], None]) -> None:
    """The next captures of this backend raise."""
    from dit_graphs.backends import make_backend

    kind = type(make_backend(where.backend))

    def capture(self: object, fn: object, plan: object) -> Recording[object]:
        fail()
        raise AssertionError("unreachable")

    monkeypatch.setattr(kind, "capture", capture)


def test_a_failed_capture_delivers_the_eager_result_and_is_not_retried(
    where: Where, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from dit_graphs.errors import CaptureAborted

    tries = []

    def fail() -> None:
        tries.append(1)
        raise CaptureAborted(Reason.CAPTURE_FAILED, "on purpose")

    _failing(monkeypatch, where, fail)
    twin = Twin(Baked(), where)
    with caplog.at_level(logging.WARNING, logger="dit_graphs"):
        for index in range(8):
            twin(*_args(where, index))
    assert len(tries) == 1
    assert len([r for r in caplog.records if "on purpose" in r.getMessage()]) == 1
    assert twin.fallbacks == {"warming_up": 2, "capture_failed": 6}


@pytest.mark.parametrize("reason", [Reason.CAPTURE_GATE_BUSY, Reason.LOW_MEMORY])
def test_a_capture_that_could_not_be_tried_is_tried_again(
    where: Where, monkeypatch: pytest.MonkeyPatch, reason: Reason
) -> None:
    from dit_graphs.errors import CaptureAborted

    def fail() -> None:
        raise CaptureAborted(reason, "for now")

    twin = Twin(Baked(), where)
    with monkeypatch.context() as patch:
        _failing(patch, where, fail)
        for index in range(3):
            twin(*_args(where, index))
    assert twin.fallbacks.get(reason.value, 0) >= 1
    twin.until_replayed(lambda i: _args(where, i), limit=60)


def test_the_reasons_are_counted_and_worded(where: Where) -> None:
    for reason in Reason:
        assert reason.sentence
    twin = Twin(Baked(), where)
    twin.until_replayed(lambda i: _args(where, i))
    with torch.enable_grad():
        twin.module(*_args(where, 1))
    text = dit_graphs.explain(twin.module)
    assert "1 eager: grad_enabled: gradients are on" in text
    assert "3 eager: warming_up" in text
    assert "verified" in text
    assert os.environ.get("DIT_GRAPHS") is None
