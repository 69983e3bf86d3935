"""Calls that begin before their module is looked at, and calls that nobody looks up at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where

import dit_graphs
from dit_graphs.calls import RunnerOptions
from dit_graphs.errors import Reason
from dit_graphs.glance import Glance
from dit_graphs.module_state import sweep
from dit_graphs.pauses import Pauses
from dit_graphs.request_scope import Request
from dit_graphs.signature import sign


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class Tabled(Scaled):
    """Keeps a table as large as the longest input, like rotary positions."""

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(float(start)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.table):
            self.table = torch.arange(float(len(x)), device=x.device)
        return super().forward(x) + self.table[: len(x), None]


def _generation(twin: Twin, where: Where, rows: int, steps: int = 5, seed: int = 0) -> None:
    with dit_graphs.request(total_steps=steps):
        for step in range(steps):
            twin(where.randn(rows, 8, seed=100 * seed + step))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What kinds of looks were taken, in order."""
    seen: list[str] = []
    for name in ("is_same", "is_exactly_same"):
        monkeypatch.setattr(Glance, name, _telling(getattr(Glance, name), name, seen))
    monkeypatch.setattr(
        "dit_graphs.module_watch.sweep", lambda *given: seen.append("sweep") or sweep(*given)
    )
    return seen


def _telling(
    look: Callable[[Glance], bool], name: str, seen: list[str]
) -> Callable[[Glance], bool]:
    def told(self: Glance) -> bool:
        seen.append(name)
        return look(self)

    return told


def test_sizes_that_come_after_quiet_ones_are_not_looked_at(where: Where, looks: list[str]) -> None:
    """A plain first pass of a module whose passes changed nothing so far: no look before or after,
    and none where a capture does not follow."""
    twin = Twin(Scaled(), where)
    for rows in range(1, 5):
        _generation(twin, where, rows)
    looks.clear()
    with dit_graphs.request(total_steps=1):
        twin(where.randn(9, 8))
    assert not looks
    _generation(twin, where, 9, seed=1)
    assert twin.replays >= 4 and looks


def test_a_table_that_grows_after_quiet_sizes_is_the_right_one(graphing: Where) -> None:
    twin = Twin(Tabled(start=6), graphing)
    for rows in (6, 5, 4, 3, 2):
        _generation(twin, graphing, rows)
    replays = twin.replays
    for rows in (7, 12, 6, 13, 4, 7):
        _generation(twin, graphing, rows, steps=6, seed=rows)
    assert twin.replays > replays


def _exchange(twin: Twin, where: Where) -> None:
    """Between two requests: the first call of the second one finds it."""
    for module in (twin.module, twin.plain):
        torch.manual_seed(5)
        module.linear.weight = nn.Parameter(torch.randn(8, 8).to(where.device))
    _generation(twin, where, 3, steps=1)


def _grow(twin: Twin, where: Where) -> None:
    """Within a pass that is not looked at: the call after it finds it."""
    _generation(twin, where, 12, steps=2)


@pytest.mark.parametrize("change", [_exchange, _grow])
def test_sizes_that_come_after_a_change_are_looked_at(
    graphing: Where, looks: list[str], change: Callable[[Twin, Where], None]
) -> None:
    twin = Twin(Tabled(start=6), graphing)
    for rows in range(1, 6):
        _generation(twin, graphing, rows)
    change(twin, graphing)
    looks.clear()
    with dit_graphs.request(total_steps=1):
        twin(graphing.randn(6, 8))
    assert len(looks) > 1, "before the pass and after it"


@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_what_was_exchanged_before_a_quiet_size_is_not_captured_as_it_was(
    graphing: Where, steps: int
) -> None:
    twin = Twin(Scaled(), graphing)
    for rows in range(1, 6):
        _generation(twin, graphing, rows)
    for number, rows in enumerate((7, 3, 8, 7)):
        for module in (twin.module, twin.plain):
            torch.manual_seed(number)
            module.linear.weight = nn.Parameter(torch.randn(8, 8).to(graphing.device))
            module.scale = float(number)
        _generation(twin, graphing, rows, steps=steps, seed=number)
        _generation(twin, graphing, rows, steps=steps, seed=10 + number)


def test_a_hook_put_on_between_two_requests_runs_in_the_first_call(graphing: Where) -> None:
    twin = Twin(Scaled(), graphing)
    _generation(twin, graphing, 3)
    for module in (twin.module, twin.plain):
        module.linear.register_forward_hook(lambda module, args, result: result * 2.0)
    _generation(twin, graphing, 3, seed=1)
    assert twin.runner.stats.fallbacks[Reason.HOOKS] == 5


class Reading(Scaled):
    """Its other branch reads a value on the host, and remembers the size it had."""

    def __init__(self) -> None:
        super().__init__()
        self.last = 0

    def forward(self, x: Tensor, read: bool = False) -> Tensor:
        if read:
            self.last = len(x)
            return super().forward(x) * x.sum().item()
        return super().forward(x)


def test_what_the_user_turns_between_calls_is_never_taken_for_the_forwards_own(
    graphing: Where,
) -> None:
    """A pass that teaches nothing is not looked at before: what was seen at the call before it says
    nothing of it. An attribute that seemed to change in passes would leave the key."""
    twin = Twin(Reading(), graphing, capture="first_use")
    for rows in range(1, 4):
        twin(graphing.randn(rows, 8, seed=rows), read=True)
    for number in range(6):
        for seed in range(3):
            twin(graphing.randn(3, 8, seed=seed))
        for module in (twin.module, twin.plain):
            module.scale = 2.0 + number
        twin(graphing.randn(10 + number, 8), read=True)
    assert twin.replays > 6 and twin.runner.stats.fallbacks[Reason.NOT_ADMITTED] > 3


def test_a_call_may_be_served_anew_after_its_signature_got_another_key(
    graphing: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread's pass may have changed the module, and with it the key, meanwhile."""
    twin = Twin(Scaled(), graphing)
    runner = twin.runner
    with dit_graphs.request():
        twin.until_replayed(lambda index: (graphing.randn(3, 8, seed=index),))
        looked: list[bool] = []

        def outdated(call: object) -> bool:
            if not looked:
                (entry,) = runner.cache.held()
                signature = entry.signature
                runner.cache.rekey(entry, signature.under(signature.ambient, "another"))
            looked.append(True)
            return len(looked) == 1

        monkeypatch.setattr(runner, "_is_outdated", outdated)
        twin(graphing.randn(3, 8, seed=50))
    assert len(looked) > 1


def test_a_guard_of_a_users_is_asked_by_the_first_call_of_a_request(graphing: Where) -> None:
    twin, reasons = Twin(Scaled(), graphing), [None, (Reason.OFFLOAD, "for a test")]
    twin.runner.attach(twin, RunnerOptions(guard=lambda: reasons[0]))
    _generation(twin, graphing, 3)
    assert twin.replays
    reasons.reverse()
    _generation(twin, graphing, 3, seed=1)
    assert twin.runner.stats.fallbacks[Reason.OFFLOAD] == 5


@pytest.fixture
def signed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One item for each call that was signed."""
    calls: list[object] = []

    def counted(call: object, *args: object, **kwargs: object) -> object:
        calls.append(call)
        return sign(call, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("dit_graphs.runner.sign", counted)
    return calls


# Calls that nobody looks up. Admission is asked about graphs of a GPU only, so it is put in here.
class _Putting:
    """A wrapped module whose calls are timed and never admitted; counts what is signed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: nn.Module) -> None:
        where = Where("recorded", torch.device("cpu"))
        self.twin = Twin(module, where)
        self.signed = 0
        capturer = self.twin.runner._capturer
        monkeypatch.setattr(capturer, "backend", "auto")
        monkeypatch.setattr(capturer, "_capture_ms", 1e6)
        monkeypatch.setattr("dit_graphs.runner.sign", self._counted)

    def _counted(self, *args: object, **kwargs: object) -> object:
        self.signed += 1
        return sign(*args, **kwargs)  # type: ignore[arg-type]


@torch.no_grad()
def test_calls_that_are_put_off_to_the_end_of_their_request_are_not_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put = _Putting(monkeypatch, Scaled())
    twin, where = put.twin, Where("recorded", torch.device("cpu"))
    _generation(twin, where, 3, steps=8)
    assert put.signed == 1, "its first call finds that no other one will be admitted"
    (entry,) = twin.runner.cache.entries.values()
    assert entry.uses == 8 and twin.runner.stats.fallbacks[Reason.NOT_ADMITTED] == 7
    assert entry.lost_calls == 8
    _generation(twin, where, 3, steps=8, seed=1)
    assert put.signed == 2 and entry.uses == entry.lost_calls == 16


@torch.no_grad()
def test_a_pause_is_for_its_sizes_its_values_and_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put = _Putting(monkeypatch, Scaled())
    twin, where = put.twin, Where("recorded", torch.device("cpu"))
    with dit_graphs.request(total_steps=20) as request:
        for _ in range(3):
            twin(where.randn(3, 8))
        (entry,) = twin.runner.cache.entries.values()
        assert request.steps_left(entry.signature) == 17
        for x in (where.randn(4, 8), where.randn(1, 3, 8)):
            before = put.signed
            twin(x)
            assert put.signed == before + 1
        before = put.signed
        twin(where.randn(3, 8))
        assert put.signed == before
        twin.runner.mark_changed()
        twin(where.randn(3, 8))
        assert put.signed == before + 1
        twin.module.linear.register_forward_hook(lambda module, args, result: result)
        twin.plain.linear.register_forward_hook(lambda module, args, result: result)
        twin(where.randn(3, 8))
        assert put.signed == before + 1 and twin.runner.stats.fallbacks[Reason.HOOKS] == 1
    before = put.signed
    with dit_graphs.request(total_steps=20):
        twin(where.randn(3, 8))
    assert twin.runner.stats.fallbacks[Reason.HOOKS] == 2


def test_sizes_that_nobody_warmed_up_are_signed_once_per_request(
    where: Where, signed: list[object]
) -> None:
    twin = Twin(Scaled(), where, capture="warmup_only")
    _generation(twin, where, 3, steps=6)
    assert len(signed) == 1 and twin.runner.stats.fallbacks[Reason.WARMUP_ONLY] == 6
    with dit_graphs.request():
        for index in range(12):
            if index == 6:
                with twin.runner.warming_up():
                    twin(where.randn(3, 8, seed=50))
            twin(where.randn(3, 8, seed=index))
    assert twin.runner.stats.fallbacks[Reason.WARMUP_ONLY] == 12
    assert twin.replays >= 4, "what was warmed up within a request is served in it"


def test_a_blocked_signature_is_tried_again_when_it_is_due(
    graphing: Where, signed: list[object]
) -> None:
    """Calls that are not looked up are counted all the same."""
    twin = Twin(Scaled(), graphing)
    _generation(twin, graphing, 3, steps=1)
    (entry,) = twin.runner.cache.entries.values()
    entry.block_until_retry(Reason.CAPTURE_FAILED, "for a test")
    due = entry.retry_after
    signed.clear()
    with dit_graphs.request(total_steps=due + 10):
        for index in range(due - 2):
            twin(graphing.randn(3, 8, seed=index))
        assert (entry.uses, len(signed)) == (due - 1, 1) and twin.captures == 0
        for index in range(4):
            twin(graphing.randn(3, 8, seed=index))
        assert twin.captures == 1 and twin.replays > 0
    assert twin.runner.stats.fallbacks[Reason.CAPTURE_FAILED] == due - 2


def test_weights_exchanged_between_requests_give_a_blocked_signature_a_new_chance(
    graphing: Where,
) -> None:
    twin = Twin(Scaled(), graphing)
    _generation(twin, graphing, 3)
    (entry,) = twin.runner.cache.held()
    twin.runner._settle_release(entry)
    entry.block(Reason.CAPTURE_FAILED, "for a test")
    _generation(twin, graphing, 3, seed=1)
    before = twin.replays
    _exchange(twin, graphing)
    _generation(twin, graphing, 3, steps=6, seed=2)
    assert twin.replays > before


def test_a_pause_ends_where_another_call_may_be_admitted() -> None:
    pauses, request, args = Pauses(), Request(10), (torch.zeros(2), 1.0, "word", [None])
    pauses.add(request, (args, {}), None, (Reason.NOT_ADMITTED, ""), 2, "as it is")  # type: ignore[arg-type]
    assert pauses.find(Request(10), args, {}, lambda: "as it is") is None
    assert pauses.find(request, args, {}, lambda: "otherwise") is None
    other = torch.zeros(2), 2.0, "word", [None]
    assert pauses.find(request, other, {}, lambda: "as it is") is None
    found = [pauses.find(request, args, {}, lambda: "as it is") for _ in range(3)]
    assert found[0] is not None and found[1] is not None and found[2] is None
    pauses.add(request, (args, {}), None, (Reason.NOT_ADMITTED, ""), 2, "as it is")  # type: ignore[arg-type]
    later = Request(10)
    pauses.add(later, (other, {}), None, (Reason.NOT_ADMITTED, ""), 2, "as it is")  # type: ignore[arg-type]
    assert pauses.find(later, args, {}, lambda: "as it is") is None, "an earlier request's"
