"""Owns one kind of graph: a function over static state, captured once per bucket and proven.

Must never know what the function computes. The surprising fact: the first real step is run both
ways. The capture happens on resting rows, so that a value baked into the graph shows at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..budget import keep_budget
from ..buffers import bits_equal
from ..cache import Entry, State, StructurePlan
from ..capture import Capturer
from ..config import GraphConfig
from ..counters import RunnerStats, log
from ..errors import CaptureAborted, Reason
from ..forward import Forward
from ..memory import DeviceState
from ..signature import sign
from ..verify import MORE_RUNS
from ..watch import BreakPolicy

__all__ = ["Pass", "PassRunner"]

_MAX_OBSERVATIONS = 4
_RETRIED = (
    Reason.CAPTURE_GATE_BUSY,
    Reason.LOW_MEMORY,
    Reason.OUT_OF_MEMORY,
    Reason.MEMORY_BUDGET,
)
_USES_BEFORE_RETRY = 64
_KINDS = 2  # of passes in one step


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A function without arguments: what it computes lies in tensors it owns.

    `path`: passes of one path run the same code at several sizes. `results()`: views of everything
    a run reads and changes. `witnesses()`: copies of what else it leaves behind. `poison()`: makes
    a run that does nothing show. `resting()`: a context in which a run touches nothing of value.
    """

    name: str
    path: Hashable
    key: Hashable
    run: Callable[[], None]
    results: Callable[[], list[Tensor]]
    witnesses: Callable[[], list[Tensor]]
    poison: Callable[[], None]
    resting: Callable[[], AbstractContextManager[None]]


@dataclass(slots=True)
class _Held:
    entry: Entry
    capturer: Capturer
    used: Pass
    uses: int = 0
    last_use: int = 0
    retry_at: int = 0


class PassRunner:
    """The graphs of one component's passes. Holds at most `config.max_graphs`, least used go.

    Two at least: a step needs one of each kind, and one alone would be captured anew each time.
    """

    def __init__(
        self,
        module: nn.Module,
        state: DeviceState,
        config: GraphConfig,
        *,
        backend: str,
        component: str,
        stats: RunnerStats,
        policy: BreakPolicy | None = None,
    ) -> None:
        self.module = module
        self.state = state
        self.config = config
        self.backend = backend
        self.component = component
        self.stats = stats
        self.policy = policy if policy is not None else BreakPolicy()
        self.is_warming_up = False
        self.held: dict[Hashable, _Held] = {}
        self._plans: dict[Hashable, StructurePlan] = {}
        self._clock = 0
        state.holders.add(self)

    def serve(self, wanted: Pass, *, steps_left: int) -> Reason | None:
        """Runs the pass once: from its graph (None), or eagerly for the reason returned."""
        held = self._find(wanted)
        entry = held.entry
        if self.backend == "debug":  # the same path without any graph
            with self.state.gate.shared():
                self._run(held)
            return None
        if entry.state is State.BLOCKED and held.retry_at and held.uses >= held.retry_at:
            entry.state, held.retry_at = State.SEEN, 0
        if entry.state is State.COLD or entry.state is State.SEEN:
            self._learn(held, steps_left)
        if entry.state is State.CAPTURED or (
            self.config.verify == "always" and entry.state is State.READY
        ):
            return self._compare(held)
        if entry.state is State.READY:
            refused = self._replay(entry)
            if refused is None:
                entry.replays += 1
                return None
            with self.state.gate.shared():
                self._run(held)
            return refused
        with self.state.gate.shared():
            self._run(held)
        return entry.blocked[0] if entry.blocked is not None else Reason.WARMING_UP

    def _replay(self, entry: Entry) -> Reason | None:
        """One replay, or why there was none: inside another's break, or the graph was let go."""
        try:
            with self.state.gate.shared(), self.state.replaying():
                entry.graph()[0].replay()
        except CaptureAborted as refusal:
            return refusal.reason
        return None

    def _find(self, wanted: Pass) -> _Held:
        self._clock += 1
        held = self.held.get(wanted.key)
        if held is None:
            self._make_room()
            forward = Forward(self.module, wanted.run, self.state.device)
            capturer = Capturer(forward, self.state, self.config, self.backend)
            plan = self._plans.setdefault(wanted.path, StructurePlan(self.policy))
            entry = Entry(sign(wanted.name, None, wanted.key, []), plan)
            held = self.held[wanted.key] = _Held(entry, capturer, wanted)
        held.uses += 1
        held.last_use = self._clock
        return held

    def _make_room(self) -> None:
        while len(self.held) >= max(self.config.max_graphs, _KINDS):
            oldest = min(self.held, key=lambda key: self.held[key].last_use)
            dropped = self.held.pop(oldest)
            if dropped.entry.is_held:
                self.state.settle()
                dropped.entry.release()
                self.stats.evictions += 1

    def _run(self, held: _Held) -> None:
        with held.capturer.forward.conditions():
            held.used.run()

    def _learn(self, held: _Held, steps_left: int) -> None:
        """The entry holds a graph afterwards, or a reason why not."""
        entry = held.entry
        warming = self.is_warming_up
        if self.config.capture == "warmup_only" and not warming:
            entry.blocked = (Reason.WARMUP_ONLY, "")
            return
        entry.blocked = None
        if held.uses < 2 and steps_left < 3 and not warming and self.config.capture != "first_use":
            entry.blocked = (Reason.WARMING_UP, "")
            return
        try:
            with held.used.resting():
                self._observe(held)
                held.capturer.capture(entry, (), {}, [])
            keep_budget(self.state, self.config, self.component, self._graph_bytes, lambda: False)
        except CaptureAborted as refusal:
            entry.release()
            entry.block(refusal.reason, self._advice(refusal))
            if refusal.reason in _RETRIED:
                held.retry_at = held.uses + _USES_BEFORE_RETRY
            log.warning("%s: no graph (%s): %s", self.component, refusal.reason, refusal.detail)
            return
        self._captured(held)

    def _graph_bytes(self) -> int:
        return sum(held.entry.nbytes for held in self.held.values() if held.entry.is_held)

    def _advice(self, refusal: CaptureAborted) -> str:
        if refusal.reason in (Reason.OUT_OF_MEMORY, Reason.LOW_MEMORY):
            return f"lower max_size[{self.component!r}] or the context. {refusal.detail}"
        return refusal.detail

    def _observe(self, held: _Held) -> None:
        for _ in range(_MAX_OBSERVATIONS):
            held.capturer.observe(held.entry, (), {}, [])
            if held.capturer.is_observed(held.entry):
                return
            if held.entry.blocked is not None:
                raise CaptureAborted(*held.entry.blocked)
        raise CaptureAborted(Reason.HOST_READ, "the step keeps reading device values on the host")

    def _captured(self, held: _Held) -> None:
        entry, recording = held.entry, held.entry.recording
        if recording is None:  # another thread closed the runner just now
            return
        self.stats.captures += 1
        self.state.holders.add(self)  # a closed runner that is used again holds graphs again
        log.info(
            "%s: captured %s: %s, %.0f ms, %.1f MiB", self.component, held.used.name,
            entry.backend, entry.capture_ms, recording.nbytes / 2**20,
        )  # fmt: skip
        if self.config.verify is False:
            entry.state = State.READY

    def _compare(self, held: _Held) -> Reason:
        """One step both ways from one state; eager's results stay."""
        entry, used = held.entry, held.used
        self.stats.compares += 1
        with self.state.gate.shared():
            before = [tensor.clone() for tensor in used.results()]
            random = self.state.random_state()
            started = time.perf_counter()
            self._run(held)
            entry.host_ms = (time.perf_counter() - started) * 1e3
            eager, after = self._outcome(used), self.state.random_state()
            self._rewind(used, before, random)
            used.poison()
            refused = self._replay(entry)
            replayed, drawn = self._outcome(used), self.state.random_state()
        equal = all(map(bits_equal, eager, replayed)) and all(map(torch.equal, after, drawn))
        if equal and refused is None:
            entry.state = State.READY
            return Reason.WARMING_UP
        if refused is not None:
            self._rewind(used, before, random)
            self._run(held)
            return refused
        steady = all(self._repeats(held, before, random, eager) for _ in range(MORE_RUNS))
        reason = Reason.VERIFY_MISMATCH if steady else Reason.EAGER_NONDETERMINISTIC
        self.state.settle()
        entry.release()
        entry.block(reason, used.name)
        return reason

    def _repeats(
        self, held: _Held, before: list[Tensor], random: list[Tensor], expected: list[Tensor]
    ) -> bool:
        """The step was run eagerly once more from where it was; whether its bits came again."""
        self._rewind(held.used, before, random)
        self._run(held)
        return all(map(bits_equal, expected, self._outcome(held.used)))

    def _rewind(self, used: Pass, before: list[Tensor], random: list[Tensor]) -> None:
        for tensor, value in zip(used.results(), before, strict=True):
            tensor.copy_(value)
        self.state.set_random_state(random)

    @staticmethod
    def _outcome(used: Pass) -> list[Tensor]:
        return [tensor.clone() for tensor in (*used.results(), *used.witnesses())]

    def distrust(self) -> None:
        """Every graph is compared once more before it serves again."""
        for held in self.held.values():
            if held.entry.state is State.READY:
                held.entry.state = State.CAPTURED

    def drop_graphs(self) -> int:
        """Closes every graph; they come back on their next use. Returns how many there were."""
        with self.state.replay_lock:
            self.state.settle()
            graphs = [held for held in self.held.values() if held.entry.is_held]
            for held in graphs:
                held.entry.release()
            return len(graphs)

    def forget(self) -> None:
        """Every graph is closed and nothing learnt is kept: the memory under them goes away."""
        self.drop_graphs()
        self.held.clear()
        self._plans.clear()

    def holds_graphs(self) -> bool:
        """Whether any graph is held."""
        return any(held.entry.is_held for held in self.held.values())

    def records(self) -> list[dict[str, object]]:
        """One JSON-serialisable record per held graph."""
        found: list[dict[str, object]] = []
        for held in self.held.values():
            entry, recording = held.entry, held.entry.recording
            if recording is None:
                continue
            found.append(
                {
                    "signature": held.used.name,
                    "backend": entry.backend,
                    "state": entry.state.value,
                    "segments": recording.segments,
                    "breaks": recording.breaks,
                    "captured_fraction": recording.captured_fraction,
                    "nbytes": recording.nbytes,
                    "capture_ms": entry.capture_ms,
                    "replays": entry.replays,
                    "eager_ms": entry.eager_ms,
                    "replay_ms": entry.replay_ms,
                    "verified": "1/1 leaves" if entry.state is State.READY else "0/1 leaves",
                }
            )
        return found
