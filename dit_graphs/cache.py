"""Owns which signatures have a graph: states, admission, eviction, blocking with retry.

Must never know tensors' values or CUDA. The surprising fact: an evicted signature does not simply
come back. It must have lost more by running eagerly than the graph it would push out has saved,
so twenty sizes in turn over four graphs settle on four captures instead of thrashing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from enum import Enum
from types import MethodType
from typing import TypeVar
from weakref import WeakMethod

import torch
from torch import Tensor

from .backends.base import Recording
from .buffers import clone_layout
from .errors import CaptureAborted, Reason
from .memory import Stopwatch
from .observer import HostRead, Observation
from .op_traits import storage_key
from .reliance import Reliance
from .signature import Signature, names_of_different
from .static_inputs import StaticInputs
from .taken import Taken
from .tree import map_tensors, tensor_leaves
from .watch import BreakPolicy
from .worth import Worth

__all__ = ["Entry", "GraphCache", "State", "StructurePlan"]

K = TypeVar("K")
V = TypeVar("V")

_MAX_ENTRIES = 2048
_HALF_LIFE = 32.0  # requests after which a signature's past use counts half
_CLEARLY_HOTTER = 2.0
_MAX_CAUTION = 6
_USES_BEFORE_RETRY = 64
_TIRED = 3  # graphs in a row that hardly served


class State(Enum):
    """Where a signature is on its way to a graph."""

    COLD = "cold"
    SEEN = "seen"
    CAPTURED = "captured"
    READY = "ready"
    BLOCKED = "blocked"

    @property
    def without_graph(self) -> str:
        """Why there is no graph, where nothing forbids one."""
        if self is State.SEEN:
            return "called before, may be captured when it is called again"
        return "no call of it was measured yet"


@dataclass(slots=True)
class StructurePlan:
    """What is known of one code path of a module: every size of it shares this.

    `passes`: observed passes in a row that found host reads. `stuck`: signatures in a row for which
    no break helped; the next ones are observed only when they have come often.
    """

    policy: BreakPolicy
    reads: tuple[HostRead, ...] = ()  # those that made breaks necessary
    passes: int = 0
    is_simple: bool = False
    has_captured: bool = False
    stuck: int = 0

    @property
    def uses_before_observation(self) -> int:
        """How often a signature must have come to be observed."""
        return 2 ** min(self.stuck, _MAX_CAUTION) if self.stuck else 0


@dataclass(slots=True, eq=False)
class Entry:
    """One signature: its state, its timings and, once captured, its graph."""

    signature: Signature
    plan: StructurePlan
    state: State = State.COLD
    uses: int = 0
    heat: float = 0.0
    last_use: int = 0
    last_request: int | None = None
    requests: int = 0
    evictions: int = 0
    requests_at_eviction: int = 0
    lost_calls: int = 0  # eager ones since a graph was last held
    eager_ms: float | None = None
    replay_ms: float | None = None
    capture_ms: float = 0.0
    attempts: int = 0
    has_escaped: bool = False  # a pass left a tensor behind: the first may fill somebody's cache
    chances: int = 0  # how often what forbade a graph was taken back
    drops: int = 0
    wasted: int = 0  # graphs in a row that went before they served
    rests_until: int = 0  # no capture before this use
    blocked: tuple[Reason, str] | None = None
    retry_after: int = 0
    observation: Observation | None = None
    inputs: StaticInputs | None = None
    taken: tuple[Taken, ...] = ()  # what the forward takes out of the caller's containers
    private: frozenset[int] = frozenset()  # storages in which no argument may lie
    tables: tuple[Tensor, ...] = ()  # of its module, weights aside: what its graph never writes
    may_draw: bool = True  # random numbers, where no pass was watched; a compare tells
    recording: Recording[object] | None = None
    clock: Stopwatch | None = None
    clock_host_ms: float = 0.0
    host_ms: float = 0.0
    masked: int = 0  # hash of the signature without its numbers
    replays: int = 0
    backend: str = ""
    reliance: Reliance = field(default_factory=Reliance)

    def block(self, reason: Reason, detail: str, retry_after: int = 0) -> None:
        """No more captures of this signature (before use number `retry_after`, if given)."""
        self.blocked, self.retry_after = (reason, detail), retry_after
        self.state = State.BLOCKED  # last: other threads ask for the reason then

    def block_until_retry(self, reason: Reason, detail: str) -> None:
        """No capture for 64 uses, and for four times as many after each further refusal."""
        self.block(reason, detail, self.uses + _USES_BEFORE_RETRY * 4**self.attempts)
        self.attempts += 1

    def note_escape(self, detail: str) -> None:
        """A pass left a tensor behind. The next pass that does so blocks the signature."""
        if self.has_escaped:
            self.block_until_retry(Reason.STATE_ESCAPED, detail)
        self.has_escaped = True

    def unblock(self) -> None:
        """What forbade a graph may be gone: the signature is as if seen once."""
        self.state, self.blocked, self.retry_after = State.SEEN, None, 0
        self.chances += 1

    def graph(self) -> tuple[Recording[object], StaticInputs]:
        """Its graph and the buffers which that reads; asked where no other thread can replay.

        Raises `CaptureAborted` where another thread let them go since the entry was found.
        """
        if self.recording is None or self.inputs is None:
            if self.state in (State.CAPTURED, State.READY):
                self.state = State.SEEN
            raise CaptureAborted(Reason.STATE_CHANGED, "its graph was released meanwhile")
        return self.recording, self.inputs

    def worth(self, device: torch.device) -> Worth | None:
        """What its graph is worth; None where no graph ran on a GPU or nobody measured."""
        is_graph = device.type == "cuda" and self.backend != "debug"
        if not is_graph or self.eager_ms is None or self.replay_ms is None:
            return None
        return Worth(self.eager_ms, self.replay_ms, self.nbytes)

    def hand_out(self) -> object:
        """The recording's output, cloned in the caller's mode."""
        assert self.recording is not None
        return map_tensors(self.recording.output, clone_layout)

    def forget_bound(self) -> None:
        """The caller's tensors of the last call are let go."""
        if self.inputs is not None:
            self.inputs.forget()

    def release(self) -> None:
        """The graph is gone; the signature is as if seen once, or waits where none ever served."""
        if self.recording is not None:
            self.recording.close()
            self.wasted = self.wasted + 1 if self.replays < 2 else 0
            is_tired = self.wasted >= _TIRED
            self.rests_until = self.uses + is_tired * 2 ** min(self.wasted, _MAX_CAUTION)
        if self.inputs is not None:
            self.inputs.close()
        self.recording, self.inputs, self.observation, self.tables = None, None, None, ()
        if self.state in (State.CAPTURED, State.READY):
            self.state = State.SEEN
        self.lost_calls, self.replays = 0, 0
        self.reliance.forget_graph()

    @property
    def draws(self) -> bool:
        """Whether the pass drew from generators that were handed to it or kept by its module."""
        return self.observation is not None and bool(self.observation.generators)

    @property
    def has_effects(self) -> bool:
        """Whether a replay that is given up leaves traces: breaks, random numbers, writes."""
        if (seen := self.observation) is None:
            return self.may_draw
        writes = seen.written_externals or seen.written_inputs
        return bool(seen.is_random or seen.generators or writes or self.has_breaks)

    @property
    def has_breaks(self) -> bool:
        """Whether a replay runs Python of the model's."""
        return self.recording is not None and self.recording.breaks > 0

    def writes_to(self, storages: Collection[int]) -> bool:
        """Whether its graph writes to any of these, which are not its own."""
        written = self.observation.written_externals if self.observation is not None else ()
        return any(storage_key(tensor) in storages for tensor in written)

    def reads(self, storages: Collection[int]) -> frozenset[int]:
        """What its graph reads or hands out of these, which are not its own."""
        if (recording := self.recording) is None:  # another thread may let it go
            return frozenset()
        handed_out = map(storage_key, tensor_leaves(recording.output))
        return recording.reads().union(handed_out) & set(storages)

    @property
    def is_held(self) -> bool:
        """Whether this entry holds a graph."""
        return self.recording is not None

    @property
    def nbytes(self) -> int:
        """What its graph added to the pool, and its input buffers."""
        recording = self.recording.nbytes if self.recording is not None else 0
        return recording + (self.inputs.nbytes if self.inputs is not None else 0)

    @property
    def saved_ms(self) -> float:
        """Milliseconds one replay saves over eager; 1 where not measured yet."""
        if self.eager_ms is None or self.replay_ms is None:
            return 1.0
        return max(self.eager_ms - self.replay_ms, 0.01)


class GraphCache:
    """The signatures of one runner. `limit` graphs at most are held."""

    def __init__(self, limit: int, close: Callable[[Entry], None]) -> None:
        self.limit = limit
        self.entries: OrderedDict[Signature, Entry] = OrderedDict()
        self.plans: dict[Hashable, StructurePlan] = {}
        # a method weakly: its owner holds us, and in a cycle weights would wait for the collector
        self._close = WeakMethod(close) if isinstance(close, MethodType) else lambda: close
        self._now = 0
        self._request: int | None = None
        self.readers: list[Entry] = []  # with graphs that read tables of the module, or did
        self._scalars: dict[int, deque[Signature]] = {}
        self._varying: dict[Hashable, str] = {}  # by signature without numbers

    def find(self, signature: Signature, request: int | None) -> Entry | None:
        """The entry of a signature seen before, its use counted; None for a new one."""
        entry = self.entries.get(signature)
        if entry is not None:
            self._touch(entry, request)
            self._scalars.pop(entry.masked, None)  # a value that came back is not a varying one
        return entry

    def _touch(self, entry: Entry, request: int | None) -> None:
        entry.uses += 1
        if request is not None and request == entry.last_request:
            return
        if request is None or request != self._request:
            self._now, self._request = self._now + 1, request
        entry.heat = self._warmth(entry) + 1.0
        entry.last_use, entry.last_request = self._now, request
        entry.requests += 1

    def _warmth(self, entry: Entry) -> float:
        return entry.heat * float(0.5 ** ((self._now - entry.last_use) / _HALF_LIFE))

    def varying(self, signature: Signature) -> str | None:
        """The arguments of a new signature whose Python number differed in three calls in a row.

        A strength that changes between generations does not count: it repeats within one.
        """
        masked = signature.without_numbers()
        if (known := self._varying.get(masked)) is not None:
            return known
        seen = self._scalars.setdefault(hash(masked), deque(maxlen=3))
        seen.append(signature)
        _bound(self._scalars)
        if len(seen) < 3:
            return None
        columns = zip(*[one.numbers() for one in seen], strict=True)
        if not any(len(set(column)) == 3 for column in columns):
            return None
        self._varying[masked] = names = names_of_different(list(seen))
        _bound(self._varying)
        return names

    def add(
        self,
        signature: Signature,
        policy: BreakPolicy,
        request: int | None,
        path: Hashable = None,
    ) -> Entry:
        """A cold entry for a new signature. `path`: what picks the code path besides arguments."""
        structure = signature.argument_structure(), path
        plan = self.plans.setdefault(structure, StructurePlan(policy))
        _bound(self.plans)
        entry = Entry(signature, plan, masked=hash(signature.without_numbers()))
        self.entries[signature] = entry
        self._touch(entry, request)
        if len(self.entries) > _MAX_ENTRIES:
            unheld = [e for e in list(self.entries.values()) if not e.is_held]
            self.entries.pop(min(unheld, key=lambda e: e.last_use).signature, None)
        return entry

    def unblock_all(self) -> None:
        """The weights are others: what they forbade is tried again, as far as signatures return.

        At once where that is the first time, then after ever more uses: some modules set a tensor
        in every call, and neither a failing capture nor an offloaded weight gets better by that.
        """
        # lists first, here and below: other threads may add some meanwhile
        for plan in list(self.plans.values()):
            plan.stuck = 0
        for entry in list(self.entries.values()):
            blocked = entry.blocked
            if blocked is None or blocked[0] is Reason.OFFLOAD:
                continue
            if entry.chances:
                soon = entry.uses + 2 ** min(entry.chances, _MAX_CAUTION)
                entry.retry_after = min(entry.retry_after or soon, soon)
            else:
                entry.unblock()
                entry.attempts = entry.drops = 0

    def rekey(self, entry: Entry, signature: Signature) -> None:
        """The entry is found under `signature` from now on, unless that one is known already.

        An entry that another thread has let go of stays gone.
        """
        if signature not in self.entries and self.entries.get(entry.signature) is entry:
            del self.entries[entry.signature]
            entry.signature = signature
            self.entries[signature] = entry

    def held(self) -> list[Entry]:
        """Entries that hold a graph."""
        return [entry for entry in list(self.entries.values()) if entry.recording is not None]

    def note_graph(self, entry: Entry) -> None:
        """`entry` was given a graph."""
        known = [*self.readers, entry] if entry not in self.readers else self.readers
        self.readers = [each for each in known if each.tables]

    def serves_alike(self, entry: Entry) -> bool:
        """Whether a graph of another signature serves calls that look like those of `entry`."""
        return _looks_like_one(entry, self.held())

    def knows_alike(self, entry: Entry) -> bool:
        """Whether calls that look like those of `entry` were made before the last one."""
        return entry.uses > 1 or _looks_like_one(entry, list(self.entries.values()))

    def make_room(self, entry: Entry) -> bool:
        """Room for one more graph: the least worthy goes, or no if `entry` is not worth it."""
        return len(self.held()) < self.limit or self.evict_for(entry)

    def evict_for(self, entry: Entry) -> bool:
        """Closes the least worthy other graph, if there is one that `entry` may push out.

        A newcomer must be clearly hotter than the graph it pushes out.
        """
        if not (held := [other for other in self.held() if other is not entry]):
            return False
        victim = min(held, key=lambda e: e.saved_ms * self._warmth(e))
        waited = entry.requests - entry.requests_at_eviction
        if entry.evictions and waited < 2**entry.evictions:
            return False
        if self._warmth(entry) <= _CLEARLY_HOTTER * self._warmth(victim):
            return False
        victim.evictions += 1
        victim.requests_at_eviction = victim.requests
        close = self._close()
        assert close is not None, "the owner of this cache is gone"
        close(victim)
        return True

    def nearest(self, signature: Signature) -> Signature | None:
        """The held signature that differs in the fewest lines, for messages."""
        others = [e.signature for e in self.held() if e.signature != signature]
        return min(others, key=lambda other: len(other.diff(signature)), default=None)


def _looks_like_one(entry: Entry, known: list[Entry]) -> bool:
    mine = entry.signature
    return any(other is not entry and other.signature.looks_like(mine) for other in known)


def _bound(known: dict[K, V]) -> None:
    """What was noted first goes where there is too much of it; noted again, it is new."""
    if len(known) > _MAX_ENTRIES:
        known.pop(next(iter(known)), None)
