"""The cache under generated traffic: bounded, calm, and fair to what is used most."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dit_graphs.cache import Entry, GraphCache, State
from dit_graphs.errors import Reason
from dit_graphs.signature import Signature, sign
from dit_graphs.watch import BreakPolicy

FAST = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


@dataclass
class _Graph:
    output: object = None
    segments: int = 1
    breaks: int = 0
    captured_fraction: float = 1.0
    nbytes: int = 1
    closed: bool = False

    def replay(self) -> None: ...

    def poison(self) -> None: ...

    def close(self) -> None:
        self.closed = True


class _Traffic:
    """A runner's use of the cache, without modules: a graph whenever there is room for one."""

    def __init__(self, limit: int) -> None:
        self.cache = GraphCache(limit, self._evict)
        self.captures: Counter[int] = Counter()
        self.served: Counter[int] = Counter()
        self.evictions = 0
        self.request = 0

    def _evict(self, entry: Entry) -> None:
        entry.release()
        self.evictions += 1

    def __call__(self, size: int, steps: int = 4) -> None:
        self.request += 1
        for _ in range(steps):
            entry = self.cache.find(_signature(size), self.request)
            if entry is None:
                self.cache.add(_signature(size), BreakPolicy(), self.request)
            elif entry.is_held:
                self.served[size] += 1
            elif self.cache.make_room(entry):
                entry.recording, entry.state = _Graph(), State.READY
                self.captures[size] += 1


def _signature(size: int) -> Signature:
    return sign({"x": torch.empty(size, 4, device="meta")}, None, None, [])


@FAST
@given(st.integers(1, 5), st.lists(st.integers(1, 12), min_size=1, max_size=80))
def test_never_more_graphs_than_the_limit(limit: int, sizes: list[int]) -> None:
    traffic = _Traffic(limit)
    for size in sizes:
        traffic(size)
        assert len(traffic.cache.held()) <= limit
    held = sum(traffic.captures.values()) - traffic.evictions
    assert held == len(traffic.cache.held())


@FAST
@given(st.integers(1, 6), st.integers(2, 30), st.integers(1, 8))
def test_round_robin_settles_on_the_limit_without_thrash(
    limit: int, sizes: int, rounds: int
) -> None:
    traffic = _Traffic(limit)
    for _ in range(rounds):
        for size in range(1, sizes + 1):
            traffic(size)
    assert traffic.evictions == 0
    assert sum(traffic.captures.values()) == min(limit, sizes)


@FAST
@given(st.integers(1, 4), st.integers(0, 2**16))
def test_what_is_used_most_is_held_in_the_end(limit: int, seed: int) -> None:
    traffic = _Traffic(limit)
    common = list(range(1, limit + 1))
    chance = Random(seed)
    for number in range(200):
        traffic(chance.randint(50, 90) if number % 5 == 0 else chance.choice(common), steps=2)
    held = {entry.signature.tensors[0].shape[0] for entry in traffic.cache.held()}
    assert held == set(common)
    assert traffic.evictions <= 2 * limit


@FAST
@given(st.integers(1, 4))
def test_traffic_that_moves_on_takes_its_graphs_along(limit: int) -> None:
    traffic = _Traffic(limit)
    for phase in (0, 100, 200):
        for _ in range(80):
            for size in range(1, limit + 1):
                traffic(phase + size)
    held = {entry.signature.tensors[0].shape[0] for entry in traffic.cache.held()}
    assert held == {200 + size for size in range(1, limit + 1)}
    assert traffic.evictions == 2 * limit


def test_a_returning_size_waits_longer_after_each_eviction() -> None:
    """Two sizes in bursts over one graph: the waiting doubles, captures grow like a logarithm."""
    traffic = _Traffic(1)
    for _ in range(40):
        for size in (1, 2):
            for _ in range(6):
                traffic(size)
    assert sum(traffic.captures.values()) <= 14


def test_the_number_of_known_signatures_is_bounded() -> None:
    traffic = _Traffic(2)
    for size in range(1, 2600):
        traffic(size, steps=1)
    assert len(traffic.cache.entries) <= 2048
    for entry in traffic.cache.held():
        assert entry.signature in traffic.cache.entries


def test_what_is_known_of_code_paths_and_numbers_is_bounded() -> None:
    cache = GraphCache(2, lambda entry: entry.release())
    for call in range(2600):
        signature = sign({"prompt": str(call), "strength": call / 7}, None, None, [])
        assert cache.find(signature, call) is None and cache.varying(signature) is None
        cache.add(signature, BreakPolicy(), call)
    for known in (cache.plans, cache._scalars):
        assert len(known) == 2048
    numbers = [sign({"x": 1, "strength": call / 7}, None, None, []) for call in range(9)]
    assert [cache.varying(signature) is not None for signature in numbers] == [False] * 2 + [
        True
    ] * 7


def test_another_thread_may_add_an_entry_while_all_are_given_a_chance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = GraphCache(2, lambda entry: entry.release())
    for size in range(1, 4):
        cache.add(_signature(size), BreakPolicy(), None).block(Reason.HOST_READ, "")
    unblock = Entry.unblock

    def unblock_late(self: Entry) -> None:
        cache.add(_signature(4), BreakPolicy(), None, path="another")
        unblock(self)

    monkeypatch.setattr(Entry, "unblock", unblock_late)
    cache.unblock_all()
    assert len(cache.entries) == 4
    assert not any(entry.state is State.BLOCKED for entry in cache.entries.values())


def test_an_entry_let_go_leaves_the_one_in_its_place_alone() -> None:
    cache = GraphCache(2, lambda entry: entry.release())
    gone = cache.add(_signature(1), BreakPolicy(), None)
    cache.entries.clear()
    present = cache.add(_signature(1), BreakPolicy(), None)
    present.recording = _Graph()
    cache.rekey(gone, _signature(2))
    assert cache.held() == [present] and list(cache.entries) == [_signature(1)]


def test_a_graph_that_saves_more_is_kept_longer() -> None:
    traffic = _Traffic(2)
    for _ in range(3):
        traffic(1)
        traffic(2)
    slow, fast = (traffic.cache.find(_signature(size), None) for size in (1, 2))
    assert slow is not None and fast is not None
    slow.eager_ms, slow.replay_ms = 10.0, 9.0
    fast.eager_ms, fast.replay_ms = 10.0, 2.0
    for _ in range(30):
        traffic(3)
    assert fast.is_held and not slow.is_held
