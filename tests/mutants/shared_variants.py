"""Mistakes in what many calls share: requests, intercepts, the gate, budgets, scratch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from variant import CONTRACT, PIPELINES, variant

from dit_graphs import budget, effects, holding
from dit_graphs.cache import Entry
from dit_graphs.gate import CaptureGate
from dit_graphs.intercept import Intercept
from dit_graphs.module_watch import ModuleWatch
from dit_graphs.request_scope import Request


@variant(
    "a request outlives the call that opened it",
    f"{PIPELINES}/test_request_end.py::test_a_call_that_raises_ends_its_request",
)
def _outlives(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "reaches_here", lambda self: not self.is_over)


@variant(
    "a call that is only built on stays in force after restore",
    f"{PIPELINES}/test_sharing.py::test_what_somebody_built_on_is_a_mere_passage_after_restore",
)
def _in_force(patch: pytest.MonkeyPatch) -> None:
    drop = Intercept.drop

    def keeping(self: Intercept, user: object) -> bool:
        serve = self.serve
        done = drop(self, user)
        self.serve = serve
        return done

    patch.setattr(Intercept, "drop", keeping)


@variant(
    "restore of one pipeline ends the service of another",
    f"{PIPELINES}/test_sharing.py::test_restore_of_one_pipeline_leaves_the_other_served",
    f"{PIPELINES}/test_sharing.py::test_restore_leaves_what_wrap_put_there",
)
def _ends_all(patch: pytest.MonkeyPatch) -> None:
    drop = Intercept.drop

    def dropping(self: Intercept, user: object) -> bool:
        self.users[:] = [other for other in self.users if other is user]
        return drop(self, user)

    patch.setattr(Intercept, "drop", dropping)


@variant(
    "graphs of moved weights stay until the next call",
    f"{PIPELINES}/test_moves.py::test_weights_of_another_dtype_are_the_only_ones_kept",
)
def _stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModuleWatch, "has_moved", lambda self: False)


@variant(
    "graphs go while a call uses them",
    f"{PIPELINES}/test_moves.py::test_a_move_inside_a_call_waits_for_the_next_one",
)
def _under_a_call(patch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    patch.setattr(CaptureGate, "alone", lambda self: nullcontext(True))


@variant(
    "weights that the forward moved are not noticed",
    f"{PIPELINES}/test_moves.py::test_a_move_inside_a_call_waits_for_the_next_one",
)
def _moved_unseen(patch: pytest.MonkeyPatch) -> None:
    adopt = ModuleWatch.adopt_changes

    def forgetting(self: ModuleWatch, *given: Callable[[], bool]) -> object:
        before, checked = self._pending, list(self._checked)
        found = adopt(self, *given)
        self._pending, self._checked = before, checked
        return found

    patch.setattr(ModuleWatch, "adopt_changes", forgetting)


@variant(
    "a capture never gets its turn",
    f"{CONTRACT}/test_threads.py::test_the_gate_waits_after_several_refusals_and_not_for_ever",
)
def _never(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CaptureGate, "_waited", lambda self, me: False)


@variant(
    "a budget per component counts everybody's graphs",
    f"{CONTRACT}/test_memory.py::test_a_budget_per_component_counts_what_that_component_holds",
)
def _everybodys(patch: pytest.MonkeyPatch) -> None:
    def keep(state: object, config: object, component: str, own: object, evict: object) -> None:
        whole = lambda: state.pool_bytes()  # noqa: E731
        budget.keep_budget(state, config, component, whole, evict)

    patch.setattr(holding, "keep_budget", keep)


@variant(
    "scratch that is left full counts as emptied",
    f"{CONTRACT}/test_python_state.py::test_scratch_that_is_left_full_is_state",
)
def _left_full(patch: pytest.MonkeyPatch) -> None:
    is_other = effects._is_other

    def by_length(now: object, before: object, *depth: int) -> bool:
        if isinstance(now, list) and isinstance(before, list):
            return len(now) != len(before)
        return is_other(now, before, *depth)

    patch.setattr(effects, "_is_other", by_length)


@variant(
    "the CPU recorder claims a speed-up",
    f"{CONTRACT}/test_saying.py::test_a_recorder_on_the_cpu_claims_nothing",
)
def _claims(patch: pytest.MonkeyPatch) -> None:
    from dit_graphs.worth import Worth

    def worth(self: Entry, device: object) -> Worth:
        return Worth(self.eager_ms or 1.0, self.replay_ms or 1.0, self.nbytes)

    patch.setattr(Entry, "worth", worth)
