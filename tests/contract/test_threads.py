"""Several threads, several runners, one device: every result is eager's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn
from twin import Where

import dit_graphs
from dit_graphs import Reason, eager_on_graph
from dit_graphs.calls import RunnerOptions
from dit_graphs.counters import RunnerStats
from dit_graphs.errors import CaptureAborted
from dit_graphs.gate import CaptureGate
from dit_graphs.memory import HostState
from dit_graphs.wrapping import runner_of


def _in_thread(work: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(timeout=60)


def _equal_calls(module: nn.Module, where: Where, plain: nn.Module, start: int, calls: int) -> None:
    with torch.no_grad():
        for index in range(start, start + calls):
            x = where.randn(4, 8, seed=index)
            assert torch.equal(module(x), plain(x)), f"call {index}"


def _pair(where: Where, seed: int = 0) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).to(where.device)
    plain = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).to(where.device)
    plain.load_state_dict(module.state_dict())
    dit_graphs.wrap(module, backend=where.backend)
    return module, plain


def test_b65_captured_in_the_main_thread_replayed_in_workers(where: Where) -> None:
    module, plain = _pair(where)
    _equal_calls(module, where, plain, 0, 5)
    stats = runner_of(module).stats
    assert stats.captures == 1
    for worker in range(3):
        before = stats.replays
        _in_thread(lambda w=worker: _equal_calls(module, where, plain, 10 * w, 4))
        assert stats.replays == before + 4
    assert stats.captures == 1


def test_inference_mode_of_one_thread_is_not_anothers(where: Where) -> None:
    module, plain = _pair(where)

    def work() -> None:
        with torch.inference_mode():
            for index in range(4):
                x = where.randn(4, 8, seed=index)
                assert torch.equal(module(x), plain(x))

    _equal_calls(module, where, plain, 0, 4)
    _in_thread(work)
    _equal_calls(module, where, plain, 20, 2)
    with torch.enable_grad():
        module(where.randn(4, 8)).sum().backward()


def test_three_workers_with_a_module_each(where: Where) -> None:
    pairs = [_pair(where, seed) for seed in range(3)]
    start = threading.Barrier(3)

    def work(number: int) -> None:
        start.wait(timeout=30)
        module, plain = pairs[number]
        with dit_graphs.request():
            _equal_calls(module, where, plain, 100 * number, 40)

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(work, number) for number in range(3)]:
            done.result(timeout=120)
    for module, plain in pairs:
        stats = runner_of(module).stats
        assert set(stats.fallbacks) <= {Reason.WARMING_UP, Reason.CAPTURE_GATE_BUSY}
        _equal_calls(module, where, plain, 200, 70)  # alone, a put-off capture comes at last
        assert stats.replays >= 1


def test_a_capture_is_put_off_while_another_thread_is_in_a_call(where: Where) -> None:
    module, plain = _pair(where)
    inside, leave = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            assert leave.wait(timeout=60)
            return self.linear(x)

    slow = dit_graphs.wrap(Slow().to(where.device), backend=where.backend)

    def work() -> None:
        with torch.no_grad():
            slow(where.randn(3, 8))

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        assert inside.wait(timeout=30)
        _equal_calls(module, where, plain, 0, 3)
        stats = runner_of(module).stats
        assert stats.captures == 0
        leave.set()
        done.result(timeout=30)
    assert stats.fallbacks[Reason.CAPTURE_GATE_BUSY] >= 1
    _equal_calls(module, where, plain, 10, 12)
    assert stats.captures == 1
    assert stats.replays >= 1


def test_the_gate_lets_calls_pass_together_and_captures_alone() -> None:
    gate = CaptureGate()
    order: list[str] = []

    def call() -> None:
        with gate.shared():
            order.append("call")

    with gate.shared(), gate.shared():
        _in_thread(call)
        with gate.exclusive():
            order.append("capture")
    assert order == ["call", "capture"]

    def capture() -> str:
        try:
            with gate.exclusive():
                return "captured"
        except CaptureAborted as refusal:
            return refusal.reason.value

    with gate.shared():
        assert _in_thread(capture) == "capture_gate_busy"
    assert _in_thread(capture) == "captured"
    with gate.exclusive():
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(timeout=0.2)
        assert thread.is_alive(), "a call waits while another thread captures"
    thread.join(timeout=30)
    assert order[-1] == "call"


def test_a_capture_gets_through_a_load_that_never_pauses(where: Where) -> None:
    """Two threads whose calls overlap all the time: at no moment is nobody inside."""
    module, plain = _pair(where)
    done = threading.Event()
    steps = [threading.Semaphore(1), threading.Semaphore(0)]

    class Overlapping(nn.Module):
        """Each call leaves only after the other thread's next call has begun."""

        def forward(self, x: Tensor, mine: int) -> Tensor:
            steps[1 - mine].release()
            steps[mine].acquire(timeout=0.2)
            return x + 1

    busy = dit_graphs.wrap(Overlapping(), backend="off")
    # backend="off" passes the gate by; this one enters it as a served module's call would
    gate = runner_of(module).state.gate

    def load(mine: int) -> None:
        with torch.no_grad():
            while not done.is_set():
                with gate.shared():
                    busy(torch.zeros(1), mine)

    with ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(load, number) for number in range(2)]
        try:
            for start in range(0, 400, 4):
                _equal_calls(module, where, plain, start, 4)
                if runner_of(module).stats.captures:
                    break
        finally:
            done.set()
        for each in loads:
            each.result(timeout=30)
    stats = runner_of(module).stats
    assert stats.captures == 1, f"starved: {dict(stats.fallbacks)}"
    assert stats.fallbacks[Reason.CAPTURE_GATE_BUSY] >= CaptureGate.MAX_PUT_OFF
    _equal_calls(module, where, plain, 500, 3)


def test_the_gate_waits_after_several_refusals_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CaptureGate, "PATIENCE_S", 0.3)
    gate = CaptureGate()
    leave, inside, arrived = threading.Event(), threading.Event(), threading.Event()

    def long_call() -> None:
        with gate.shared():
            inside.set()
            assert leave.wait(timeout=30)

    def arrive() -> None:
        with gate.shared():
            arrived.set()

    def attempt() -> bool:
        try:
            with gate.exclusive():
                return True
        except CaptureAborted:
            return False

    with ThreadPoolExecutor(4) as pool, ExitStack() as at_end:
        at_end.callback(leave.set)
        pool.submit(long_call)
        assert inside.wait(timeout=30)
        started = time.perf_counter()
        assert not any(attempt() for _ in range(CaptureGate.MAX_PUT_OFF))
        assert time.perf_counter() - started < 0.2, "the first ones do not wait"
        capture = pool.submit(attempt)
        while gate._waiting is None and not capture.done():
            time.sleep(0.001)
        newcomer = pool.submit(arrive)
        assert not arrived.wait(timeout=0.1), "who arrives waits with it"
        assert not attempt(), "a second capture does not wait for the first"
        assert capture.result(timeout=30) is False, "a call that does not leave wins in the end"
        newcomer.result(timeout=30)
        assert not any(attempt() for _ in range(CaptureGate.MAX_PUT_OFF - 1))
        monkeypatch.setattr(CaptureGate, "PATIENCE_S", 60.0)
        capture = pool.submit(attempt)
        while gate._waiting is None and not capture.done():
            time.sleep(0.001)
        leave.set()
        assert capture.result(timeout=20) is True, "woken by the last one that leaves"


def test_alone_is_said_only_where_nobody_is_inside() -> None:
    gate = CaptureGate()
    with gate.alone() as is_alone:
        assert is_alone
    with gate.shared(), gate.alone() as is_alone:
        assert not is_alone, "this thread is inside itself"
    with gate.exclusive():
        pass


def test_a_call_from_a_break_of_a_replay_runs_eagerly(segmenting: Where) -> None:
    inner, inner_plain = _pair(segmenting, 3)
    _equal_calls(inner, segmenting, inner_plain, 0, 5)

    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return eager_on_graph(lambda h: inner(h))(x.sin()) * 2

    outer = dit_graphs.wrap(Outer(), backend=segmenting.backend)
    with torch.no_grad():
        for index in range(6):
            x = segmenting.randn(4, 8, seed=index)
            assert torch.equal(outer(x), inner_plain(x.sin()) * 2)
    assert runner_of(outer).stats.replays == 3
    assert runner_of(inner).stats.fallbacks[Reason.NESTED_REPLAY] >= 3
    _equal_calls(inner, segmenting, inner_plain, 30, 2)


def test_a_module_called_only_from_a_break_is_not_captured_there(segmenting: Where) -> None:
    """It never gets to replay: its graph would only take memory, beside those of the outer one."""
    outer_calls_it, plain = _pair(segmenting, 3)
    dit_graphs.unwrap(outer_calls_it)

    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return eager_on_graph(lambda h: outer_calls_it(h))(x.sin()) * 2

    outer = dit_graphs.wrap(Outer(), backend=segmenting.backend)
    with torch.no_grad():
        for index in range(12):
            if index == 4:  # the outer one replays by now
                dit_graphs.wrap(outer_calls_it, backend=segmenting.backend)
            x = segmenting.randn(4, 8, seed=index)
            assert torch.equal(outer(x), plain(x.sin()) * 2)
    stats = runner_of(outer_calls_it).stats
    assert stats.captures == 0 and set(stats.fallbacks) == {Reason.NESTED_REPLAY}
    _equal_calls(outer_calls_it, segmenting, plain, 30, 6)
    assert stats.captures == 1 and stats.replays


def test_runners_may_come_and_go_while_somebody_looks_at_them_all() -> None:
    """`retire`, budgets and `unwrap` look at all of a device; another thread wraps meanwhile."""

    class Holder:
        def drop_graphs(self) -> int:
            return 0

        def holds_graphs(self) -> bool:
            return False

    state = HostState(torch.device("cpu"))
    kept = [Holder() for _ in range(3)]
    for holder in kept[:2]:
        state.holders.add(holder)
    seen = []
    for holder in state.holders:
        seen.append(holder)
        state.holders.add(kept[2])
        state.holders.discard(holder)
    assert len(seen) == 2 and list(state.holders) == [kept[2]]


def test_a_report_while_another_thread_counts() -> None:
    class Late:
        """A reason in whose turn another thread counts the next one."""

        @property
        def value(self) -> str:
            stats.count_eager(Reason.HOST_READ)
            return "late"

    stats = RunnerStats("module")
    stats.fallbacks[Late()] = stats.details[Late()] = 1
    report = stats.as_dict()
    assert report["fallbacks"] == {"late": 1}


def test_a_module_shared_while_another_thread_calls_it() -> None:
    class Late:
        """Options in whose turn another thread shares the module, too."""

        guard = None

        @property
        def key(self) -> None:
            runner.attach(object(), RunnerOptions())

    module = dit_graphs.wrap(nn.Linear(8, 8), backend="recorded")
    runner = runner_of(module)
    for _ in range(2):
        runner.attach(object(), Late())
    with torch.no_grad():
        assert torch.equal(module(torch.ones(8)), runner.eager(torch.ones(8)))


@pytest.mark.gpu
def test_two_runners_on_two_streams(pooled: Where) -> None:
    """Each replay waits for the previous one's event: they share one pool."""
    pairs = [_pair(pooled, seed) for seed in range(2)]
    streams = [torch.cuda.Stream(pooled.device) for _ in pairs]

    def work(number: int) -> None:
        module, plain = pairs[number]
        with torch.cuda.stream(streams[number]), torch.no_grad():
            for index in range(50):
                x = pooled.randn(4, 8, seed=index)
                torch.cuda._sleep(100_000)
                assert torch.equal(module(x), plain(x))

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work, number) for number in range(2)]:
            done.result(timeout=120)
