"""Owns the graphs one runner holds: room for new ones, eviction, release, and what they report.

Must never know how a call is served. The surprising fact: closing the last graph of a device also
gives up the shared pool, so that `restore` returns the memory and not only the right to reuse it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager

from .budget import keep_budget
from .cache import Entry, GraphCache
from .calls import RunnerOptions
from .capture import Capturer
from .config import GraphConfig
from .counters import RunnerStats, log
from .errors import CaptureAborted, Reason
from .intercept import Intercept
from .memory import DeviceState
from .module_watch import ModuleWatch
from .signature import Signature

__all__ = ["GraphHolding"]

_SEEN_IN_A_PASS = (Reason.HOST_READ, Reason.HOST_COPY, Reason.CONSTANT_CHANGED)
_SHORT_OF_MEMORY = (Reason.LOW_MEMORY, Reason.OUT_OF_MEMORY, Reason.MEMORY_BUDGET)


class GraphHolding:
    """The part of a runner that keeps graphs; `GraphRunner` adds the calls."""

    config: GraphConfig
    options: RunnerOptions
    stats: RunnerStats
    cache: GraphCache
    state: DeviceState
    backend: str
    disabled: int
    guests: dict[object, RunnerOptions]
    intercept: Intercept | None
    _watch: ModuleWatch
    _capturer: Capturer

    def mark_changed(self) -> None:
        """A mutator ran (LoRA, processors, `.to`): the next call checks the module again.

        Where it moved the weights, graphs go at once: they keep the old ones alive. From inside a
        call that is left to the next one.
        """
        self._watch.forget()
        if self.holds_graphs() and self._watch.has_moved():
            with self.state.gate.alone() as is_alone:
                if is_alone:
                    self._invalidate()

    def attach(self, user: object, options: RunnerOptions) -> None:
        """`user` has its calls served here too: its key and guard count until `detach`."""
        self.guests[user] = options

    def detach(self, user: object) -> None:
        """`user` is gone; what it asked for counts no longer."""
        self.guests.pop(user, None)

    def _extra(self) -> Hashable:
        """What belongs to the key besides the arguments and the ambient state."""
        return self._watch.state_id, self._own_key()

    def _own_key(self) -> Hashable:
        """What the users of this runner add to the key."""
        keys = dict.fromkeys([self.options.key, *(guest.key for guest in self.guests.values())])
        return tuple(key() for key in keys if key is not None)

    def _guarded(self) -> tuple[Reason, str] | None:
        """Why one of the users allows no graph now, or None."""
        for options in (self.options, *self.guests.values()):
            found = options.guard() if options.guard is not None else None
            if found is not None:
                return found
        return None

    def _refuse(self, entry: Entry, refusal: CaptureAborted) -> None:
        """Remembers why this signature has no graph, and when to try again."""
        entry.release()
        if refusal.reason in (Reason.CAPTURE_GATE_BUSY, Reason.NESTED_REPLAY):
            entry.attempts += 1
            entry.block(refusal.reason, refusal.detail, entry.uses + 2 ** min(entry.attempts, 6))
        elif refusal.reason in _SHORT_OF_MEMORY:
            entry.attempts += 1
            entry.block(refusal.reason, refusal.detail, entry.uses + 32 * entry.attempts)
        elif refusal.reason in _SEEN_IN_A_PASS:
            entry.block_until_retry(refusal.reason, refusal.detail)
        else:
            entry.block(refusal.reason, refusal.detail)
        # counted where the eager call happens; told here because that may be the next call
        self.stats.tell(refusal.reason, refusal.detail)

    def note_capture(self, entry: Entry) -> None:
        """One line about a new graph."""
        assert entry.recording is not None
        log.info(
            "%s: captured %s: %s, %d segments, %d breaks, %.0f ms, %.1f MiB",
            self.stats.component, self.describe(entry.signature), entry.backend,
            entry.recording.segments, entry.recording.breaks, entry.capture_ms,
            entry.recording.nbytes / 2**20,
        )  # fmt: skip

    def _make_room(self, entry: Entry) -> bool:
        if not entry.is_held and not self.cache.make_room(entry):
            entry.block(Reason.MAX_GRAPHS, self._room_detail(), entry.uses + 1)
            return False
        return True

    def _keep_budget(self, entry: Entry) -> None:
        """The entry's new graph may stay. Raises `CaptureAborted` where it may not."""

        def evict_one() -> bool:
            return self.cache.evict_for(entry)

        component = self.options.component
        keep_budget(self.state, self.config, component, self.component_bytes, evict_one)

    def component_bytes(self) -> int:
        """What the graphs of this component hold, those of its other methods and modules too."""
        return sum(
            holder.graph_bytes()
            for holder in list(self.state.holders)
            if isinstance(holder, GraphHolding)
            and holder.config is self.config
            and holder.options.component == self.options.component
        )

    def graph_bytes(self) -> int:
        """What this runner's graphs added to the pool, and their input buffers."""
        return sum(entry.nbytes for entry in self.cache.held())

    def _room_detail(self) -> str:
        held = [e.recording.nbytes for e in self.cache.held() if e.recording is not None]
        per_graph = max(held, default=0)
        return f"max_graphs={self.config.max_graphs}; one more needs about {per_graph >> 20} MiB"

    def _settle_release(self, entry: Entry) -> None:
        self.state.settle()
        entry.release()

    def _evict(self, entry: Entry) -> None:
        log.info("%s: evicted %s", self.stats.component, self.describe(entry.signature))
        self._settle_release(entry)
        self.stats.evictions += 1

    def drop_graphs(self) -> int:
        """Closes every graph of this runner; signatures stay known. Returns how many."""
        with self.state.replay_lock:
            self.state.settle()
            return self.cache.release_all()

    def _invalidate(self) -> None:
        """No graph is true any longer."""
        self.drop_graphs()
        self.state.retire_if_unused()
        self.stats.invalidations += 1
        log.info("%s: weights changed; graphs dropped", self.stats.component)

    def close(self) -> None:
        """All graph memory of this runner is released; the last one also frees the pool."""
        self.drop_graphs()
        self.cache.entries.clear()
        self.state.holders.discard(self)
        self.state.retire_if_unused()

    def holds_graphs(self) -> bool:
        """Whether any graph is held."""
        return bool(self.cache.held())

    def report(self) -> dict[str, object]:
        """Counters and one record per held graph, JSON-serialisable."""
        return {
            **self.stats.as_dict(),
            "backend": self.backend,
            "device": str(self.state.device),
            "pool_bytes": self.state.pool_bytes(),
            "graphs": [self._record(entry) for entry in self.cache.held()],
        }

    def _record(self, entry: Entry) -> dict[str, object]:
        recording, inputs = entry.recording, entry.inputs
        assert recording is not None and inputs is not None
        sites = entry.observation.breaks if entry.observation is not None else ()
        return {
            "signature": self.describe(entry.signature),
            "backend": entry.backend,
            "state": entry.state.value,
            "segments": recording.segments,
            "breaks": recording.breaks,
            "break_sites": list(dict.fromkeys(str(recorded.site) for recorded in sites)),
            "break_reasons": list(dict.fromkeys(map(str, entry.plan.reads))),
            "captured_fraction": recording.captured_fraction,
            "nbytes": entry.nbytes,
            "capture_ms": entry.capture_ms,
            "replays": entry.replays,
            "eager_ms": entry.eager_ms,
            "replay_ms": entry.replay_ms,
            "verified": f"{sum(inputs.proven)}/{len(inputs.proven)} leaves",
        }

    def warming_up(self) -> AbstractContextManager[None]:
        """Inside, captures happen without admission (also under warmup_only)."""
        return self._capturer.warming_up()

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Inside, every call is eager."""
        self.disabled += 1
        try:
            yield
        finally:
            self.disabled -= 1

    def explain_misses(self) -> Iterator[str]:
        """For signatures without a graph: why, and how they differ from the nearest graph."""
        for entry in list(self.cache.entries.values()):
            if entry.is_held:
                continue
            blocked = entry.blocked
            why = f"{blocked[0]}: {blocked[1]}" if blocked is not None else entry.state.value
            yield f"  no graph for {self.describe(entry.signature)}: {why}".rstrip()
            nearest = self.cache.nearest(entry.signature)
            if nearest is not None:
                yield from (f"    {line}" for line in nearest.diff(entry.signature)[:6])

    def describe(self, signature: Signature) -> str:
        """A signature in the component's own words."""
        if self.options.describe is not None:
            return self.options.describe(signature)
        return signature.describe()
