"""Signatures: equal exactly where one graph may serve both calls. Found by generated calls."""

from __future__ import annotations

import copy
import math

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dit_graphs import register_leaf
from dit_graphs.signature import CallForm, Signature, sign
from dit_graphs.tree import UnknownLeaf, freeze, map_tensors, tensor_leaves

FAST = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([0.0, -0.0, 1.0, 0.5, math.inf, -math.inf]),
    st.sampled_from(["", "a", "b", "1"]),
    st.sampled_from([torch.float32, torch.bfloat16, slice(0, 1), slice(0, 2), b"a", 1j]),
)
_DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])


@st.composite
def _tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    tensor = torch.zeros(shape, dtype=draw(_DTYPES))
    if tensor.dim() == 2 and draw(st.booleans()):
        tensor = tensor.t().contiguous().t()
    if draw(st.booleans()):
        tensor = tensor[None].expand(draw(st.integers(1, 2)), *tensor.shape)
    return tensor


_TREES = st.recursive(
    st.one_of(_SCALARS, _tensors()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["x", "y", "z"]), inner, max_size=3),
    ),
    max_leaves=8,
)


def _sign(tree: object, ambient: object = None, extra: object = None) -> Signature:
    return sign(tree, ambient, extra, [])


def _exact(value: object) -> object:
    """What a call is, written down independently of the package: types, values, layouts."""
    if isinstance(value, Tensor):
        return ("tensor", tuple(value.shape), value.stride(), str(value.dtype))
    if isinstance(value, dict):
        return ("dict", [(k, _exact(v)) for k, v in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [_exact(v) for v in value])
    if isinstance(value, float):
        return ("float", value.hex())
    return (type(value).__name__, repr(value))


@FAST
@given(_TREES, _TREES)
def test_two_calls_have_one_signature_exactly_if_they_are_the_same(
    one: object, other: object
) -> None:
    assert (_sign(one) == _sign(other)) == (_exact(one) == _exact(other))


@FAST
@given(_TREES)
def test_a_copy_has_the_same_signature_and_hash(tree: object) -> None:
    again = copy.deepcopy(tree)
    assert _sign(tree) == _sign(again)
    assert hash(_sign(tree)) == hash(_sign(again))
    assert _sign(tree).diff(_sign(again)) == []


@FAST
@given(_TREES, _TREES)
def test_diff_is_empty_exactly_if_the_signatures_are_equal(one: object, other: object) -> None:
    mine, theirs = _sign(one), _sign(other)
    assert (mine.diff(theirs) == []) == (mine == theirs)
    assert (theirs.diff(mine) == []) == (mine == theirs)


@FAST
@given(_TREES, st.sampled_from([1, "a"]), st.sampled_from([2, "b"]))
def test_ambient_and_extra_are_parts_of_the_signature(
    tree: object, one: object, other: object
) -> None:
    assert _sign(tree, ambient=one) != _sign(tree, ambient=other)
    assert _sign(tree, extra=one) != _sign(tree, extra=other)
    assert _sign(tree, ambient=one).diff(_sign(tree, ambient=other))
    assert _sign(tree, extra=one).diff(_sign(tree, extra=other))


@FAST
@given(_TREES)
def test_a_signature_is_described_without_raising(tree: object) -> None:
    signature = _sign({"call": tree})
    assert isinstance(signature.describe(), str)
    for spec in signature.tensors:
        assert str(spec) in signature.describe()


def test_true_one_and_one_point_zero_are_three_signatures() -> None:
    assert len({_sign(value) for value in (True, 1, 1.0, "1", None)}) == 5
    assert len({_sign(value) for value in (False, 0, 0.0, -0.0, None, "")}) == 6
    assert len({_sign(value) for value in ([], (), {}, None)}) == 4


@FAST
@given(st.permutations(["x", "y", "z"]), st.permutations(["x", "y", "z"]))
def test_the_order_of_a_dict_is_part_of_it(one: list[str], other: list[str]) -> None:
    """A forward may iterate over it; keyword order of a call is another matter (below)."""
    values = {"x": 1, "y": torch.zeros(2), "z": None}
    mine, theirs = ({name: values[name] for name in order} for order in (one, other))
    assert (_sign(mine) == _sign(theirs)) == (one == other)


def _forward(x: object, y: object = None, *, scale: float = 1.0, mode: str = "a") -> None: ...


@FAST
@given(
    values=st.fixed_dictionaries(
        {"x": _SCALARS},
        optional={
            "y": _SCALARS,
            "scale": st.sampled_from([1.0, 2.0]),
            "mode": st.sampled_from("ab"),
        },
    ),
    order=st.randoms(use_true_random=False),
    positional=st.integers(0, 2),
)
def test_call_style_is_normalised_away(
    values: dict[str, object], order: object, positional: int
) -> None:
    form = CallForm(_forward)
    canonical = form.normalise((), values)
    names = [name for name in ("x", "y")[:positional] if name in values]
    args = tuple(values[name] for name in names)
    rest = [(name, value) for name, value in values.items() if name not in names]
    order.shuffle(rest)  # type: ignore[attr-defined]
    assert _exact(form.normalise(args, dict(rest))) == _exact(canonical)


@FAST
@given(
    st.fixed_dictionaries(
        {"x": _SCALARS},
        optional={"y": _SCALARS, "scale": st.sampled_from([1.0, 2.0, -0.0, 1]), "mode": _SCALARS},
    ),
    st.fixed_dictionaries(
        {"x": _SCALARS},
        optional={"y": _SCALARS, "scale": st.sampled_from([1.0, 2.0, 0.0, 1]), "mode": _SCALARS},
    ),
)
def test_normalised_calls_are_equal_exactly_if_the_forward_sees_the_same(
    one: dict[str, object], other: dict[str, object]
) -> None:
    form = CallForm(_forward)
    defaults: dict[str, object] = {"y": None, "scale": 1.0, "mode": "a"}
    same = _exact(_full(defaults, one)) == _exact(_full(defaults, other))
    mine, theirs = (_sign(form.normalise((), call)) for call in (one, other))
    assert (mine == theirs) == same


def _full(defaults: dict[str, object], call: dict[str, object]) -> dict[str, object]:
    merged = {**defaults, **call}
    return {name: merged[name] for name in ("x", "y", "scale", "mode")}


@FAST
@given(st.lists(st.integers(0, 3), min_size=2, max_size=5))
def test_leaves_that_are_one_tensor_are_told_from_equal_ones(which: list[int]) -> None:
    pool = [torch.zeros(4) for _ in range(4)]
    distinct = [torch.zeros(4) for _ in which]
    shared = _sign([pool[index] for index in which])
    assert (shared == _sign(distinct)) == (len(set(which)) == len(which))
    relabelled = [pool[3 - index] for index in which]
    assert shared == _sign(relabelled), "which tensors they are does not matter"


@FAST
@given(st.integers(0, 8), st.integers(0, 8), st.integers(1, 8), st.integers(1, 8))
def test_overlap_is_part_of_the_signature(a: int, b: int, n: int, m: int) -> None:
    base = torch.zeros(64)
    together = _sign([base[a : a + n], base[b : b + m]])
    apart = _sign([torch.zeros(64)[a : a + n], torch.zeros(64)[b : b + m]])
    touch = max(a, b) < min(a + n, b + m)
    assert (together != apart) == touch


@FAST
@given(st.integers(0, 15), st.integers(0, 15), st.integers(1, 40))
def test_alignment_counts_for_tensors_large_enough_for_a_matrix_kernel(
    one: int, other: int, size: int
) -> None:
    base = torch.zeros(128)
    assume(base.data_ptr() % 64 == 0)
    mine, theirs = _sign(base[one : one + size]), _sign(base[other : other + size])
    assert (mine == theirs) == (one == other or size < 16)


class _Leaf:
    def __init__(self, name: str, note: int) -> None:
        self.name = name
        self.note = note


@FAST
@given(st.sampled_from("ab"), st.sampled_from("ab"), st.integers(), st.integers())
def test_registered_leaves_enter_by_their_key_alone(
    one: str, other: str, note: int, another: int
) -> None:
    register_leaf(_Leaf, key=lambda leaf: leaf.name)
    mine, theirs = _sign([_Leaf(one, note)]), _sign([_Leaf(other, another)])
    assert (mine == theirs) == (one == other)


class _Stranger:
    pass


@FAST
@given(_TREES)
def test_a_stranger_anywhere_has_no_signature(tree: object) -> None:
    for hidden in ([tree, _Stranger()], {"x": (tree, [_Stranger()])}):
        try:
            _sign(hidden)
        except UnknownLeaf as leaf:
            assert "_Stranger" in leaf.kind
        else:
            raise AssertionError("an object without a key was signed")


@FAST
@given(_TREES)
def test_freeze_and_map_tensors_agree_on_the_order(tree: object) -> None:
    frozen: list[Tensor] = []
    freeze(tree, frozen)
    mapped: list[Tensor] = []
    rebuilt = map_tensors(tree, lambda tensor: mapped.append(tensor) or tensor)
    assert [id(t) for t in frozen] == [id(t) for t in mapped]
    assert [id(t) for t in tensor_leaves(tree)] == [id(t) for t in frozen]
    assert _exact(rebuilt) == _exact(tree)


@FAST
@given(_TREES)
def test_map_tensors_gives_containers_of_its_own(tree: object) -> None:
    assume(isinstance(tree, (list, dict)) and len(tree) > 0)
    rebuilt = map_tensors(tree, lambda tensor: tensor)
    assert rebuilt is not tree
    assert isinstance(rebuilt, (list, dict))
    rebuilt.clear()
    assert len(tree) > 0  # type: ignore[arg-type]


@FAST
@given(_TREES)
def test_numbers_and_the_signature_without_them_make_the_whole(tree: object) -> None:
    """`varying_scalar` splits a signature in two: nothing may be lost or counted twice."""

    def numbers(value: object) -> int:
        if isinstance(value, dict):
            return sum(map(numbers, value.values()))
        if isinstance(value, (list, tuple)):
            return sum(map(numbers, value))
        if isinstance(value, slice):
            return sum(map(numbers, (value.start, value.stop, value.step)))
        return int(isinstance(value, (int, float)) and not isinstance(value, bool))

    assert len(_sign(tree).numbers()) == numbers(tree)


def test_the_budget_of_leaves_is_kept() -> None:
    try:
        _sign([[None] * 100 for _ in range(50)])
    except UnknownLeaf as leaf:
        assert leaf.kind == "size"
    else:
        raise AssertionError("five thousand leaves were signed")
    assert _sign([None] * 4000)
