"""A replay gives what eager gives on the same inputs, whatever they are, into tensors of its own.

Every call here goes through `Twin`: outputs are poisoned before it, inputs change on each, and the
result is compared bit for bit with an unwrapped copy of the module.
"""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.utils import BaseOutput
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput
from twin import Twin, Where, difference

import dit_graphs


class Mlp(nn.Module):
    """[B, 8] and [B] to [B, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 8)

    def forward(self, x: Tensor, t: Tensor, shift: Tensor | None = None) -> Tensor:
        hidden = torch.nn.functional.gelu(self.first(x)) * t[:, None]
        out = self.second(hidden)
        return out if shift is None else out + shift


def test_changed_inputs_reach_every_replay(where: Where) -> None:
    twin = Twin(Mlp(), where)
    for index in range(8):
        twin(where.randn(2, 8, seed=index), where.randn(2, seed=100 + index))
    # one plain, one observed, one compared, then replays (both leaves change at once)
    assert (twin.replays, twin.captures) == (5, 1)
    assert twin.fallbacks == {"warming_up": 3}


def test_inputs_changed_in_place_reach_the_replay(where: Where) -> None:
    twin = Twin(Mlp(), where)
    x, t = where.randn(2, 8), where.randn(2)
    with dit_graphs.request():
        for index in range(8):
            x.add_(0.25 * index)
            twin(x, t)
    assert twin.replays == 5


def test_one_leaf_that_changes_late_is_compared_before_it_is_trusted(where: Where) -> None:
    twin = Twin(Mlp(), where)
    t = where.randn(2)
    with dit_graphs.request():
        for index in range(6):
            twin(where.randn(2, 8, seed=index), t)
    assert twin.replays == 3
    report = twin.runner.report()["graphs"]
    assert [graph["verified"] for graph in report] == ["1/2 leaves"]
    compares = twin.runner.stats.compares
    twin(where.randn(2, 8, seed=7), where.randn(2, seed=1))
    assert twin.runner.stats.compares == compares + 1, "the new timestep went unproven"
    twin(where.randn(2, 8, seed=8), where.randn(2, seed=2))
    assert (twin.replays, twin.runner.stats.compares) == (4, compares + 1)
    assert twin.runner.report()["graphs"][0]["verified"] == "2/2 leaves"


def test_a_tensor_seen_before_is_bound_again_after_another(where: Where) -> None:
    """Sequential guidance: the two embeddings take turns, each the same object every time."""
    twin = Twin(Mlp(), where)
    cond, uncond = where.randn(2, 8, seed=1), where.randn(2, 8, seed=2)
    t = where.randn(2)
    with dit_graphs.request():
        for _ in range(6):
            twin(cond, t)
            twin(uncond, t)
    assert twin.captures == 1
    assert twin.replays == 9


def test_results_of_two_calls_do_not_share_memory(where: Where) -> None:
    twin = Twin(Mlp(), where)
    t = where.randn(2)
    twin.until_replayed(lambda i: (where.randn(2, 8, seed=i), t))
    cond = twin(where.randn(2, 8, seed=10), t)
    kept = cond.clone()
    uncond = twin(where.randn(2, 8, seed=11), t)
    assert torch.equal(cond, kept), "the second call overwrote the first call's result"
    assert not torch.equal(cond, uncond)
    cond.fill_(float("nan"))
    twin(where.randn(2, 8, seed=12), t)


def test_a_result_may_be_the_next_input(where: Where) -> None:
    twin = Twin(Mlp(), where)
    x, t = where.randn(2, 8), where.randn(2)
    for _ in range(8):
        x = twin(x, t)
    assert twin.replays == 5


def test_sizes_take_turns(where: Where) -> None:
    twin = Twin(Mlp(), where)
    for index in range(5):
        for batch in (1, 4, 2):
            twin(where.randn(batch, 8, seed=index), where.randn(batch, seed=index + 50))
    assert twin.captures == 3
    assert twin.replays == 6


def test_none_is_a_signature_of_its_own(where: Where) -> None:
    twin = Twin(Mlp(), where)
    t = where.randn(2)
    for index in range(6):
        twin(where.randn(2, 8, seed=index), t, None)
        twin(where.randn(2, 8, seed=index), t, where.randn(8, seed=index))
    assert twin.captures == 2
    assert twin.graphs == 2


def test_zeros_do_not_stand_in_for_none(where: Where) -> None:
    class Chooses(Mlp):
        def forward(self, x: Tensor, t: Tensor, shift: Tensor | None = None) -> Tensor:
            return super().forward(x, t) * (3.0 if shift is None else 1.0)

    twin = Twin(Chooses(), where)
    t = where.randn(2)
    for index in range(5):
        twin(where.randn(2, 8, seed=index), t)
        twin(where.randn(2, 8, seed=index), t, torch.zeros(8, device=where.device))
    assert twin.graphs == 2


def test_call_style_makes_no_second_graph(where: Where) -> None:
    twin = Twin(Mlp(), where)
    x, t, shift = where.randn(2, 8), where.randn(2), where.randn(8)
    styles = [
        ((x, t, shift), {}),
        ((x, t), {"shift": shift}),
        ((x,), {"shift": shift, "t": t}),
        ((), {"shift": shift, "x": x, "t": t}),
    ]
    for index in range(8):
        args, kwargs = styles[index % 4]
        fresh = where.randn(2, 8, seed=index)
        args = tuple(fresh if value is x else value for value in args)
        kwargs = {k: fresh if value is x else value for k, value in kwargs.items()}
        twin(*args, **kwargs)
    assert (twin.captures, twin.graphs, twin.replays) == (1, 1, 5)


@pytest.mark.parametrize("value", [True, "yes", None, 2, 0.5], ids=str)
def test_a_default_written_out_makes_no_second_graph(where: Where, value: object) -> None:
    class Options(nn.Module):
        def forward(self, x: Tensor, option: object = value) -> Tensor:
            return x * (2.0 if option else 3.0)

    twin = Twin(Options(), where)
    for index in range(8):
        kwargs = {"option": value} if index % 2 else {}
        twin(where.randn(3, seed=index), **kwargs)
    assert (twin.captures, twin.replays) == (1, 5)


class Returns(nn.Module):
    """`shape_result` decides what the forward returns for h = x·W."""

    def __init__(self, shape_result: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.shape_result = shape_result

    def forward(self, x: Tensor) -> object:
        return self.shape_result(x @ self.weight, self)  # type: ignore[operator]


Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Output(BaseOutput):
    sample: Tensor
    cache: list | None = None


@dataclass
class Plain:
    sample: Tensor
    note: str = "x"


_RESULTS = {
    "tensor": lambda h, m: h,
    "1-tuple": lambda h, m: (h,),
    "tuple with None": lambda h, m: (h, None, h * 2),
    "list": lambda h, m: [h, h + 1],
    "tuple of list": lambda h, m: ([h, h + 1],),
    "dict": lambda h, m: {"sample": h, "scale": 2.0},
    "ordered dict": lambda h, m: OrderedDict(b=h, a=h * 2),
    "named tuple": lambda h, m: Pair(h, h * 2),
    "diffusers output": lambda h, m: Transformer2DModelOutput(sample=h),
    "diffusers output with list": lambda h, m: Output(sample=h, cache=[h * 3]),
    "transformers output": lambda h, m: BaseModelOutput(last_hidden_state=h, hidden_states=(h, h)),
    "dataclass": lambda h, m: Plain(h),
    "weight itself": lambda h, m: (h, m.weight.detach()),
    "input-free constant": lambda h, m: (h, torch.ones(3, device=h.device)),
    "expanded": lambda h, m: h[:1].expand(4, 8),
    "slice": lambda h, m: h[:, 2:5],
    "transposed": lambda h, m: h.t(),
    "chunk": lambda h, m: h.chunk(2, dim=1)[1],
    "empty": lambda h, m: (h, h[:0]),
    "0-dim": lambda h, m: (h, h.sum()),
    "int64 and bool": lambda h, m: (h, h.argmax(-1), h > 0),
    "complex": lambda h, m: torch.view_as_complex(h.view(2, 4, 2).contiguous()),
    "bfloat16": lambda h, m: h.bfloat16(),
}


@pytest.mark.parametrize("kind", _RESULTS)
def test_the_result_has_eagers_types_and_layout(where: Where, kind: str) -> None:
    twin = Twin(Returns(_RESULTS[kind]), where)
    results = [twin(where.randn(2, 8, seed=index)) for index in range(6)]
    assert twin.replays == 3
    assert type(results[-1]) is type(results[0])


def test_none_alone_may_be_the_result(where: Where) -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(8))

        def forward(self, x: Tensor) -> None:
            self.last.copy_(x.sum(0))

    twin = Twin(Silent(), where)
    for index in range(6):
        assert twin(where.randn(2, 8, seed=index)) is None
        assert torch.equal(twin.module.last, where.randn(2, 8, seed=index).sum(0))


def test_a_result_that_cannot_be_rebuilt_stays_eager_with_a_reason(where: Where) -> None:
    class Cache:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Cache) and torch.equal(self.tensor, other.tensor)

        __hash__ = None  # type: ignore[assignment]

    twin = Twin(Returns(lambda h, m: (h, Cache(h))), where)
    for index in range(5):
        twin(where.randn(2, 8, seed=index))
    assert (twin.replays, twin.graphs) == (0, 0)
    assert twin.fallbacks.get("unsupported_output", 0) >= 3


def test_an_input_handed_through_is_the_callers_value(where: Where) -> None:
    class Through(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x * 2

    twin = Twin(Through(), where)
    for index in range(6):
        first, _ = twin(where.randn(4, seed=index))
        assert torch.equal(first, where.randn(4, seed=index))
    assert twin.replays == 3


def test_the_models_exception_reaches_the_user_and_graphs_go_on(where: Where) -> None:
    class Picky(Mlp):
        def forward(self, x: Tensor, t: Tensor, shift: Tensor | None = None) -> Tensor:
            if x.shape[0] == 3:
                raise ValueError("batch 3 is not for me")
            return super().forward(x, t, shift)

    twin = Twin(Picky(), where)
    for index in range(6):
        with pytest.raises(ValueError, match="not for me"):
            twin(where.randn(3, 8), where.randn(3))
        twin(where.randn(2, 8, seed=index), where.randn(2, seed=index))
    assert twin.replays == 3


def test_an_exception_on_one_call_does_not_spoil_the_signature(where: Where) -> None:
    """A user's interrupt inside a hook or layer is not a reason to give up graphs."""

    class Interrupted(Mlp):
        interrupt = False

        def forward(self, x: Tensor, t: Tensor, shift: Tensor | None = None) -> Tensor:
            if type(self).interrupt:
                raise RuntimeError("stop")
            return super().forward(x, t, shift)

    twin = Twin(Interrupted(), where)
    twin(where.randn(2, 8), where.randn(2))
    Interrupted.interrupt = True
    with pytest.raises(RuntimeError, match="stop"):
        twin(where.randn(2, 8, seed=1), where.randn(2))
    Interrupted.interrupt = False
    twin.until_replayed(lambda i: (where.randn(2, 8, seed=i), where.randn(2, seed=i)))


def test_a_wrong_call_raises_what_the_plain_module_raises(where: Where) -> None:
    twin = Twin(Mlp(), where)
    twin.until_replayed(lambda i: (where.randn(2, 8, seed=i), where.randn(2, seed=i)))
    for args, kwargs in (((), {}), ((where.randn(2, 8),), {"y": 1}), ((1, 2, 3, 4), {})):
        with pytest.raises(TypeError):
            twin(*args, **kwargs)
    with pytest.raises(TypeError):
        twin(where.randn(2, 8), where.randn(2), x=where.randn(2, 8))
    twin(where.randn(2, 8, seed=1), where.randn(2))


def test_chained_wrapped_modules(where: Where) -> None:
    first, second = Twin(Mlp(), where), Twin(Mlp(), where)
    t = where.randn(2)
    for index in range(6):
        middle = first(where.randn(2, 8, seed=index), t)
        kept = middle.clone()
        second(middle, t)
        assert difference(middle, kept) is None
    assert (first.replays, second.replays) == (3, 3)


def test_a_shape_turned_in_place_is_turned_at_its_place_in_the_forward(where: Where) -> None:
    """As `torch.stft` does: later the tensor has another shape than when it was computed."""

    class Turns(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.sin()
            before = y.sum(dim=0)
            y.unsqueeze_(0).transpose_(1, 2)
            z = y.cos()
            y.squeeze_(0)
            return z[0] * before[:, None] + y

    twin = Twin(Turns(), where)
    for index in range(6):
        twin(where.randn(3, 8, seed=index))
    assert twin.replays == 3
