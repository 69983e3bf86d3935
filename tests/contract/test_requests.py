"""The request boundary: what is checked once in it, and what every call checks outside it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where

import dit_graphs
from dit_graphs import ConfigError
from dit_graphs.module_watch import ModuleWatch
from dit_graphs.request_scope import Request, begin_request, current_request, end_request


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def test_the_module_is_checked_once_per_request(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[Request | None] = []
    note = ModuleWatch._note_checked

    def counted(self: ModuleWatch, request: Request | None, said: int) -> None:
        checks.append(request)
        note(self, request, said)

    monkeypatch.setattr(ModuleWatch, "_note_checked", counted)
    twin = Twin(Scaled(), where)
    for _ in range(3):
        with dit_graphs.request(total_steps=6) as request:
            for index in range(6):
                twin(where.randn(3, 8, seed=index))
    assert len(checks) == 3
    assert checks[-1] is request
    for index in range(4):
        twin(where.randn(3, 8, seed=index))
    assert len(checks) == 7, "outside a request every call is its own"


def test_a_change_between_requests_is_seen(graphing: Where) -> None:
    twin = Twin(Scaled(), graphing)
    for scale in (1.0, 3.0, 1.0):
        twin.module.scale = twin.plain.scale = scale
        with dit_graphs.request(total_steps=5):
            for index in range(5):
                twin(graphing.randn(3, 8, seed=index))
    assert twin.captures == 2
    # the second scale is captured right after its plain step; the first one's graph is still there
    assert twin.replays == 2 + 3 + 5


def test_a_write_through_data_is_seen_outside_a_request(where: Where) -> None:
    """`.data` counts no version; outside a request nothing is assumed to be bound already."""
    twin = Twin(Scaled(), where)
    mine, theirs = where.randn(3, 8), where.randn(3, 8)
    for index in range(8):
        for x in (mine, theirs):
            x.data.copy_(where.randn(3, 8, seed=index))
        assert torch.equal(twin.module(mine), twin.plain(theirs))
    assert twin.replays == 5


def test_a_later_signature_is_captured_right_after_its_plain_step(graphing: Where) -> None:
    """The code path is known: the second size loses one eager step less."""
    twin = Twin(Scaled(), graphing)
    served = []
    for size in (3, 5, 7):
        before = twin.replays
        with dit_graphs.request(total_steps=8):
            for index in range(8):
                twin(graphing.randn(size, 8, seed=index))
        served.append(twin.replays - before)
    assert served == [5, 6, 6]


def test_requests_end_and_nest(where: Where) -> None:
    assert current_request() is None
    with dit_graphs.request(total_steps=3) as outer:
        assert current_request() is outer
        with dit_graphs.request() as inner:
            assert current_request() is inner
        assert current_request() is outer
        with pytest.raises(RuntimeError, match="inside"), dit_graphs.request():
            raise RuntimeError("inside")
        assert current_request() is outer
    assert current_request() is None


def test_a_begun_request_lasts_until_the_next_or_its_end() -> None:
    ended = []
    first = begin_request(4)
    first.at_end("owner", lambda: ended.append("first"))
    first.at_end("owner", lambda: ended.append("never: one action per owner"))
    second = begin_request(2)
    assert ended == ["first"]
    end_request(first)
    assert current_request() is second
    end_request()
    assert current_request() is None
    assert ended == ["first"]


@pytest.mark.parametrize("steps", [-1, True, 1.5, float("nan"), "8", torch.tensor(8)])
def test_what_is_no_number_of_steps_is_refused(steps: object) -> None:
    with pytest.raises(ConfigError, match="total_steps"), dit_graphs.request(total_steps=steps):
        pass


def test_steps_left_is_counted_per_signature() -> None:
    with dit_graphs.request(total_steps=3) as request:
        assert request.steps_left("a") == 3
        request.count("a")
        request.count("b")
        assert request.steps_left("a") == 2
        request.count("a"), request.count("a"), request.count("a")
        assert request.steps_left("a") == 0
    with dit_graphs.request() as request:
        assert request.steps_left("a") is None


def test_steps_are_counted_on_under_the_key_a_first_pass_gave(where: Where) -> None:
    """The first call sets an attribute, and with it the signature; that call was a step."""

    class Settles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.size: int | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.size = x.shape[0]
            return x * 2

    twin = Twin(Settles(), where)
    with dit_graphs.request(total_steps=3) as request:
        for left in (2, 1, 0):
            twin(where.randn(3, 8))
            (entry,) = twin.runner.cache.entries.values()
            assert request.steps_left(entry.signature) == left
    assert list(request.calls.values()) == [3]


def test_threads_and_tasks_have_requests_of_their_own() -> None:
    found: list[object] = []
    with dit_graphs.request():
        thread = threading.Thread(target=lambda: found.append(current_request()))
        thread.start()
        thread.join()
    assert found == [None]

    async def task(number: int) -> bool:
        with dit_graphs.request(total_steps=number) as mine:
            await asyncio.sleep(0.01)
            return current_request() is mine

    async def both() -> list[bool]:
        return list(await asyncio.gather(task(1), task(2)))

    assert asyncio.run(both()) == [True, True]


def test_a_generator_that_every_step_finds_in_another_context() -> None:
    """As those of Gradio and of thread pools are: each step runs in a copy of the context."""

    def steps() -> Iterator[int]:
        with dit_graphs.request(total_steps=2):
            yield from range(2)

    running = steps()
    with dit_graphs.request() as ours:
        copies = [contextvars.copy_context() for _ in range(3)]
        assert [copy.run(next, running, None) for copy in copies] == [0, 1, None]
        assert [copy.run(current_request) for copy in copies[1:]] == [ours, ours]
        assert current_request() is ours
    assert current_request() is None
