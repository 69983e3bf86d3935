"""Owns the proof: one call both ways, compared bit for bit, eager's result returned.

Must never know how graphs are captured. The surprising fact: running a call twice would also draw
random numbers and write buffers twice, so the replay's traces are undone before eager runs. The
bodies of breaks leave theirs in attributes, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .breaks import Reach
from .buffers import bits_equal, bits_of
from .cache import Entry
from .effects import HostRandom, PythonState
from .errors import Reason
from .memory import DeviceState
from .tree import UnknownLeaf, freeze

__all__ = ["MORE_RUNS", "Undo", "Verdict", "results_equal", "verify_call"]

MORE_RUNS = 6  # of eager, before a graph is blamed: some kernels repeat nine times out of ten


@dataclass(frozen=True, slots=True)
class Verdict:
    """Eager's result, and why the graph must not be used (None: it was equal)."""

    result: object
    reason: Reason | None
    detail: str
    replay_ms: float
    eager_ms: float


def results_equal(left: object, right: object) -> str | None:
    """None where two results hold the same structure, Python values and bits; else what differs."""
    mine: list[Tensor] = []
    theirs: list[Tensor] = []
    try:
        if freeze(left, mine) != freeze(right, theirs):
            return "the results have another structure"
    except UnknownLeaf as leaf:
        return f"a {leaf.kind} cannot be compared"
    for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        if one.shape != other.shape or one.stride() != other.stride():
            return f"output {index}: layout {tuple(one.shape)} against {tuple(other.shape)}"
        if not bits_equal(one, other):
            return f"output {index}: {_difference(one, other)}"
    return None


def _difference(one: Tensor, other: Tensor) -> str:
    # sync: a message about a failure
    wrong = (bits_of(one) != bits_of(other)).float().mean().item()
    return f"{wrong:.1%} of {one.numel()} elements differ"


class Undo:
    """What a forward changes outside its result, put back to where it was.

    Of attributes only bodies of breaks change any in a replay: put back are those that they were
    seen to reach, or all of `module`, where it is given.
    """

    def __init__(
        self,
        state: DeviceState,
        entry: Entry,
        tensors: list[Tensor],
        module: nn.Module | None = None,
    ) -> None:
        observation = entry.observation
        written = observation.written_externals if observation is not None else ()
        inputs = observation.written_inputs if observation is not None else frozenset()
        generators = observation.generators if observation is not None else ()
        self._state = state
        self._random = state.random_state()
        draws = observation is not None and observation.draws_on_host
        self._host = HostRandom() if draws else None
        self._externals = [(tensor, tensor.clone()) for tensor in written]
        self._inputs = [(tensors[index], tensors[index].clone()) for index in inputs]
        self._generators = [(generator, generator.get_state()) for generator in generators]
        self._reached: list[Reach | PythonState] = []
        if module is not None and entry.has_breaks:
            self._reached = [PythonState(module)]
        elif observation is not None:
            reached = (each.reach for each in observation.breaks)
            self._reached = [reach.again() for reach in reached if reach is not None]

    def has_drawn(self) -> bool:
        """Whether the default generators stand elsewhere now."""
        pairs = zip(self._random, self._state.random_state(), strict=True)
        return not all(torch.equal(before, now) for before, now in pairs)

    def __call__(self) -> None:
        self._state.set_random_state(self._random)
        if self._host is not None:
            self._host.restore()
        for generator, state in self._generators:
            generator.set_state(state)
        for tensor, before in (*self._externals, *self._inputs):
            tensor.copy_(before)
        for reached in reversed(self._reached):
            reached.restore()


def _always() -> bool:
    return True


def verify_call(
    state: DeviceState,
    entry: Entry,
    tensors: list[Tensor],
    eager: Callable[[], object],
    may_repeat: Callable[[], bool] = _always,
    *,
    module: nn.Module,
) -> Verdict:
    """Replays and runs eager on the same inputs; leaves that changed are proven when equal.

    `may_repeat`: whether eager may run once more, asked after it ran.

    Raises `BreakFailed` from the replay, with every trace of it undone, and `CaptureAborted` where
    there is no turn or no graph.
    """
    undo = Undo(state, entry, tensors, module)
    try:
        with state.replaying():
            recording, inputs = entry.graph()
            changed = inputs.changed_unproven(tensors)
            # bound but not compared yet: a compare that is interrupted must not count as one
            inputs.suspects.update(changed)
            inputs.bind(tensors)
            recording.poison()
            clock = state.stopwatch()
            recording.replay()
            clock.stop()
            replayed = entry.hand_out()
            entry.may_draw = undo.has_drawn()
    finally:
        undo()
    replay_ms = clock.elapsed_ms(wait=True) or 0.0
    clock = state.stopwatch()
    try:
        result = eager()
    except torch.OutOfMemoryError:
        undo()  # it is tried once more, without graphs
        raise
    clock.stop()
    eager_ms = clock.elapsed_ms(wait=True) or 0.0
    reason, detail = None, ""
    try:
        difference = results_equal(result, replayed)
        if difference is None:
            inputs.prove(changed)
        elif not may_repeat():
            reason, detail = Reason.STATE_CHANGED, "the forward exchanged what its module holds"
        else:
            again = _disagrees(eager, result, undo, Undo(state, entry, tensors))
            reason = Reason.VERIFY_MISMATCH if again is None else Reason.EAGER_NONDETERMINISTIC
            detail = difference if again is None else again
    except torch.OutOfMemoryError:  # the call itself is over: its result stands
        reason, detail = Reason.OUT_OF_MEMORY, "while a graph was compared"
    return Verdict(result, reason, detail, replay_ms, eager_ms)


def _disagrees(eager: Callable[[], object], result: object, undo: Undo, after: Undo) -> str | None:
    """How eager's further results differ from its first, if they do; no trace of them is left."""
    try:
        for _ in range(MORE_RUNS):
            undo()
            again = results_equal(result, eager())
            if again is not None:
                return again
        return None
    finally:
        after()
