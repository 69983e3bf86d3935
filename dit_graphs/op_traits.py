"""Owns what the schema says of an ATen op, and the finding of tensors among its arguments.

Must never know graphs or modes. The surprising fact: whether an op reads its inputs on the host is
in its tags, except for indexing with a mask, which looks like indexing with numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = [
    "Args",
    "Kwargs",
    "OpTraits",
    "fills_masks",
    "iter_tensors",
    "storage_key",
    "storage_parts",
    "tensors_of",
    "traits_of",
]

Args = tuple[object, ...]
Kwargs = dict[str, object]


@dataclass(frozen=True, slots=True)
class OpTraits:
    """What the schema says of one ATen op, computed once per op."""

    name: str
    is_view: bool
    is_plain: bool  # what it returns is new memory, whatever it writes
    writes: tuple[int | str, ...]
    writes_in_training: tuple[int, ...]  # without a word in the schema
    training: int | None
    reads_host: bool
    is_random: bool
    launches: bool  # it does device work: views and bare allocations do none
    is_collective: bool  # other processes must issue it too, as often and in the same order

    def written(self, args: Args, kwargs: Kwargs) -> Iterable[Tensor]:
        """The tensors this call writes in place."""
        if not (self.writes or self.writes_in_training):
            return ()
        places: list[object] = []
        for place in self.writes:
            if isinstance(place, str):
                places.append(kwargs.get(place))
            elif place < len(args):
                places.append(args[place])
        if self.writes_in_training and (self.training is None or args[self.training]):
            places.extend(args[place] for place in self.writes_in_training)
        return list(iter_tensors(places))


_HOST_READ_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_COLLECTIVES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "symm_mem"})
_NEVER_HOST_READ = ("aten::nonzero_static",)
_WITH_MASKS = ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_")  # without a tag
# They move the averages they are given; the schemas of older ops do not say so.
_MOVE_AVERAGES = frozenset(
    f"aten::{name}"
    for name in (
        "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts",
        "batch_norm_update_stats",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "native_batch_norm",
    )
)
_AVERAGES = ("running_mean", "running_var")
_ALLOCATIONS = frozenset(
    f"aten::{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    )
)
_ORDINARY = (Tensor, nn.Parameter, nn.Buffer)
_traits: dict[object, OpTraits] = {}


def traits_of(func: torch._ops.OpOverload) -> OpTraits:
    """The cached traits of an op."""
    found = _traits.get(func)
    if found is None:
        _traits[func] = found = _read_traits(func)
    return found


def _read_traits(func: torch._ops.OpOverload) -> OpTraits:
    schema = func._schema
    writes: list[int | str] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.append(argument.name if argument.kwarg_only else position)
    names = [argument.name for argument in schema.arguments]
    moved = _AVERAGES if schema.name in _MOVE_AVERAGES else ()
    aliased = any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))
    is_view = aliased and not writes
    reads = schema.name in _WITH_MASKS or any(tag in func.tags for tag in _HOST_READ_TAGS)
    return OpTraits(
        name=schema.name,
        is_view=is_view,
        is_plain=bool(schema.returns) and all(r.alias_info is None for r in schema.returns),
        writes=tuple(writes),
        writes_in_training=tuple(map(names.index, moved)),
        training=names.index("training") if "training" in names else None,
        reads_host=reads and schema.name not in _NEVER_HOST_READ,
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        launches=not (is_view or schema.name in _ALLOCATIONS),
        is_collective=schema.name.partition("::")[0] in _COLLECTIVES,
    )


def fills_masks(value: Tensor) -> bool:
    """Whether torch writes this value under a mask as a fill, without asking where the mask is."""
    return value.numel() == 1 and value.device.type == "cpu"


def tensors_of(args: Args, kwargs: Kwargs) -> list[Tensor]:
    """The tensors among an op's arguments, in order."""
    found: list[Tensor] = []
    for value in args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(iter_tensors(value))
    if kwargs:
        found.extend(iter_tensors(kwargs.values()))
    return found


def iter_tensors(values: Iterable[object]) -> Iterable[Tensor]:
    """Tensors among op arguments: direct, or in lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from iter_tensors(value)


def storage_key(tensor: Tensor) -> int:
    """The address of a tensor's storage; 0 for an empty one, and where there are several."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # sparse
        return 0


def storage_parts(tensor: Tensor) -> Sequence[Tensor]:
    """The tensors that own its memory: itself, or what a subclass (a quantised weight) wraps."""
    flatten = None if type(tensor) in _ORDINARY else getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return (tensor,)
    return [part for name in flatten()[0] for part in storage_parts(getattr(tensor, name))]
