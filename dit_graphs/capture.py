"""Owns how a signature gets its graph: admission, the observed pass, the capture.

Must never know how calls are served. The surprising fact: the first capture of a code path is
made twice, once into a scratch pool that is thrown away, because a failure there ruins only that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from .aliasing import SHARED_WRITE, private_storages, shares_writes
from .backends import CapturePlan, Recording, make_backend, refusal_of
from .breaks import handling_breaks
from .buffers import clone_layout
from .cache import Entry, State
from .config import GraphConfig
from .constants import ConstantTable
from .counters import RunnerStats
from .effects import HostRandom, PythonState, storages_in
from .errors import CaptureAborted, GraphError, Reason
from .escapes import Escapes
from .forward import Forward
from .memory import DeviceState, Stopwatch
from .observer import CaptureLog, Guard, HostRead, Observation, Observer, breaking_modules
from .request_scope import Request
from .static_inputs import StaticInputs
from .tree import UnknownLeaf, map_tensors
from .verify import Verdict, verify_call
from .watch import BreakPolicy

__all__ = ["Capturer"]

_NOTHING_SEEN = Observation(ConstantTable(), (), (), (), False, frozenset(), (), 0)
_MAX_PASSES = 4
_WORTH_KEEPING = 0.97  # a replay slower than this share of eager is not kept under "auto"
_LAUNCH_BOUND = 1.15  # device time within this share of host time: the device waits for Python
_SHARE_OF_LAUNCHES = 0.5  # of the time of such a call, until a replay was measured


class Capturer:
    """Observes and captures calls of one forward with one backend."""

    def __init__(
        self,
        forward: Forward,
        state: DeviceState,
        config: GraphConfig,
        backend: str,
        stats: RunnerStats,
        component: str,
    ) -> None:
        self.forward = forward
        self.state = state
        self.config = config
        self.backend = backend
        self.stats = stats
        self.component = component
        self.is_warming_up = False
        self._capture_ms: float | None = None

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Inside, every new signature is captured on its first call."""
        before, self.is_warming_up = self.is_warming_up, True
        try:
            yield
        finally:
            self.is_warming_up = before

    # Admission.
    def note_eager(self, entry: Entry, clock: Stopwatch, host_ms: float) -> None:
        """Remembers how long an eager call took; read later, without waiting."""
        entry.clock, entry.host_ms = clock, host_ms
        entry.lost_ms += self._saving_ms(entry)

    def _saving_ms(self, entry: Entry) -> float:
        """What one replay would save, from what is known without waiting."""
        if entry.clock is not None:
            elapsed = entry.clock.elapsed_ms()
            if elapsed is not None:
                entry.eager_ms, entry.clock = elapsed, None
        if entry.eager_ms is None:
            return 0.0
        if entry.replay_ms is not None:
            return max(entry.eager_ms - entry.replay_ms, 0.0)
        bound_by_device = entry.eager_ms > _LAUNCH_BOUND * max(entry.host_ms, 1e-6)
        return entry.eager_ms * (0.02 if bound_by_device else _SHARE_OF_LAUNCHES)

    def _hoped_ms(self, entry: Entry) -> float:
        """No replay would save more, whatever the device's time turns out to be."""
        known = self._saving_ms(entry)
        if entry.eager_ms is not None:
            return known
        return _SHARE_OF_LAUNCHES * _LAUNCH_BOUND * entry.host_ms

    def admits(self, entry: Entry, request: Request | None) -> bool:
        """Whether a capture now is expected to pay for itself (asked under "auto" only)."""
        if not self._is_choosy():
            return True
        left = request.steps_left(entry.signature) if request is not None else None
        if (left is None and entry.uses < 3) or not self._pays(entry, left, self._hoped_ms(entry)):
            return False
        if entry.clock is not None and entry.eager_ms is None:
            entry.eager_ms = entry.clock.elapsed_ms(wait=True)
        return self._pays(entry, left, self._saving_ms(entry))

    def _is_choosy(self) -> bool:
        is_asked = self.backend == "auto" and self.config.capture != "first_use"
        return is_asked and not self.is_warming_up

    def _pays(self, entry: Entry, left: int | None, saving: float) -> bool:
        ahead = max((left or 0) - 1, 0) * saving
        return max(ahead, entry.lost_ms) > self._expected_cost_ms(entry)

    def hopeless_calls(self, entry: Entry, request: Request) -> int:
        """How many calls of `request` after this one will not be admitted, whatever they bring."""
        left, hoped = request.steps_left(entry.signature), self._hoped_ms(entry)
        if not self._is_choosy() or left is None or self._pays(entry, left, hoped):
            return 0
        still = self._expected_cost_ms(entry) - entry.lost_ms
        return min(left, int(still / hoped)) if hoped > 0.0 else left

    def note_passed(self, entry: Entry) -> None:
        """A call was let pass; what that loses counts as in every eager call."""
        entry.uses += 1
        entry.lost_ms += self._saving_ms(entry)

    def _expected_cost_ms(self, entry: Entry) -> float:
        captures = self._capture_ms if self._capture_ms is not None else 3.0 * entry.host_ms
        return captures + (entry.eager_ms or entry.host_ms)

    def may_capture_now(self, entry: Entry, request: Request | None) -> bool:
        """Right after the plain first call: this code path needs no observed pass."""
        plan = entry.plan
        if not (plan.is_simple and plan.has_captured) or entry.state is not State.SEEN:
            return False
        if self.backend == "debug":  # nothing would tell that this call is not like the others
            return False
        left = request.steps_left(entry.signature) if request is not None else None
        return left is not None and left >= 3 and self.admits(entry, request)

    def is_worthless(self, entry: Entry) -> bool:
        """Under "auto": a graph that is no faster than eager is not kept."""
        if self.backend != "auto" or entry.eager_ms is None or entry.replay_ms is None:
            return False
        return entry.replay_ms > _WORTH_KEEPING * entry.eager_ms

    # The observed pass.
    def observe(
        self,
        entry: Entry,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        tensors: list[Tensor],
    ) -> object:
        """One eager pass on static buffers under the observer; returns its result.

        Raises `CaptureAborted` where no capture of this code path can work.
        """
        inputs = _bound_buffers(entry, tensors, self.state.device)
        random, host = self.state.random_state(), HostRandom()
        policy = entry.plan.policy
        observer = Observer(self.forward.module, self.state.device, policy, inputs.buffers)
        call = self.forward.on(inputs.buffers, args, kwargs)
        output, result = self._pass(observer, call, random, entry, tensors)
        entry.taken = call.taken
        observation = replace(observer.observation(), draws_on_host=bool(host.moved()))
        if observation.is_random:
            # ops that may draw are many (every SDPA); what did draw has moved a generator
            moved = zip(random, self.state.random_state(), strict=True)
            drew = not all(torch.equal(before, after) for before, after in moved)
            observation = replace(observation, is_random=drew)
        self._plan_breaks(entry, observation)
        inputs.copy_back(tensors, observation.written_inputs)
        refusal = observer.refusal(output)
        del output
        escaped = self._escaped(observer.escapes) if refusal is None else None
        if refusal is not None:
            entry.block(*refusal)
        elif escaped is not None:
            entry.note_escape(escaped)
        elif not observation.host_reads or self.backend == "debug":
            entry.inputs, entry.observation = inputs, observation
            # a plain call would leave a capture right after it containers that are no longer whole
            entry.plan.is_simple = observation.is_simple and not call.taken
        return result

    def _pass(
        self,
        observer: Observer,
        call: Callable[[], object],
        random: list[Tensor],
        entry: Entry,
        tensors: list[Tensor],
    ) -> tuple[object, object]:
        """Runs the call where plain eager would; after a failure no trace of it is left.

        Returns what it gave and a copy of that, of the caller's mode, for the caller.

        Not on the capture stream: a kernel on the legacy stream, which no op shows, would not wait
        for it, and this pass's result is the caller's.
        """
        python = PythonState(self.forward.module)
        try:
            with (
                self.forward.conditions(),
                breaking_modules(self.forward.module, entry.plan.policy.modules),
                handling_breaks(observer),
                observer,
            ):
                output = call()
            module, specs = self.forward.module, entry.signature.tensors
            if shares_writes(specs, tensors, observer.observation(), module):
                raise CaptureAborted(Reason.UNSUPPORTED_ARGUMENT, SHARED_WRITE)
            return output, _own(output)
        except Exception as error:
            self.state.set_random_state(random)
            observer.undo()
            python.restore()
            if isinstance(error, CaptureAborted):
                raise
            raise refusal_of(error) from error

    def _escaped(self, escapes: Escapes, recording: Recording[object] | None = None) -> str | None:
        """What the forward left with somebody else than its module and its recording, in words."""
        if not escapes.has_left():
            return None
        explained = PythonState(self.forward.module).storage_keys()
        if recording is not None:
            explained |= storages_in(recording.held())
        return escapes.left(explained)

    def is_observed(self, entry: Entry) -> bool:
        """Whether the last pass left nothing open, so that a capture may follow."""
        return entry.observation is not None

    def _plan_breaks(self, entry: Entry, observation: Observation) -> None:
        plan = entry.plan
        reads = observation.host_reads
        if not reads or self.backend == "debug":
            plan.passes = plan.stuck = 0
            return
        plan.passes += 1
        stuck = next((read for read in reads if self._is_stuck(read, plan.policy)), None)
        if stuck is None and plan.passes >= _MAX_PASSES:
            stuck = reads[0]
        if stuck is not None:
            plan.passes, plan.stuck = 0, plan.stuck + 1
            entry.block_until_retry(stuck.reason, str(stuck))
            return
        plan.reads += reads
        modules = dict.fromkeys((*plan.policy.modules, *(read.module for read in reads)))
        plan.policy = replace(plan.policy, modules=tuple(_outermost(modules)))

    def _is_stuck(self, read: HostRead, policy: BreakPolicy) -> bool:
        return not read.module or self.backend == "full" or read.module in policy.modules

    # The capture.
    def capture(
        self,
        entry: Entry,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        tensors: list[Tensor],
    ) -> None:
        """The entry holds a recording, not yet trusted. Raises `CaptureAborted`."""
        if entry.inputs is None:
            entry.inputs = _bound_buffers(entry, tensors, self.state.device)
        inputs = entry.inputs
        observation = entry.observation or _NOTHING_SEEN
        call = self.forward.on(inputs.buffers, args, kwargs)
        plan = CapturePlan(
            state=self.state,
            inputs=tuple(inputs.buffers),
            breaks=observation.breaks,
            generators=observation.generators,
            externals=observation.written_externals,
            break_launches=observation.break_launches,
        )
        name = self.backend
        if name == "auto":
            name = "breakable" if observation.breaks else "full"
        backend = make_backend(name)
        escapes = Escapes()

        def forward(log: CaptureLog | None) -> object:
            with self.forward.conditions():
                if log is None:
                    return call()
                policy = entry.plan.policy
                module, device = self.forward.module, self.state.device
                observed = entry.observation is not None
                constants = observation.constants
                guard = Guard(module, device, policy, constants, log, escapes, is_observed=observed)
                with breaking_modules(module, policy.modules), guard:
                    return call()

        started = time.perf_counter()
        # a recording made for a caller in inference mode is written for others outside it
        normal = torch.inference_mode(False)
        with self.state.gate.exclusive(), self.state.replay_lock, normal, torch.no_grad():
            self.state.check_can_capture()
            python = PythonState(self.forward.module)
            random = self.state.random_state()
            drawn = [(generator, generator.get_state()) for generator in observation.generators]
            changed: list[str] = []
            recording: Recording[object] | None = None
            try:
                if self.state.needs_trial and not entry.plan.has_captured and name != "debug":
                    backend.capture(forward, replace(plan, is_trial=True)).close()
                    self.state.reclaim()  # the scratch pool's memory serves the shared one
                    changed += python.restore()  # of every pass by itself: two undo a toggle
                if not changed:
                    recording = backend.capture(forward, plan)
            except CaptureAborted:
                raise
            except Exception as error:  # outside of a capture session, which heals its own
                raise refusal_of(error) from error
            finally:
                changed += python.restore()
                # host generators advance while capturing: the forward's Python runs once more
                self.state.set_random_state(random)
                for generator, before in drawn:
                    generator.set_state(before)
            if recording is None or changed:
                if recording is not None:
                    recording.close()
                raise CaptureAborted(Reason.PYTHON_STATE, f"sets {', '.join(changed[:3])}")
            escaped = self._escaped(escapes, recording)
            if escaped is not None:
                recording.close()
                raise CaptureAborted(Reason.STATE_ESCAPED, escaped)
            inputs.rebind_always, entry.taken = observation.written_inputs, call.taken
            entry.private = private_storages(observation, self.forward.module)
            entry.recording, entry.backend, entry.state = recording, name, State.CAPTURED
            entry.capture_ms = (time.perf_counter() - started) * 1e3
        # from here on other threads may let go of it with all other graphs
        self._capture_ms = entry.capture_ms
        entry.plan.has_captured = True
        if recording.breaks and observation.written_externals:
            entry.release()
            raise CaptureAborted(
                Reason.CAPTURE_FAILED, "writes to module state around an eager break"
            )

    def compare_perturbed(
        self, entry: Entry, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Verdict:
        """Compares on changed inputs; neither result is used and no trace stays.

        Raises `CaptureAborted` or `BreakFailed` where the forward cannot do with such values.
        """
        _, inputs = entry.graph()
        observed = entry.observation or _NOTHING_SEEN
        random = self.state.random_state()
        generators = [(generator, generator.get_state()) for generator in observed.generators]
        python = PythonState(self.forward.module)
        kept = [(tensor, tensor.clone()) for tensor in observed.written_externals]
        try:
            changed = inputs.perturb()
            tensors = inputs.copies()
            call = self.forward.on(tensors, args, kwargs)

            def eager() -> object:
                with self.forward.conditions():
                    return call()

            verdict = verify_call(self.state, entry, tensors, eager)
        except GraphError:
            raise
        except Exception as error:
            raise refusal_of(error) from error
        finally:
            self.state.set_random_state(random)
            python.restore()
            for generator, state in generators:
                generator.set_state(state)
            for tensor, before in kept:
                tensor.copy_(before)
            inputs.forget()
        if verdict.reason is None:
            inputs.prove(changed)
        return verdict


def _bound_buffers(entry: Entry, tensors: list[Tensor], device: torch.device) -> StaticInputs:
    """Buffers that hold the call's tensors. Raises `CaptureAborted` where memory is short."""
    try:
        inputs = StaticInputs(tensors, device, [spec.group for spec in entry.signature.tensors])
        inputs.bind(tensors)
    except Exception as error:
        raise refusal_of(error) from error
    return inputs


def _own(output: object) -> object:
    """A copy for the caller; what cannot be rebuilt itself, for then no graph is made."""
    try:
        return map_tensors(output, clone_layout, keep_unknown=True)
    except UnknownLeaf:
        return output


def _outermost(paths: dict[str, None]) -> list[str]:
    """Paths that lie in no other path of the set: a break inside a break is plain Python."""
    return [p for p in paths if not any(p.startswith(f"{other}.") for other in paths)]
