"""Owns the graphs one runner holds: room for new ones, eviction, release, and what they report.

Must never know how a call is served. The surprising fact: closing the last graph of a device also
gives up the shared pool, so that `restore` returns the memory and not only the right to reuse it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import cast

import torch
from torch import nn

from .ambient import ambient_state
from .backends import Recording
from .budget import keep_budget
from .buffers import span_bytes
from .cache import Entry, GraphCache, State
from .calls import Eager, RunnerOptions, resolve_backend
from .capture import Capturer
from .config import GraphConfig
from .counters import RunnerStats, counted, log
from .errors import CaptureAborted, Reason
from .forward import Forward, prepared
from .intercept import Intercept
from .memory import DeviceState, device_state
from .module_state import Exchange
from .module_watch import ModuleWatch
from .pauses import Pauses
from .reliance import Habits
from .request_scope import current_request
from .signature import CallForm, Signature
from .tree import tensor_leaves, typed
from .watch import load_modes
from .worth import MOSTLY_EAGER, expected_speedup

__all__ = ["GraphHolding"]

_SEEN_IN_A_PASS = (
    Reason.HOST_READ,
    Reason.HOST_COPY,
    Reason.CONSTANT_CHANGED,
    Reason.STATE_ESCAPED,
    Reason.PYTHON_STATE,  # another thread may have drawn a random number meanwhile
    Reason.UNSUPPORTED_ARGUMENT,  # state of the module, this once
)
_SOON_OVER = (Reason.CAPTURE_GATE_BUSY, Reason.NESTED_REPLAY, Reason.STATE_CHANGED)
_SHOWN_LINES = 6
_SHORT_OF_MEMORY = (Reason.LOW_MEMORY, Reason.OUT_OF_MEMORY, Reason.MEMORY_BUDGET)


class GraphHolding:
    """The part of a runner that keeps graphs; `GraphRunner` adds the calls."""

    module: nn.Module
    config: GraphConfig
    options: RunnerOptions
    device: torch.device
    stats: RunnerStats
    cache: GraphCache
    state: DeviceState
    backend: str
    disabled: int
    eager: Eager
    guests: dict[object, RunnerOptions]
    intercept: Intercept | None
    _form: CallForm
    _form_source: Eager
    _watch: ModuleWatch
    _pauses: Pauses
    _habits: Habits
    _capturer: Capturer

    def _settle_on(self, device: torch.device) -> None:
        """Serve a module that lies on `device` from now on."""
        self.device = device
        self.state = device_state(device)
        self.state.holders.add(self)
        self.backend = resolve_backend(self.config.backend_for(self.options.component), device)
        if self.backend not in ("off", "none"):
            load_modes()
        eager = prepared(self.call_eager, self.options.family)
        forward = Forward(self.module, eager, device, frozenset(self.options.ignore))
        self._capturer = Capturer(forward, self.state, self.config, self.backend)

    def mark_changed(self) -> None:
        """A mutator ran (LoRA, processors, `.to`): the next call checks the module again.

        Where it moved the weights, graphs go at once: they keep the old ones alive. From inside a
        call that is left to the next one.
        """
        self._watch.forget()
        self._pauses.clear()
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
        facts = self.options.family.facts() if self.options.family is not None else None
        return self._watch.state_id, self._own_key(), facts

    def _open_family(self) -> None:
        if self.options.family is not None:
            self.options.family.open()

    def _padded(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """The call as `options.padding` has it."""
        if self.options.padding is None:
            return args, kwargs
        positional, named = self._form.normalise(args, kwargs)
        if positional:
            return args, kwargs
        return (), self.options.padding.pad(named, self.call_eager)

    def _prepared(self, named: dict[str, object]) -> dict[str, object]:
        """The arguments a graph is recorded over."""
        return named if self.options.family is None else self.options.family.prepare(named)

    def call_eager(self, *args: object, **kwargs: object) -> object:
        """The wrapped method itself, as it was before wrapping."""
        return self.eager(*args, **kwargs)

    def _own_key(self) -> Hashable:
        """What the users of this runner add to the key."""
        users = self.options, *self.guests.values()  # in one step: other threads attach and detach
        keys = dict.fromkeys(options.key for options in users)
        return tuple(typed(key()) for key in keys if key is not None)

    def _guarded(self) -> tuple[Reason, str] | None:
        """Why one of the users allows no graph now, or None."""
        for options in (self.options, *self.guests.values()):
            found = options.guard() if options.guard is not None else None
            if found is not None:
                return found
        return None

    def _rekey(self, entry: Entry, now: Signature) -> None:
        """The call that just ran is known under `now`, in its request's count, too."""
        request, before = current_request(), entry.signature
        self.cache.rekey(entry, now)
        if request is not None:
            request.recount(before, now)

    def _adopt(self, entry: Entry) -> tuple[Reason, str] | None:
        """What an eager pass of `entry` set itself is noted; the state that it left is its key."""
        doubt = partial(self._doubt_graphs, entry=entry)
        moved = self._watch.adopt_changes(lambda: self.cache.knows_alike(entry), doubt)
        watch, reliance, call = self._watch, entry.reliance, entry.signature.call
        self._habits.note(call, watch.changed, watch.exchange, reliance.doubted)
        reliance.left = watch.restless()
        now = entry.signature.under(ambient_state(self.device), self._extra())
        if now != entry.signature:
            self._watch.expect_changes()
            self._rekey(entry, now)
        return moved

    def _doubt_graphs(self, exchange: Exchange, entry: Entry | None = None) -> None:
        """Graphs that may read what a pass (of `entry`) exchanged are compared once more.

        Not where their calls make that anew by themselves. Those that write to what is gone go.
        """
        lost = exchange.lost
        for other in self.cache.held() if exchange.moved else ():
            if other.writes_to(lost):
                self._settle_release(other)
                self.stats.invalidations += 1
            elif other is not entry and (strange := exchange.moved - self._remade(other)):
                read = {lost[key] for key in other.reads(lost)}
                other.state = State.CAPTURED
                other.reliance.exchanges += 1
                other.reliance.doubted |= read & strange

    def _remade(self, entry: Entry) -> frozenset[str]:
        return self._habits.remade(entry.signature.call)

    def _refuse(self, entry: Entry, refusal: CaptureAborted) -> CaptureAborted:
        """Remembers why this signature has no graph, and when to try again.

        Returns the refusal as it is told: short of memory, with what graphs hold of it.
        """
        self._settle_release(entry)
        if refusal.reason in _SHORT_OF_MEMORY:
            held = f"graphs hold {self.state.pool_bytes() >> 20} MiB"
            refusal = CaptureAborted(refusal.reason, f"{refusal.detail}; {held}".lstrip("; "))
        if refusal.reason in (*_SOON_OVER, *_SHORT_OF_MEMORY):
            entry.attempts += 1
            is_soon = refusal.reason in _SOON_OVER
            wait = 2 ** min(entry.attempts, 6) if is_soon else 32 * entry.attempts
            entry.block(refusal.reason, refusal.detail, entry.uses + wait)
        elif refusal.reason in _SEEN_IN_A_PASS:
            entry.block_until_retry(refusal.reason, refusal.detail)
            self._habits.judge(entry.signature.call, is_proven=False)
        else:
            entry.block(refusal.reason, refusal.detail)
        # counted where the eager call happens; told here because that may be the next call
        differs = self._difference(refusal.reason, entry.signature)
        self.stats.tell(refusal.reason, refusal.detail, differs)
        return refusal

    def _difference(self, reason: Reason, signature: Signature) -> list[str]:
        """What tells the call from the nearest graph's, where that is about to be told."""
        return self._from_nearest(signature) if self.stats.is_news(reason) else []

    def _from_nearest(self, signature: Signature) -> list[str]:
        nearest = self.cache.nearest(signature)
        return [] if nearest is None else nearest.diff(signature)[:_SHOWN_LINES]

    def note_capture(self, entry: Entry, recording: Recording[object]) -> None:
        """One line about a new graph."""
        share = f", mostly eager: {recording.captured_fraction:.0%} captured"
        log.info(
            "%s: captured %s: %s, %s, %s, %.0f ms, %.1f MiB%s",
            self.stats.component, self.describe(entry.signature), entry.backend,
            counted(recording.segments, "segment"), counted(recording.breaks, "break"),
            entry.capture_ms, recording.nbytes / 2**20,
            share if recording.captured_fraction < MOSTLY_EAGER else "",
        )  # fmt: skip

    def _keep_if_worth_it(self, entry: Entry) -> None:
        """A graph that was equal stays, unless it saves nothing; the first one is spoken of."""
        worth = entry.worth(self.device)
        if self._capturer.is_worthless(entry):
            detail = f"{worth}, not kept"
            self._settle_release(entry)
            entry.block(Reason.COMPUTE_BOUND, detail)
            self.stats.tell(Reason.COMPUTE_BOUND, detail)
        elif worth is not None and not self.stats.has_estimate:
            self.stats.has_estimate = True
            log.info("%s: %s", self.stats.component, worth)

    def _make_room(self, entry: Entry) -> bool:
        if not entry.is_held and not self.cache.make_room(entry):
            entry.block(Reason.MAX_GRAPHS, self._room_detail(), entry.uses + 1)
            return False
        return True

    def _keep_budget(self, entry: Entry) -> None:
        """The entry's new graph may stay. Raises `CaptureAborted` where it may not."""
        evict_one, component = partial(self.cache.evict_for, entry), self.options.component
        keep_budget(self.state, self.config, component, self.component_bytes, evict_one)

    def component_bytes(self) -> int:
        """What the graphs of this component hold, those of its other methods and modules too."""
        return sum(
            holder.graph_bytes()
            for holder in self.state.holders
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
        self.state.after_replay(entry.release)

    def _evict(self, entry: Entry) -> None:
        log.info("%s: evicted %s", self.stats.component, self.describe(entry.signature))
        self._settle_release(entry)
        self.stats.evictions += 1

    def drop_graphs(self) -> int:
        """Closes every graph of this runner; signatures stay known. Returns how many."""
        with self.state.replay_lock:  # no capture adds one meanwhile
            held = self.cache.held()
            self.state.after_replay(partial(_release_all, held))
            return len(held)

    def _invalidate(self) -> None:
        """No graph is true any longer."""
        self.drop_graphs()
        self.state.retire_if_unused()
        self.stats.invalidations += 1
        log.info("%s: weights changed; graphs dropped", self.stats.component)

    def close(self) -> None:
        """All graph memory of this runner is released; the last one also frees the pool."""
        self._leave_device()
        self.cache.entries.clear()
        self._pauses.clear()
        if self.options.family is not None:
            self.options.family.close()

    def _leave_device(self) -> None:
        """No graph of this runner is left on its device."""
        self.drop_graphs()
        self.state.holders.discard(self)
        self.state.retire_if_unused()

    def holds_graphs(self) -> bool:
        """Whether any graph is held."""
        return bool(self.cache.held())

    def report(self) -> dict[str, object]:
        """Counters and one record per held graph, JSON-serialisable.

        `output_bytes`: the largest graph's outputs. They lie in the pool, and a replay overwrites
        those of the one before, so that all signatures share that memory.
        """
        graphs = [record for entry in self.cache.held() for record in self._records(entry)]
        return {
            **self.stats.as_dict(),
            "backend": self.backend,
            "device": str(self.state.device),
            "pool_bytes": self.state.pool_bytes(),
            "padding": self.options.padding.report() if self.options.padding else [],
            "expected_speedup": expected_speedup(
                (worth, entry.uses)
                for entry in self.cache.held()
                if (worth := entry.worth(self.device)) is not None
            ),
            "output_bytes": max((cast(int, graph["output_bytes"]) for graph in graphs), default=0),
            "graphs": graphs,
        }

    def _records(self, entry: Entry) -> Iterator[dict[str, object]]:
        recording, inputs = entry.recording, entry.inputs
        if recording is None or inputs is None:
            return  # another thread let it go just now
        worth = entry.worth(self.device)
        sites = entry.observation.breaks if entry.observation is not None else ()
        yield {
            "signature": self.describe(entry.signature),
            "backend": entry.backend,
            "state": entry.state.value,
            "segments": recording.segments,
            "breaks": recording.breaks,
            "break_sites": list(dict.fromkeys(str(recorded.site) for recorded in sites)),
            "break_reasons": list(dict.fromkeys(map(str, entry.plan.reads))),
            "captured_fraction": recording.captured_fraction,
            "mostly_eager": recording.captured_fraction < MOSTLY_EAGER,
            "nbytes": entry.nbytes,
            "output_bytes": sum(map(span_bytes, tensor_leaves(recording.output))),
            "capture_ms": entry.capture_ms,
            "replays": entry.replays,
            "eager_ms": entry.eager_ms,
            "replay_ms": entry.replay_ms,
            "expected_speedup": worth.speedup if worth is not None else None,
            "verified": f"{sum(inputs.proven)}/{len(inputs.proven)} leaves",
        }

    def warming_up(self) -> AbstractContextManager[None]:
        """Inside, captures happen without admission (also under warmup_only)."""
        self._pauses.clear()
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
            why = entry.state.without_graph
            if blocked is not None:
                why = f"{blocked[0]}: {blocked[1]}" if blocked[1] else str(blocked[0])
            yield f"  no graph for {self.describe(entry.signature)}: {why}"
            yield from (f"    {line}" for line in self._from_nearest(entry.signature))

    def describe(self, signature: Signature) -> str:
        """A signature in the component's own words."""
        if self.options.describe is not None:
            return self.options.describe(signature)
        return signature.describe()


def _release_all(held: list[Entry]) -> None:
    for entry in held:
        entry.release()
