"""Owns how a signature gets its graph: a plain call, an observed pass, a capture, each in its turn.

Must never know how a graph serves. The surprising fact: most calls of new sizes teach nothing, and
that is known beforehand, so they are put off to the end of their request without being looked up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from .ambient import ambient_state, casting
from .backends.base import Recording
from .cache import Entry, State
from .calls import Call
from .checking import CheckedCalls
from .errors import BreakFailed, CaptureAborted, Reason
from .op_traits import storage_key
from .pauses import FOR_GOOD
from .restless import Restless, objects_among
from .taken import take
from .tree import tensor_leaves
from .verify import Verdict

__all__ = ["Learning"]

_LARGE_BYTES = 64 << 20
_OBSERVABLE = (
    Reason.CAPTURE_FAILED,
    Reason.CONSTANT_CHANGED,
    Reason.HOST_COPY,
    Reason.HOST_READ,
    Reason.STATE_ESCAPED,
)


class Learning(CheckedCalls):
    """The part of a runner that turns signatures into graphs; `GraphRunner` serves them."""

    _learning: threading.Lock
    _draws_from_generators: bool

    def _learn(self, entry: Entry, call: Call) -> object:
        if self.config.capture == "warmup_only" and not self._capturer.is_warming_up:
            self._pause(entry, call, FOR_GOOD, (Reason.WARMUP_ONLY, ""))
            self._watch.doubt()
            return self._miss(entry, call, Reason.WARMUP_ONLY)
        if self.state.is_replaying_here():  # whoever is only called there never replays
            return self._plain(entry, call, Reason.NESTED_REPLAY)
        if self._is_put_off(entry, call):
            result = self._plain(entry, call, Reason.NOT_ADMITTED)
            self._put_off(entry, call)
            return result
        is_start = self._starts_plain(entry)
        is_quiet = is_start and self._is_quiet(call)
        if not is_quiet and self._is_outdated(call):
            return self._serve_anew(entry, call)
        if not self._learning.acquire(blocking=False):  # another thread is learning the module
            return self._plain(entry, call, is_quiet=is_quiet)
        try:
            if not is_start:
                return self._observe_and_capture(entry, call)
            result = self._plain(entry, call, is_quiet=is_quiet)
            may_capture = self._capturer.may_capture_now(entry, call.request)
            is_soon = may_capture and not self._has_turned(entry)
            if is_soon and call.is_whole(entry.signature) and not self._is_outdated(call):
                self._capture(entry, call)
            elif not is_soon:
                self._put_off(entry, call)
            return result
        finally:
            self._learning.release()

    def _is_quiet(self, call: Call) -> bool:
        """Whether a plain pass is not expected to change the module, so that nobody looks."""
        return self._watch.is_quiet and self._is_by_itself(call)

    def _is_by_itself(self, call: Call) -> bool:
        """Whether nothing but its arguments and the module decides what the call does."""
        return self.options.family is None

    def _put_off(self, entry: Entry, call: Call) -> None:
        """The calls to come in this request that will not be admitted either are not looked up."""
        if call.request is not None:
            calls = self._capturer.hopeless_calls(entry, call.request)
            self._pause(entry, call, calls, (Reason.NOT_ADMITTED, ""))

    def _pause(self, entry: Entry, call: Call, calls: int, why: tuple[Reason, str]) -> None:
        if calls < 1 or call.request is None or self.options.padding:
            return
        is_told = self._is_by_itself(call) and call.is_whole(entry.signature)
        if is_told and not self._must_watch(entry) and not self.cache.serves_alike(entry):
            self._pauses.add(call.request, call.given, entry, why, calls, self._setting())

    def _setting(self) -> Hashable:
        """What tells calls apart that look alike, without a signature."""
        return casting(self.device), self._own_key()

    def _starts_plain(self, entry: Entry) -> bool:
        is_first = entry.state is State.COLD and self.config.capture != "first_use"
        return is_first and not self._capturer.is_warming_up

    def _is_put_off(self, entry: Entry, call: Call) -> bool:
        """Whether the call is to run eagerly without teaching anything: a graph is not due yet."""
        if self._starts_plain(entry):
            return False
        is_early = entry.uses < max(entry.plan.uses_before_observation, entry.rests_until)
        if is_early and not self._capturer.is_warming_up:
            return True
        return not self._capturer.admits(entry, call.request)

    def _plain(
        self,
        entry: Entry,
        call: Call,
        reason: Reason = Reason.WARMING_UP,
        *,
        is_quiet: bool = False,
    ) -> object:
        """The eager result, its time noted. A first one shows what the forward itself changes in
        the module, except where that is expected to be nothing (`is_quiet`).
        """
        is_telling = entry.state is State.COLD and not is_quiet
        if is_telling:
            self._watch.before_pass()
        clock, started = self.state.stopwatch(), time.perf_counter()
        result = (self._pass if is_telling else self._miss)(entry, call, reason)
        host_ms = (time.perf_counter() - started) * 1e3
        clock.stop()
        self._capturer.note_eager(entry, clock, host_ms)
        if entry.state is State.COLD:
            entry.state = State.SEEN
        if is_quiet:
            self._watch.doubt()
            call.must_look = True
        elif is_telling:
            moved = self._adopt(entry)
            if moved is not None:
                entry.block_until_retry(*moved)
        return result

    def _observe_and_capture(self, entry: Entry, call: Call) -> object:
        entry.state = State.SEEN
        if not self._make_room(entry):
            return self._miss(entry, call, Reason.MAX_GRAPHS, self._room_detail())
        self._watch.before_pass()
        refused, start = None, self._start_of(call)
        try:
            with self._noting_writes():
                result = self._capturer.observe(entry, call.positional, call.named, call.tensors)
        except CaptureAborted as refusal:
            refused = refusal.with_traceback(None)  # its frames hold what the pass computed
        if refused is not None:
            return self._run_refused(entry, call, refused)
        self.stats.count_eager(Reason.WARMING_UP)
        result = self._eagers_own(result, start, entry, call)
        self._learn_from_pass(entry, call)
        take(entry.taken, (call.positional, call.named))  # not before: a capture needs them whole
        return result

    def _has_turned(self, entry: Entry) -> bool:
        """Whether the call left the module in a state for which its signature is not the key.

        Then that state has an entry of its own already (`rekey` has not moved this one there).
        """
        signature = entry.signature
        return signature != signature.under(ambient_state(self.device), self._extra())

    def _learn_from_pass(self, entry: Entry, call: Call) -> None:
        """After an observed pass: a graph where it left nothing open."""
        moved = self._adopt(entry)
        if moved is not None:
            entry.block_until_retry(*moved)
        elif self._has_turned(entry):
            entry.release()  # no replay would turn what the key holds; the next pass is looked at
        elif self._watch.moved_weights:
            entry.release()  # a capture would leave them in a graph's memory, if it does so too
        elif entry.draws and not call.names_generators:
            self._draws_from_generators = True  # from now on each is an argument of its own
            entry.release()
        elif self._capturer.is_observed(entry):
            self._capture(entry, call)
            if self.config.capture == "first_use" and entry.state is State.CAPTURED:
                self._prove_by_perturbing(entry, call)

    def _run_refused(self, entry: Entry, call: Call, refusal: CaptureAborted) -> object:
        is_raised = refusal.reason is Reason.CAPTURE_FAILED
        if not is_raised:
            refusal = self._refuse(entry, refusal)
        # where eager raises too, it is the caller's error and no fault of this signature
        result = self._miss(entry, call, refusal.reason, refusal.detail)
        if is_raised:
            self._refuse(entry, refusal)
        return result

    def _capture(self, entry: Entry, call: Call) -> None:
        """The entry holds a graph afterwards, or is blocked with a reason."""
        if not self._make_room(entry):
            return
        was_observed, restless = entry.observation is not None, self._watch.restless()
        memory = self._watch.restless_storages(self.device)
        try:
            self._capturer.capture(entry, call.positional, call.named, call.tensors)
            self._keep_budget(entry)
            recording, inputs = entry.graph()  # still: other threads may let go of all graphs
            entry.reliance.captured_with = restless
            entry.reliance.touched = _touched(entry, recording, call.tensors, memory)
            if not recording.breaks:  # their bodies may touch whatever they like
                entry.reliance.untouched = frozenset(memory) - entry.reliance.touched
            self.cache.note_graph(entry)
        except CaptureAborted as refusal:
            if not was_observed and refusal.reason in _OBSERVABLE:
                entry.plan.is_simple = False  # this size is not like the others: observe it
                entry.release()
                return
            self._refuse(entry, refusal)
            return
        self.stats.captures += 1
        self.note_capture(entry, recording)
        if self.config.verify is False:
            inputs.prove(list(range(len(call.tensors))))
            entry.state = State.READY

    def _is_proven(self, entry: Entry) -> bool:
        """Whether its graph was compared with eager in a state of the module like this one, as far
        as that is wanted.
        """
        if self.config.verify is not True:
            return self.config.verify is False
        restless, reliance = self._watch.restless(), entry.reliance
        call = entry.signature.call
        if not reliance.is_known_with(restless, self._habits, call):
            return False
        # a pass of this call would change these, and a replay does not: may anybody miss it?
        others, habits = reliance.left_otherwise(restless), self._habits
        return not others or habits.changes_memories_alone(call) or habits.are_memories(others)

    def _weighed(
        self, verdict: Verdict, entry: Entry, restless: Restless, exchanges: int
    ) -> Verdict:
        """The verdict of a compare, against the graph also where its equal result proves nothing.

        That is so where the graph reads tensors that other passes have taken from the module, and
        eager used others, which held the same values. A different result is the graph's own fault
        only where no other pass changed what it may read. `restless`, `exchanges`: what was held,
        and how often others had exchanged something, when the compare began.
        """
        reliance = entry.reliance
        relied_on, reliance.doubted = reliance.doubted - self._remade(entry), frozenset()
        relied_on |= reliance.touches_elsewhere(restless) - self._watch.changed
        is_shaken, reliance.weighed = reliance.exchanges > reliance.weighed, exchanges
        if verdict.reason is None and not relied_on:
            if reliance.exchanges != exchanges:  # by another thread, meanwhile: compared once more
                return verdict
            unending = reliance.prove(restless) or self._compared_in_vain(entry)
            return verdict if unending is None else _changed_by_others(verdict, unending)
        is_other = verdict.reason in (Reason.VERIFY_MISMATCH, Reason.STATE_CHANGED)
        blamed = reliance.blamed(restless) if is_other else frozenset()
        if blamed:
            # but no objects: in the key each would be another one, whatever is in it
            self._watch.keep_in_key(blamed - objects_among(restless))
        elif not relied_on and not (is_other and is_shaken):
            return verdict
        names = ", ".join(name.lstrip(".") for name in sorted(blamed))
        return _changed_by_others(verdict, names or "memory of the module that it reads")

    def _compared_in_vain(self, entry: Entry) -> str | None:
        """What such calls change, where their graph is compared for that and never serves."""
        is_vain = entry.reliance.is_proven_in_vain(entry.replays, entry.attempts)
        if not is_vain or self.config.verify is not True:
            return None
        changed = sorted(name.lstrip(".") for name in self._habits.changed(entry.signature.call))
        return ", ".join(changed) or "memory of the module that it reads"

    def _may_repeat(self, entry: Entry, restless: Restless) -> bool:
        """Whether eager, which just ran, may run once more on the same: it left the module as it
        was, and a compare undoes what it wrote.
        """
        writes = entry.observation is not None and bool(entry.observation.written_externals)
        is_known = entry.reliance.is_as_captured(restless, writes=writes)
        return is_known and self._watch.is_as_adopted(restless)

    def _accept(self, entry: Entry, verdict: Verdict) -> None:
        """The graph was equal: it serves from now on, unless it saves nothing."""
        entry.state, entry.chances = State.READY, 0
        self._habits.judge(entry.signature.call, is_proven=True)
        entry.replay_ms, entry.eager_ms = verdict.replay_ms, verdict.eager_ms
        if entry.recording is not None and entry.recording.nbytes > _LARGE_BYTES:
            self.state.reclaim()  # eager's activations are not needed beside the graph's
        self._keep_if_worth_it(entry)

    def _prove_by_perturbing(self, entry: Entry, call: Call) -> None:
        """first_use: compares at once, on inputs the capture did not see."""
        if self.config.verify is False or self.options.family is not None:
            return  # a family's facts hold for the call's own values only: its next call compares
        try:
            with torch.inference_mode(False), torch.no_grad():
                verdict = self._capturer.compare_perturbed(entry, call.positional, call.named)
        except (BreakFailed, CaptureAborted) as failure:
            if failure.reason is Reason.OUT_OF_MEMORY:
                self._refuse(entry, CaptureAborted(failure.reason, failure.detail))
            return  # such values are no caller's: the next call's own are compared
        if verdict.reason is not None:
            self._refuse(entry, CaptureAborted(verdict.reason, verdict.detail))
        else:
            entry.reliance.prove(self._watch.restless())
            self._accept(entry, verdict)


def _changed_by_others(verdict: Verdict, names: str) -> Verdict:
    return replace(verdict, reason=Reason.STATE_CHANGED, detail=f"other calls change {names}")


def _touched(
    entry: Entry,
    recording: Recording[object],
    inputs: list[Tensor],
    memory: Mapping[str, frozenset[int]],
) -> frozenset[str]:
    """The attributes, of those in `memory`, whose tensors the graph reads, writes or hands out."""
    if not memory:
        return frozenset()
    outside = {storage_key(tensor) for tensor in (*inputs, *tensor_leaves(recording.output))}
    touched = outside | recording.reads()
    return frozenset(
        name
        for name, keys in memory.items()
        if not touched.isdisjoint(keys) or entry.writes_to(keys)
    )
