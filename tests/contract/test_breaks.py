"""Eager breaks: what runs between segments runs on live values, and its result is handed over.

Boundary buffers are the point: the model receives the buffer the break's result was copied into,
never the break's own tensor, on the capture as on every replay.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from twin import Twin, Where

from dit_graphs import ConfigError, break_graph, eager_on_graph
from dit_graphs.backends import make_backend


class Broken(nn.Module):
    """x·W, then `body` as a break, then ·V; `body(h, module)` is what runs eagerly."""

    def __init__(self, body: Callable[[Tensor, nn.Module], object], after: object = None) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.randn(8))
        self.body = eager_on_graph(body)
        self.after = after or (lambda value: value)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        hidden = self.after(self.body(hidden, self))
        return self.second(hidden)


def _runs(twin: Twin, calls: int = 7) -> None:
    for index in range(calls):
        twin(twin.where.randn(3, 8, seed=index))


def _graph(twin: Twin) -> dict[str, object]:
    graphs = twin.runner.report()["graphs"]
    assert isinstance(graphs, list) and len(graphs) == 1
    return graphs[0]


def test_a_break_runs_under_the_autocast_of_its_call(segmenting: Where) -> None:
    """Ops of a segment were cast when they were captured; a body casts anew on each replay."""
    twin = Twin(Broken(lambda hidden, module: module.second(hidden) @ module.bias), segmenting)
    twin.module.after = twin.plain.after = lambda value: value[:, None].float().expand(3, 8)
    for dtype in (torch.bfloat16, torch.float16):
        before = twin.replays
        with torch.autocast(segmenting.device.type, dtype=dtype):
            _runs(twin)
        assert twin.replays == before + 4, twin.details
    _runs(twin)
    assert twin.replays == 12


def test_a_marked_function_runs_eagerly_between_two_segments(segmenting: Where) -> None:
    seen: list[float] = []

    def body(hidden: Tensor, module: nn.Module) -> Tensor:
        seen.append(float(hidden.sum()))
        return hidden * hidden.max().item()

    twin = Twin(Broken(body), segmenting)
    _runs(twin)
    assert twin.replays == 4
    assert (_graph(twin)["segments"], _graph(twin)["breaks"]) == (2, 1)
    # seven calls of each twin, and one replay inside the compare; none during the capture
    assert len(seen) == 7 + 7 + 1
    assert len(set(seen)) == 7, "the body saw another input on every call"


def test_the_same_break_on_every_backend_that_allows_breaks(breaking: Where) -> None:
    twin = Twin(Broken(lambda h, m: h * h.max().item()), breaking)
    _runs(twin)
    assert twin.replays == 4


def test_breaks_inside_breaks_are_plain_python(segmenting: Where) -> None:
    inner = eager_on_graph(lambda h: h + 1)

    twin = Twin(Broken(lambda h, m: inner(h) * inner(h * 2)), segmenting)
    _runs(twin)
    assert _graph(twin)["breaks"] == 1
    assert twin.replays == 4


def test_break_graph_splits_without_doing_anything(segmenting: Where) -> None:
    class Split(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            break_graph()
            x = x.sin()
            break_graph()
            return x + 1

    twin = Twin(Split(), segmenting)
    _runs(twin)
    assert (_graph(twin)["segments"], _graph(twin)["breaks"]) == (3, 2)
    assert twin.replays == 4


def test_breaks_are_plain_outside_a_capture() -> None:
    calls = []
    double = eager_on_graph(lambda x, *, by=2: calls.append(x) or x * by)
    assert double(3, by=5) == 15
    assert calls == [3]
    assert break_graph() is None


def test_a_break_at_the_start_and_at_the_end(segmenting: Where) -> None:
    double = eager_on_graph(lambda x: x * 2)

    class Ends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return double(double(x).sin())

    twin = Twin(Ends(), segmenting)
    _runs(twin)
    assert (_graph(twin)["segments"], _graph(twin)["breaks"]) == (1, 2)
    assert twin.replays == 4


_BODIES: dict[str, tuple[Callable[[Tensor, nn.Module], object], object]] = {
    "a view of a weight": (lambda h, m: m.bias[None].expand(3, 8), None),
    "its own input": (lambda h, m: h, None),
    "a view of its input": (lambda h, m: h.t(), lambda v: v.t()),
    "an expanded row": (lambda h, m: h[:1].expand(3, 8), None),
    "every other column twice": (lambda h, m: torch.cat([h, h], 1)[:, ::2], None),
    "a transposed product": (lambda h, m: (h @ h.t()).t() @ h, None),
    "None beside a tensor": (lambda h, m: (None, h * 2), lambda v: v[1]),
    "a tuple": (lambda h, m: (h, h * 2), lambda v: v[0] + v[1]),
    "a dict with a number": (lambda h, m: {"h": h, "scale": 2.0}, lambda v: v["h"] * v["scale"]),
    "a list of lists": (lambda h, m: [[h], [h.exp()]], lambda v: v[0][0] - v[1][0]),
    "an empty tensor": (lambda h, m: h[:0], lambda v: v.new_ones(3, 8) + v.sum()),
    "0-dim": (lambda h, m: h.sum(), lambda v: v.expand(3, 8)),
    "integers": (lambda h, m: h.argsort(dim=1), lambda v: v.float()),
    "booleans": (lambda h, m: h > 0.3, lambda v: v.float()),
}


@pytest.mark.parametrize("kind", _BODIES)
def test_a_break_may_return(breaking: Where, kind: str) -> None:
    body, after = _BODIES[kind]
    twin = Twin(Broken(body, after), breaking)
    _runs(twin)
    assert twin.replays == 4


def test_a_break_result_written_in_place_by_the_model(breaking: Where) -> None:
    def after(value: Tensor) -> Tensor:
        value.mul_(2.0)
        value += 1.0
        return value

    twin = Twin(Broken(lambda h, m: h.exp(), after), breaking)
    _runs(twin)
    assert twin.replays == 4


def test_a_weight_view_from_a_break_is_not_written_by_segments(breaking: Where) -> None:
    """The segment after the break writes into what it received: that must not be the weight."""
    twin = Twin(Broken(lambda h, m: m.bias.detach()[None].expand(3, 8).clone()), breaking)
    _runs(twin)
    bias = twin.module.bias.detach().clone()
    twin(breaking.randn(3, 8, seed=50))
    assert torch.equal(bias, twin.module.bias)


def test_a_break_reads_python_state_and_weights_at_replay(breaking: Where) -> None:
    """A break is live: it sees a weight updated in place."""
    twin = Twin(Broken(lambda h, m: h + m.bias), breaking)
    _runs(twin)
    for module in (twin.module, twin.plain):
        module.bias.mul_(3.0)
    before = twin.replays
    twin(breaking.randn(3, 8, seed=9))
    assert twin.replays == before + 1


def test_containers_given_to_a_break_are_fresh_on_every_replay(breaking: Where) -> None:
    take = eager_on_graph(lambda options, h: h * options.pop("scale") + options["items"].pop())

    class Pops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            hidden = x.sin()
            return take({"scale": 2.0, "items": [hidden * 3]}, hidden) + 1

    twin = Twin(Pops(), breaking)
    _runs(twin)
    assert twin.replays == 4


def test_intermediates_given_to_a_break_are_the_replays_own(breaking: Where) -> None:
    """Arguments whose tensors die before the segment ends are still rewritten by every replay."""
    mix = eager_on_graph(lambda a, b, c: a + b * c)

    class Many(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for step in range(4):
                x = mix(x.sin(), x.cos() * step, x[0])
                junk = [torch.empty_like(x).fill_(float(step)) for _ in range(4)]
                x = x + junk[step]
            return x

    twin = Twin(Many(), breaking)
    _runs(twin)
    assert twin.replays == 4


def test_a_break_argument_outlives_the_module_that_forgot_it(breaking: Where) -> None:
    """The table lies outside the pool: a recording that only borrowed it reads freed memory."""
    scale = eager_on_graph(lambda h, table: h * table)

    class OneSlot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.size = 0
            self.table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.size != x.shape[0]:
                self.size = x.shape[0]
                self.table = torch.linspace(1, 2, self.size, device=x.device)[:, None]
            return scale(x.sin(), self.table) + 1

    twin = Twin(OneSlot(), breaking)
    for index in range(8):
        for size in (3, 5):
            twin(breaking.randn(size, 8, seed=index))
            junk = [torch.full((n, 1), float("nan"), device=breaking.device) for n in (3, 5)]
            del junk
    assert twin.graphs == 2
    assert twin.replays >= 6


class Attends(nn.Module):
    """[B, L, 8] to [B, L, 8], two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(8, 24) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            q, k, v = layer(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
            x = x + scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return x


@pytest.mark.parametrize("attention", ["eager", "captured", "auto"])
def test_attention_is_broken_out_only_where_asked(segmenting: Where, attention: str) -> None:
    twin = Twin(Attends(), segmenting, attention=attention)
    for index in range(7):
        twin(segmenting.randn(2, 5, 8, seed=index))
    assert twin.replays == 4
    broken = attention == "eager"
    assert (_graph(twin)["segments"], _graph(twin)["breaks"]) == ((3, 2) if broken else (1, 0))


@torch.library.custom_op("dit_graphs_tests::varlen_attention", mutates_args=())
def _varlen(x: Tensor, lengths: Tensor) -> Tensor:
    """Attention whose shape is decided on the host: the lengths are read."""
    rows = [row[: int(n)].softmax(0).sum(0) for row, n in zip(x, lengths, strict=True)]
    return torch.stack(rows)


@pytest.mark.parametrize("attention", ["auto", "eager"])
def test_an_op_that_is_dynamic_attention_is_a_break_by_its_name(
    segmenting: Where, attention: str
) -> None:
    class Varlen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            attended = _varlen(self.linear(x), lengths)
            attended += 1.0
            return self.linear(attended)

    twin = Twin(Varlen(), segmenting, attention=attention)
    for index, lengths in enumerate([(7, 19), (19, 7), (7, 7), (1, 20), (20, 3), (4, 4), (9, 2)]):
        places = torch.tensor(lengths, device=segmenting.device)
        twin(segmenting.randn(2, 20, 8, seed=index), places)
    assert twin.replays == 4
    assert (_graph(twin)["segments"], _graph(twin)["breaks"]) == (2, 1)


def test_captured_fraction_counts_what_the_segments_hold(segmenting: Where) -> None:
    """Two ops in segments, eight in the break: one fifth is captured."""

    def body(h: Tensor, m: nn.Module) -> Tensor:
        for _ in range(8):
            h = h.sin()
        return h

    broken = eager_on_graph(body)

    class Mostly(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return broken(x.cos(), self).exp()

    twin = Twin(Mostly(), segmenting)
    _runs(twin)
    assert _graph(twin)["captured_fraction"] == pytest.approx(0.2)


def test_whole_captured_fraction_is_one(graphing: Where) -> None:
    twin = Twin(nn.Linear(8, 8), graphing)
    _runs(twin)
    assert _graph(twin)["captured_fraction"] == 1.0


def test_full_refuses_breaks_with_a_reason(pooled: Where) -> None:
    twin = Twin(Broken(lambda h, m: h * 2), pooled)
    _runs(twin)
    if pooled.backend == "full":
        assert twin.replays == 0
        assert "function" in twin.details["break_not_allowed"]
    else:
        assert twin.replays == 4


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="full, breakable, debug or recorded"):
        make_backend("whole")
