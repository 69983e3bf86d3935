"""Mistakes in capturing, replaying, comparing and handing out."""

from __future__ import annotations

import pytest
from torch import Tensor
from variant import CONTRACT, FOOTGUNS, variant

from dit_graphs import capture, verify
from dit_graphs.backends import base, debug, recorded
from dit_graphs.breaks import BoundBreak, BreakResult
from dit_graphs.buffers import copy_layout, poison
from dit_graphs.cache import Entry
from dit_graphs.constants import ConstantTable, Occurrences
from dit_graphs.effects import PythonState
from dit_graphs.errors import BreakFailed
from dit_graphs.escapes import Escapes
from dit_graphs.memory import HostState
from dit_graphs.runner import GraphRunner
from dit_graphs.static_inputs import StaticInputs
from dit_graphs.watch import storage_key, unwatched


@variant(
    "replay does nothing",
    f"{CONTRACT}/test_replay.py::test_changed_inputs_reach_every_replay",
    f"{CONTRACT}/test_policies.py::test_verify_false_trusts_the_capture",
)
def _idle(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recorded.RecordedRecording, "replay", lambda self: None)
    patch.setattr(debug.DebugRecording, "replay", lambda self: None)


@variant(
    "boundary buffer forgotten: a break's result is not copied in",
    f"{CONTRACT}/test_breaks.py::test_a_marked_function_runs_eagerly_between_two_segments",
)
def _no_copy_in(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BreakResult, "copy_into", lambda self, buffers, result: None)


@variant(
    "boundary buffer forgotten: the model receives the break's own tensor",
    f"{CONTRACT}/test_breaks.py::test_a_break_may_return",
)
def _own_tensor(patch: pytest.MonkeyPatch) -> None:
    whole = recorded._Session.run_break

    def run_break(self: object, site: object, fn: object, args: tuple, kwargs: dict) -> object:
        whole(self, site, fn, args, kwargs)
        with unwatched():
            return fn(*args, **kwargs)

    patch.setattr(recorded._Session, "run_break", run_break)


@variant(
    "changed input not bound again",
    f"{CONTRACT}/test_replay.py::test_a_tensor_seen_before_is_bound_again_after_another",
)
def _bound_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StaticInputs, "is_bound", lambda self, i, tensor: self._bound[i] is not None)


@variant(
    "changed input not bound again after a write in place",
    f"{CONTRACT}/test_replay.py::test_inputs_changed_in_place_reach_the_replay",
)
def _no_version(patch: pytest.MonkeyPatch) -> None:
    def is_bound(self: StaticInputs, index: int, tensor: Tensor) -> bool:
        bound = self._bound[index]
        return bound is not None and bound[0] is tensor

    patch.setattr(StaticInputs, "is_bound", is_bound)


@variant(
    "a tensor left with somebody is not looked for",
    f"{CONTRACT}/test_escapes.py::test_a_returned_tensor_that_is_also_kept_has_escaped",
)
def _nothing_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Escapes, "has_left", lambda self: False)


@variant(
    "what a forward takes out of its arguments stays there on a replay",
    f"{CONTRACT}/test_python_state.py::test_a_caller_whose_containers_are_popped_sees_it",
)
def _nothing_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("dit_graphs.runner.take", lambda taken, given: None)


@variant(
    "a compare runs eager again on arguments that were emptied",
    f"{CONTRACT}/test_python_state.py::"
    "test_a_popped_argument_of_a_graph_that_is_wrong_is_whole_for_eager",
)
def _emptied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "dit_graphs.runner.repeatable",
        lambda eager, args, kwargs, taken: lambda: eager(*args, **kwargs),
    )


@variant(
    "address taken for identity",
    f"{FOOTGUNS}/test_identity.py::test_an_address_is_not_an_identity",
)
def _by_address(patch: pytest.MonkeyPatch) -> None:
    bind = StaticInputs.bind

    def bind_by_address(self: StaticInputs, tensors: list[Tensor]) -> None:
        bind(self, tensors)
        self._bound = [(tensor.data_ptr(), tensor._version) for tensor in tensors]

    def is_bound(self: StaticInputs, index: int, tensor: Tensor) -> bool:
        return self._bound[index] == (tensor.data_ptr(), tensor._version)

    patch.setattr(StaticInputs, "bind", bind_by_address)
    patch.setattr(StaticInputs, "is_bound", is_bound)


@variant(
    "output not cloned",
    f"{CONTRACT}/test_replay.py::test_results_of_two_calls_do_not_share_memory",
)
def _not_cloned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Entry, "hand_out", lambda self: self.recording.output)


@variant(
    "verify always passes",
    f"{CONTRACT}/test_policies.py::test_a_wrong_graph_is_never_used",
)
def _blind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify, "results_equal", lambda left, right: None)


@variant(
    "verify trusts a leaf that never changed",
    f"{CONTRACT}/test_policies.py::test_a_leaf_that_changes_late_and_was_baked_is_found",
)
def _trusting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StaticInputs, "changed_unproven", lambda self, tensors: [])


@variant(
    "verify writes module state twice",
    f"{CONTRACT}/test_state.py::test_a_buffer_is_written_once_per_call",
)
def _written_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify.Undo, "__call__", lambda self: self._state.set_random_state(self._random))


@variant(
    "constant handed back by call order",
    f"{CONTRACT}/test_constants.py::test_a_cached_constant_makes_the_second_call_shorter",
)
def _by_order(patch: pytest.MonkeyPatch) -> None:
    place = Occurrences.next
    patch.setattr(Occurrences, "next", lambda self, location: place(self, "anywhere"))
    patch.setattr(ConstantTable, "recall", lambda self, key, source: self.entries[key].value)


@variant(
    "constant taken without a look at its bytes",
    f"{CONTRACT}/test_constants.py::test_a_constant_of_other_bytes_at_capture_gives_up",
)
def _by_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConstantTable, "recall", lambda self, key, source: self.entries[key].value)


@variant(
    "eviction frees what another graph reads",
    f"{CONTRACT}/test_eviction.py::test_the_graphs_that_stay_read_nothing_that_went",
)
def _shared_freed(patch: pytest.MonkeyPatch) -> None:
    evict = GraphRunner._evict

    def evict_all(self: GraphRunner, entry: Entry) -> None:
        weights = {storage_key(tensor) for tensor in self.module.parameters()}
        for key, tensor in entry.recording._session.externals.items():
            if key not in weights:
                poison(tensor)  # what its next owner would write there
        evict(self, entry)

    patch.setattr(GraphRunner, "_evict", evict_all)


@variant(
    "weak reference to a tensor outside the pool",
    f"{CONTRACT}/test_breaks.py::test_a_break_argument_outlives_the_module_that_forgot_it",
)
def _weak(patch: pytest.MonkeyPatch) -> None:
    bind = base.BreakLog.bind_break

    def borrow_all(
        self: base.BreakLog,
        recorded_break: object,
        fn: object,
        args: tuple,
        kwargs: dict,
        borrow: object,
        buffers: list[Tensor],
    ) -> object:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(type(self), "is_produced", lambda self, tensor: True)
            return bind(self, recorded_break, fn, args, kwargs, borrow, buffers)

    patch.setattr(base.BreakLog, "bind_break", borrow_all)


@variant("RNG not repaired", f"{CONTRACT}/test_random.py::test_rand_in_the_forward_is_eagers")
def _not_repaired(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostState, "set_random_state", lambda self, state: None)


@variant(
    "explicit generator not repaired",
    f"{CONTRACT}/test_random.py::test_b60_an_explicit_generator_goes_on_as_eagers",
)
def _generator_spent(patch: pytest.MonkeyPatch) -> None:
    undo = verify.Undo.__init__

    def without(self: verify.Undo, *args: object) -> None:
        undo(self, *args)
        self._generators = []

    patch.setattr(verify.Undo, "__init__", without)


@variant(
    "an input written in place is not copied back",
    f"{CONTRACT}/test_state.py::test_an_input_written_in_place_reaches_the_caller",
)
def _kept_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StaticInputs, "copy_back", lambda self, tensors, written: None)


@variant(
    "a result's layout is not kept",
    f"{CONTRACT}/test_replay.py::test_the_result_has_eagers_types_and_layout",
)
def _contiguous(patch: pytest.MonkeyPatch) -> None:
    for module in (capture, debug):
        patch.setattr(module, "clone_layout", lambda tensor: tensor.contiguous().clone())


@variant(
    "a break's exception is swallowed",
    f"{CONTRACT}/test_break_failures.py::test_the_exception_of_a_break_reaches_the_user",
)
def _swallowed(patch: pytest.MonkeyPatch) -> None:
    run = BoundBreak.run

    def quiet(self: BoundBreak) -> None:
        try:
            run(self)
        except BreakFailed:
            return

    patch.setattr(BoundBreak, "run", quiet)


@variant(
    "a break's new shape is squeezed into the old buffer",
    f"{CONTRACT}/test_break_failures.py::test_a_changed_break_runs_the_whole_call_eagerly",
)
def _squeezed(patch: pytest.MonkeyPatch) -> None:
    def copy_into(self: BreakResult, buffers: list[Tensor], result: object) -> None:
        found = result if isinstance(result, tuple) else (result,)
        tensors = [item for item in found if isinstance(item, Tensor)]
        for buffer, tensor in zip(buffers, tensors, strict=False):
            copy_layout(buffer[: tensor.shape[0]], tensor)

    patch.setattr(BreakResult, "copy_into", copy_into)


@variant(
    "a capture's Python effects stay",
    f"{CONTRACT}/test_python_state.py::test_a_python_counter_keeps_the_module_eager",
)
def _effects_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PythonState, "restore", lambda self: [])


@variant(
    "state written inside a break is not seen",
    f"{CONTRACT}/test_break_failures.py::test_a_break_that_writes_module_state_is_refused",
    f"{CONTRACT}/test_break_failures.py::test_a_break_that_writes_its_input_reaches_the_caller",
)
def _break_writes_unseen(patch: pytest.MonkeyPatch) -> None:
    from dit_graphs.observer import Observer

    note = Observer._note_write

    def outside_breaks(self: Observer, tensor: Tensor) -> None:
        if not self.in_break:
            note(self, tensor)

    patch.setattr(Observer, "_note_write", outside_breaks)
