"""Mistakes in what names a call: a key that leaves something out, state that is not looked at."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from variant import CONTRACT, FOOTGUNS, variant

from dit_graphs import cache, holding, runner, signature
from dit_graphs.module_watch import ModuleWatch


def _specs_with(patch: pytest.MonkeyPatch, **wrong: object) -> None:
    exact = signature._specs
    patch.setattr(
        signature, "_specs", lambda tensors: [spec._replace(**wrong) for spec in exact(tensors)]
    )


@variant("key without dtype", f"{CONTRACT}/test_inputs.py::test_dtype_makes_another_graph")
def _no_dtype(patch: pytest.MonkeyPatch) -> None:
    _specs_with(patch, dtype=torch.float32)


@variant("key without stride", f"{CONTRACT}/test_inputs.py::test_strides_make_another_graph")
def _no_stride(patch: pytest.MonkeyPatch) -> None:
    _specs_with(patch, stride=())


@variant(
    "generators without names where a pass draws",
    f"{CONTRACT}/test_random.py::test_another_generator_is_another_signature",
)
def _no_generators(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cache.Entry, "draws", False)


@variant(
    "key without alignment",
    f"{FOOTGUNS}/test_kernels.py::test_an_input_at_another_alignment_is_another_graph",
)
def _no_alignment(patch: pytest.MonkeyPatch) -> None:
    _specs_with(patch, skew=0)


@variant(
    "key without shared memory",
    f"{CONTRACT}/test_state.py::test_the_same_tensor_given_twice_stays_one_tensor",
)
def _no_groups(patch: pytest.MonkeyPatch) -> None:
    exact = signature._specs

    def specs(tensors: list[Tensor]) -> list[signature.TensorSpec]:
        return [spec._replace(group=i, overlaps=()) for i, spec in enumerate(exact(tensors))]

    patch.setattr(signature, "_specs", specs)


@variant(
    "key without Python leaves",
    f"{CONTRACT}/test_arguments.py::test_python_values_that_differ_get_graphs_of_their_own",
)
def _no_leaves(patch: pytest.MonkeyPatch) -> None:
    exact = signature.freeze

    def freeze(call: object, tensors: list[Tensor], *more: object, **named: object) -> object:
        return signature._mask(exact(call, tensors, *more, **named))

    patch.setattr(signature, "freeze", freeze)


@variant(
    "key without adapters and other module state",
    f"{FOOTGUNS}/test_lora.py::test_b20_each_strength_is_its_own_and_a_returning_one_is_known",
    f"{CONTRACT}/test_python_state.py::test_a_scale_turned_in_every_request_never_leaves_the_key",
)
def _no_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModuleWatch, "state_id", lambda self, number: 0)


@variant(
    "key without autocast",
    f"{CONTRACT}/test_inputs.py::test_autocast_is_part_of_the_key_and_its_cache_is_not_baked",
)
def _no_autocast(patch: pytest.MonkeyPatch) -> None:
    exact = runner.ambient_state
    for module in (runner, holding):
        patch.setattr(module, "ambient_state", lambda device: exact(device)[1:])


@variant(
    "moved weights are not noticed",
    f"{FOOTGUNS}/test_kernels.py::test_b14_weights_that_moved_or_changed_are_the_ones_used",
)
def _weights_unseen(patch: pytest.MonkeyPatch) -> None:
    refresh = ModuleWatch.refresh

    def unseeing(self: ModuleWatch, number: int | None, *_: object) -> None:
        refresh(self, number)

    patch.setattr(ModuleWatch, "refresh", unseeing)


@variant(
    "hooks are skipped",
    f"{CONTRACT}/test_wrapping.py::test_hooks_are_honoured",
)
def _hooks_skipped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("dit_graphs.module_watch._refusal", lambda state: None)


@variant(
    "attributes the user turns are taken for the forward's own",
    f"{CONTRACT}/test_python_state.py::test_a_scale_turned_in_every_request_never_leaves_the_key",
)
def _user_is_noise(patch: pytest.MonkeyPatch) -> None:
    refresh = ModuleWatch.refresh

    def counting(self: ModuleWatch, number: int | None, *drop: object) -> object:
        before = self._base
        change = refresh(self, number, *drop)
        if before is not None and self._base is not None:
            self._changes.update(self._base.changed_attributes(before))
            self._volatile |= {name for name, times in self._changes.items() if times >= 3}
        return change

    patch.setattr(ModuleWatch, "refresh", counting)
    patch.setattr(ModuleWatch, "restless", lambda self: ())  # nor is any graph compared for them
