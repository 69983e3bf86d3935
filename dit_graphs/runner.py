"""Owns one wrapped method: sign, look up, bind, replay, hand out. The front door; read it first.

Must never know CUDA or a model. The surprising fact: the first calls of a signature teach, and
their eager results are returned: one plain, one observed and captured, one compared. From then on
calls replay, and a call whose unproven input changes for the first time is compared again.
"""

from __future__ import annotations

import threading
from functools import partial

import torch
from torch import Tensor, nn

from .aliasing import SHARED_WRITE, lies_in
from .ambient import ambient_state, foreign_mode
from .cache import Entry, GraphCache, State
from .calls import (
    Call,
    Eager,
    RunnerOptions,
    check_tensors,
    device_of,
    signature_source,
)
from .config import GraphConfig
from .counters import RunnerStats
from .errors import BreakFailed, CaptureAborted, FallbackError, Reason
from .learning import Learning
from .module_watch import ModuleWatch
from .pauses import FOR_GOOD, Pauses
from .reliance import Habits
from .request_scope import Request, current_request
from .signature import CallForm, sign
from .taken import GIVEN_TWICE, holds_twice, repeatable, take
from .tree import UnknownLeaf
from .verify import Undo, Verdict, verify_call

__all__ = ["GraphRunner", "RunnerOptions"]


class GraphRunner(Learning):
    """Serves calls of `eager` (a method of `module`) from graphs where that is proven equal."""

    def __init__(
        self, module: nn.Module, eager: Eager, config: GraphConfig, options: RunnerOptions
    ) -> None:
        self.module = module
        self.eager = eager
        self.config = config
        self.options = options
        self.stats = RunnerStats(options.label or options.component)
        self.disabled = 0
        self.guests = {}
        self.intercept = None
        self.cache = GraphCache(config.max_graphs, self._evict)
        self._form_source = signature_source(module, eager)
        self._form = CallForm(self._form_source, options.ignore)
        self._watch = ModuleWatch(module)
        self._pauses = Pauses()
        self._habits = Habits()
        self._learning = threading.Lock()
        self._draws_from_generators = False  # until a pass does: most only hand them on
        self._open_family()
        self._settle_on(device_of(module))

    # The call, top to bottom.
    def __call__(self, *args: object, **kwargs: object) -> object:
        """The method's result: replayed, or eager with a counted reason."""
        reason = self._bypass()
        if reason is not None:
            return self._fall_back(reason, "", args, kwargs)
        gate = self.state.gate
        try:
            gate.enter_soon()
        except CaptureAborted as refusal:
            return self._fall_back(refusal.reason, refusal.detail, args, kwargs)
        try:
            return self._serve_given(args, kwargs)
        finally:
            gate.leave()

    def _serve_given(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        request = current_request()
        pause = self._pauses.find(request, args, kwargs, self._setting)
        if pause is not None:
            return self._pass_by(pause, args, kwargs)
        try:
            call, entry = self._look_up(request, args, kwargs)
        except CaptureAborted as refusal:
            if not self._watch.is_current(request):
                self._watch.forget()  # the module may lie elsewhere: the next call looks first
            return self._fall_back(refusal.reason, refusal.detail, args, kwargs)
        if call.request is not None:
            call.request.at_end(entry, entry.forget_bound)
            return self._serve(entry, call)
        try:
            return self._serve(entry, call)
        finally:
            entry.forget_bound()  # outside a request every call is its own

    def _bypass(self) -> Reason | None:
        if self.disabled or self.backend == "off":
            return Reason.DISABLED
        if self.config.is_switched_off():
            return Reason.KILL_SWITCH
        if self.backend == "none":
            here = device_of(self.module)
            if here == self.device:
                return self._reason_off_device()
            self._leave_device()
            self._settle_on(here)
        return foreign_mode(self.device)

    def _reason_off_device(self) -> Reason:
        found = self._guarded() if torch.cuda.is_available() else None
        # weights that come by a hook are away for the moment only
        return Reason.OFFLOAD if found and found[0] is Reason.OFFLOAD else Reason.NO_CUDA

    def _look_up(
        self, request: Request | None, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[Call, Entry]:
        """The call's entry, new or known. Raises `CaptureAborted` with the reason for eager."""
        number = request.number if request is not None else None
        # the glance first: what another thread's call adopts meanwhile shows in this one's look
        glance, given = self._watch.glance, (args, kwargs)
        must_look = self._check_module(request)
        if not must_look:
            glance = self._watch.glance
        args, kwargs = self._padded(args, kwargs)
        positional, named = self._form.normalise(args, kwargs)
        named = self._prepared(named)
        tensors: list[Tensor] = []
        try:
            keyed = self._form.keyed(named)
            arguments = (positional, keyed) if positional else keyed
            ambient, draws = ambient_state(self.device), self._draws_from_generators
            signature = sign(arguments, ambient, self._extra(), tensors, names_generators=draws)
        except UnknownLeaf as leaf:
            if leaf.kind == "size":
                raise CaptureAborted(Reason.SIGNATURE_TOO_LARGE) from None
            raise CaptureAborted(Reason.UNSUPPORTED_ARGUMENT, leaf.kind) from None
        entry = self.cache.find(signature, number)
        if entry is None:
            check_tensors(tensors, self.device)
            varying = self.cache.varying(signature)
            if varying is not None:
                raise CaptureAborted(Reason.VARYING_SCALAR, varying)
            entry = self.cache.add(signature, self.options.policy, number, self._own_key())
        if entry.taken and holds_twice(arguments):
            raise CaptureAborted(Reason.PYTHON_STATE, GIVEN_TWICE)
        if entry.private and lies_in(tensors, entry.private):
            raise CaptureAborted(Reason.UNSUPPORTED_ARGUMENT, SHARED_WRITE)
        if request is not None:
            request.count(entry.signature)
        normal = positional, named, arguments, tensors
        return Call(given, args, kwargs, *normal, request, draws, must_look, glance), entry

    def _serve(self, entry: Entry, call: Call) -> object:
        """An eager call that teaches nothing is right whatever the module is like: it looks at
        nothing. A replay that can be given up without a trace looks while the device works.
        """
        if entry.state is State.READY:
            looks_first = entry.has_effects or self._watch.tells_little
            if looks_first and self._is_outdated(call):
                return self._serve_anew(entry, call)
            return self._replay(entry, call)
        if entry.state is State.CAPTURED:
            return self._compare(entry, call)
        if entry.state is State.BLOCKED:
            if not self._watch.is_current(call.request) and self._is_outdated(call):
                return self._serve_anew(entry, call)  # what forbade a graph may be gone
            blocked, retry_after = entry.blocked, entry.retry_after
            still = retry_after - entry.uses if retry_after else FOR_GOOD
            if blocked is not None and still > 0:
                self._pause(entry, call, still - 1, blocked)
                return self._miss(entry, call, *blocked)
            if blocked is not None:  # else another thread has just taken it back
                entry.unblock()
        return self._learn(entry, call)

    # Serving from a graph.
    def _replay(self, entry: Entry, call: Call) -> object:
        undo, is_done, is_proven = None, False, self._is_proven(entry)
        try:
            with self.state.replaying():
                recording, inputs = entry.graph()
                is_proven = is_proven and not inputs.changed_unproven(call.tensors)
                if is_proven:
                    undo = self._undo_of(entry, call) if entry.has_effects else None
                    inputs.bind(call.tensors)
                    recording.replay()
                    result = entry.hand_out()
                    inputs.copy_back(call.tensors, inputs.rebind_always)
            is_done = True
        except BreakFailed as failure:
            if undo is not None:
                undo()
            return self._drop(entry, call, failure.reason, failure.detail)
        except CaptureAborted as refusal:  # inside a break of another replay, or let go meanwhile
            return self._miss(entry, call, refusal.reason, refusal.detail)
        except torch.OutOfMemoryError:
            if undo is not None:
                undo()
        if not is_done:  # not above, where the failed replay's frames are alive
            return self._out_of_memory(entry, call)
        if self._is_outdated(call):  # nothing of this replay was handed out
            return self._serve_anew(entry, call)
        if not is_proven:
            return self._compare(entry, call)
        if recording.breaks:
            self._watch.ran_eager = True  # the breaks' bodies may have filled caches
            if self.backend == "debug":
                self._watch.adopt_changes()
        take(entry.taken, (call.positional, call.named))
        entry.replays += 1
        self.stats.count_replay()
        return result

    def _undo_of(self, entry: Entry, call: Call) -> Undo:
        is_all_python = self.backend == "debug"  # and none of it is known as a break's
        module = self.module if is_all_python else None
        return Undo(self.state, entry, call.tensors, module)

    def _compare(self, entry: Entry, call: Call) -> object:
        if self._is_outdated(call):
            return self._serve_anew(entry, call)
        self.stats.compares += 1
        self._watch.before_pass()
        verdict: Verdict | None = None
        taken, restless = entry.taken, self._watch.restless()
        exchanges = entry.reliance.exchanges
        eager = repeatable(self.call_eager, call.args, call.kwargs, taken)
        try:
            may_repeat = partial(self._may_repeat, entry, restless)
            with self._noting_writes():
                start = self.state, entry, call.tensors
                verdict = verify_call(*start, eager, may_repeat, module=self.module)
        except BreakFailed as failure:
            return self._drop(entry, call, failure.reason, failure.detail)
        except CaptureAborted as refusal:
            return self._miss(entry, call, refusal.reason, refusal.detail)
        except torch.OutOfMemoryError:
            pass  # tried again below, where the failed pass's frames are gone
        if verdict is None:
            return self._out_of_memory(entry, call)
        take(taken, (call.positional, call.named))
        self._adopt(entry)
        verdict = self._weighed(verdict, entry, restless, exchanges)
        reason = Reason.WARMING_UP
        if verdict.reason is not None:
            reason = verdict.reason
            self._refuse(entry, CaptureAborted(reason, verdict.detail))
        elif entry.state is State.CAPTURED and entry.reliance.exchanges == exchanges:
            self._accept(entry, verdict)
        self.stats.count_eager(reason, verdict.detail, self._difference(reason, entry.signature))
        if self.config.strict and reason is not Reason.WARMING_UP:
            raise FallbackError(reason, verdict.detail)
        return verdict.result

    def _drop(self, entry: Entry, call: Call, reason: Reason, detail: str) -> object:
        """A break did something new: this replay never happened, the graph goes."""
        self._settle_release(entry)
        entry.drops += 1
        self.stats.invalidations += 1
        if entry.drops > 1:
            entry.block(reason, detail)
        return self._miss(entry, call, reason, detail)

    def _out_of_memory(self, entry: Entry, call: Call) -> object:
        held = self.state.pool_bytes()
        self.state.retire()
        detail = f"{held >> 20} MiB of graphs were released"
        entry.attempts += 1
        entry.block(Reason.OUT_OF_MEMORY, detail, entry.uses + 32 * entry.attempts)
        return self._miss(entry, call, Reason.OUT_OF_MEMORY, detail)
