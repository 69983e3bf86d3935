"""Owns how a signature gets its graph: the observed pass, the capture.

Must never know how calls are served. The surprising fact: the first capture of a code path is
made twice where other graphs share its pool, once into a scratch pool that is thrown away, because
a failure there ruins only that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from .admission import Admission
from .aliasing import SHARED_WRITE, private_storages, shares_writes
from .backends import CapturePlan, Recording, make_backend, refusal_of
from .breaks import handling_breaks
from .buffers import clone_layout
from .cache import Entry, State
from .config import GraphConfig
from .constants import ConstantTable
from .effects import HostRandom, PythonState, storages_in
from .errors import CaptureAborted, GraphError, Reason
from .escapes import Escapes
from .forward import Forward
from .memory import DeviceState
from .observer import CaptureLog, Guard, HostRead, Observation, Observer, breaking_modules
from .op_traits import storage_key
from .static_inputs import StaticInputs
from .tree import UnknownLeaf, map_tensors
from .verify import Verdict, verify_call
from .watch import BreakPolicy

__all__ = ["Capturer"]

_NOTHING_SEEN = Observation(ConstantTable(), (), (), (), False, frozenset(), (), 0)
_MAX_PASSES = 4
_IN_A_POOL = ("full", "breakable")


class Capturer(Admission):
    """Observes and captures calls of one forward with one backend."""

    def __init__(
        self,
        forward: Forward,
        state: DeviceState,
        config: GraphConfig,
        backend: str,
    ) -> None:
        super().__init__(config, backend)
        self.forward = forward
        self.state = state

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
        started = time.perf_counter()
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
            self.note_pass((time.perf_counter() - started) * 1e3)
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
            written_inputs=tuple(inputs.buffers[i] for i in observation.written_inputs),
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
            is_risky = name in _IN_A_POOL and self.state.may_hold_graphs
            changed: list[str] = []
            recording: Recording[object] | None = None
            try:
                if is_risky and not entry.plan.has_captured:
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
            entry.tables = _tables(recording.reads(), python.tensors())
            entry.recording, entry.backend, entry.state = recording, name, State.CAPTURED
            entry.capture_ms = (time.perf_counter() - started) * 1e3
            self.state.may_hold_graphs = True
        # from here on other threads may let go of it with all other graphs
        self.note_capture(entry.capture_ms)
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
            with self.state.replay_lock:  # another thread may have bound its own and replay them
                changed = inputs.perturb()
                tensors = inputs.copies()
            call = self.forward.on(tensors, args, kwargs)

            def eager() -> object:
                with self.forward.conditions():
                    return call()

            module = self.forward.module
            verdict = verify_call(self.state, entry, tensors, eager, module=module)
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


def _tables(read: frozenset[int], held: list[Tensor]) -> tuple[Tensor, ...]:
    """What a module holds of that memory, its parameters aside, which no forward writes."""
    own = {storage_key(tensor): tensor for tensor in held if type(tensor) is not nn.Parameter}
    return tuple(tensor for key, tensor in own.items() if key in read)


def _own(output: object) -> object:
    """A copy for the caller; what cannot be rebuilt itself, for then no graph is made."""
    try:
        return map_tensors(output, clone_layout, keep_unknown=True)
    except UnknownLeaf:
        return output


def _outermost(paths: dict[str, None]) -> list[str]:
    """Paths that lie in no other path of the set: a break inside a break is plain Python."""
    return [p for p in paths if not any(p.startswith(f"{other}.") for other in paths)]
