"""A device value read on the host cannot be in a segment: the submodule that reads it is a break.

A read in the root forward leaves nothing to break out, so the module stays eager with the line.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where

import dit_graphs

_READS = {
    "item": lambda x: x * x.max().item(),
    "float()": lambda x: x * float(x.max()),
    "if": lambda x: x * 2 if x.sum() > 0 else x * 3,
    "tolist": lambda x: x * x.max(dim=0).values.tolist()[0],
    "cpu": lambda x: x * x.abs().max().cpu().to(x.device),
    "numpy": lambda x: x * float(x.max().cpu().numpy()),
    "numpy's own conversion": lambda x: x * float(np.asarray(x.detach().cpu()).max()),
    "nonzero": lambda x: x + x.nonzero().sum(),
    "boolean index": lambda x: x + x[x > 0].sum(),
    "masked_select": lambda x: x + x.masked_select(x > 0).sum(),
    "unique": lambda x: x + x.round().unique().sum(),
    "equal": lambda x: x * (2.0 if torch.equal(x, x + 1) else 3.0),
    "boolean write of many": lambda x: _masked_write(x),
    "repeat_interleave by tensor": lambda x: (
        x + torch.repeat_interleave(x.round().abs().long()[0], x.round().abs().long()[0]).sum()
    ),
    "str": lambda x: x * len(str(x.max().item())),
    "int()": lambda x: x * int(x.max() * 10),
    "slice bound": lambda x: x * x[: int(x.abs().max()) + 1].sum(),
    "torch.tensor of tensors": lambda x: x * torch.tensor([x.max(), 2.0], device=x.device).sum(),
    "as_tensor of tensors": lambda x: x * torch.as_tensor([[x.max()]], device=x.device).sum(),
    "where with one argument": lambda x: x + torch.where(x > 0)[0].sum(),
    "a list that an op writes and does not return": lambda x: x * _written_list(x).sum().item(),
}


def _masked_write(x: Tensor) -> Tensor:
    x = x.clone()
    x[x > 0] = x[x > 0] * 2
    return x


def _written_list(x: Tensor) -> Tensor:
    made = torch.zeros(8, device=x.device)
    torch._foreach_add_([made], [x[0]])
    return made


class Reader(nn.Module):
    def __init__(self, read: object) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.linear(x))  # type: ignore[operator]


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([nn.Sequential(inner), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).sin()
        return x


@pytest.mark.parametrize("kind", _READS)
def test_a_read_in_a_submodule_breaks_there_and_only_there(segmenting: Where, kind: str) -> None:
    twin = Twin(Outer(Reader(_READS[kind])), segmenting)
    took = twin.until_replayed(lambda i: (segmenting.randn(4, 8, seed=i),))
    assert took <= 5, "plain, observed, observed with the break, compared, replayed"
    for index in range(20, 24):
        twin(segmenting.randn(4, 8, seed=index))
    graph = twin.runner.report()["graphs"][0]
    assert (graph["segments"], graph["breaks"]) == (2, 1)
    assert twin.runner.cache.entries  # the break is the module that reads, not its parents
    policy = next(iter(twin.runner.cache.plans.values())).policy
    assert policy.modules == ("blocks.0.0",)


@pytest.mark.parametrize("kind", _READS)
def test_a_read_in_the_root_stays_eager_and_names_the_line(segmenting: Where, kind: str) -> None:
    twin = Twin(Reader(_READS[kind]), segmenting)
    for index in range(6):
        twin(segmenting.randn(4, 8, seed=index))
    assert twin.replays == 0
    reason = next(r for r in ("host_read", "host_copy") if r in twin.fallbacks)
    assert "test_host_reads.py:" in twin.details[reason]
    assert twin.fallbacks[reason] == 4, "plain, observed with its result, then eager for good"


def test_places_to_split_at_are_read() -> None:
    """They lie on the host, whatever the device: only the recorder can have them from an input."""

    class Splits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            places = x[0, :1].abs().mul(9).long().clamp(max=1)
            return x.tensor_split(places)[0].sum() + torch.tensor_split(x, places)[1].sum()

    for module in (Splits(), nn.Sequential(Splits())):
        twin = Twin(module, Where("recorded", torch.device("cpu")), capture="first_use")
        with torch.no_grad():
            for index in range(9):
                twin(twin.where.randn(4, 8, seed=index))
        assert not {"verify_mismatch"} & set(twin.fallbacks)


def test_a_read_of_a_host_value_is_none(where: Where) -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scale = torch.arange(4).sum().item() + torch.linspace(1, 2, 2).tolist()[0]
            return x * scale

    twin = Twin(Reads(), where)
    for index in range(6):
        twin(where.randn(4, seed=index))
    assert twin.replays == 3


def test_a_masked_write_of_one_value_is_no_read(where: Where) -> None:
    class Fills(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            x[x > 0] = 3.0
            return x.masked_fill(x < -1, 0.0)

    twin = Twin(Fills(), where)
    for index in range(6):
        twin(where.randn(4, seed=index))
    assert twin.replays == 3


@pytest.mark.parametrize("value", ["host", "one", "row", "table", "shaped", "rows"])
def test_a_masked_write_of_a_tensor(where: Where, value: str) -> None:
    """CUDA asks where the mask is, unless the host knows the one value that is written."""

    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            if value == "host":
                x[x > 0] = torch.tensor(3.0)
            elif value == "one":
                x[x > 0] = x.mean()
            elif value == "row":
                x[x[:, :, 0] > 0] = x[0, 0].sin()
            elif value == "table":
                x[x[:, 0, 0] > 0] = torch.eye(3, device=x.device)
            elif value == "shaped":  # read by the write itself, which torch gives no tag for it
                x[x[:, 0, 0] > 0] = x.mean().expand(1, 3, 3)
            else:  # as many as there are places: none at all is possible, too
                rows = x[:, 0, 0] > 9.0
                x[rows] *= 2.0
            return x.sin()

    twin = Twin(Writes(), where)
    for index in range(6):
        twin(where.randn(4, 3, 3, seed=index))
    if value in ("shaped", "rows"):
        assert "capture_failed" not in twin.fallbacks, twin.details
        assert where.backend == "debug" or "host_read" in twin.fallbacks
    else:
        assert twin.replays == 3, twin.details


def test_a_read_in_a_module_called_from_many_places(segmenting: Where) -> None:
    shared = Reader(_READS["item"])

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Sequential(shared, nn.Linear(8, 8))
            self.two = nn.Sequential(nn.Linear(8, 8), shared)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x)).sin() + shared(x)

    twin = Twin(Many(), segmenting)
    twin.until_replayed(lambda i: (segmenting.randn(4, 8, seed=i),))
    assert twin.runner.report()["graphs"][0]["breaks"] == 3


def test_reads_in_nested_modules_end_in_one_outer_break(segmenting: Where) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Reader(_READS["item"])

        def forward(self, x: Tensor) -> Tensor:
            return self.child(x) * x.min().item()

    twin = Twin(Outer(Parent()), segmenting)
    twin.until_replayed(lambda i: (segmenting.randn(4, 8, seed=i),))
    assert twin.runner.report()["graphs"][0]["breaks"] == 1


def test_one_blocked_signature_does_not_disable_another(segmenting: Where) -> None:
    class Sometimes(nn.Module):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            return x * 2 if y is None else x * y.max().item()

    twin = Twin(Sometimes(), segmenting)
    for index in range(8):
        twin(segmenting.randn(4, seed=index))
        twin(segmenting.randn(4, seed=index), segmenting.randn(3, seed=index))
    assert twin.replays == 5
    assert twin.fallbacks["host_read"] >= 6


def test_a_failed_signature_is_not_tried_on_every_call(segmenting: Where) -> None:
    passes = []

    class Reads(Reader):
        def forward(self, x: Tensor) -> Tensor:
            from torch.utils._python_dispatch import _len_torch_dispatch_stack

            passes.append(_len_torch_dispatch_stack())
            return super().forward(x)

    twin = Twin(Reads(_READS["item"]), segmenting)
    for index in range(10):
        twin(segmenting.randn(4, 8, seed=index))
    observed = [depth for depth in passes if depth]
    assert len(observed) == 1, "observed once, then left alone"


OBSERVED: list[int] = []  # neither the module's nor its class's: what these hold is state


class Watched(nn.Module):
    """Counts its passes under a mode, which are the observed ones; `wants` says when it reads."""

    def __init__(self, wants: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.wants = wants
        OBSERVED.clear()

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils._python_dispatch import _len_torch_dispatch_stack

        if _len_torch_dispatch_stack():
            OBSERVED.append(x.shape[0])
        x = self.linear(x)
        return x * x.max().item() if self.wants(x) else x.sin()


def test_a_read_at_one_size_blocks_no_other_size(segmenting: Where) -> None:
    twin = Twin(Watched(lambda x: x.shape[0] == 5), segmenting)
    for size in (5, 3, 7, 5, 4):
        for index in range(6):
            twin(segmenting.randn(size, 8, seed=index))
    assert twin.replays == 3 * 3, "three sizes: plain, observed, compared, and three replays"
    assert twin.fallbacks["host_read"] == 10
    text = dit_graphs.explain(twin.module)
    assert "no graph for x 5×8 float32: host_read: " in text


def test_a_path_that_always_reads_is_not_observed_for_every_size(segmenting: Where) -> None:
    twin = Twin(Watched(lambda x: True), segmenting)
    for size in range(1, 41):
        for index in range(3):
            twin(segmenting.randn(size, 8, seed=index))
    assert OBSERVED == [1, 2], "the third one would have to come four times"
    for index in range(80):
        twin(segmenting.randn(30, 8, seed=index))
    assert OBSERVED == [1, 2, 30, 30], "after four uses; and once more 64 uses later"


def test_what_key_adds_makes_another_path(segmenting: Where) -> None:
    """One mode reads on the host inside a submodule; the other one needs no break there."""
    mode = ["reads"]

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.max().item() if mode[0] == "reads" else x.sin()

    twin = Twin(Outer(Inner()), segmenting, key=lambda: mode[0])
    twin.until_replayed(lambda i: (segmenting.randn(4, 8, seed=i),))
    mode[0] = "is quiet"
    twin.until_replayed(lambda i: (segmenting.randn(4, 8, seed=i),))
    graphs = twin.runner.report()["graphs"]
    assert [graph["breaks"] for graph in graphs] == [1, 0]


def test_a_path_that_reads_no_longer_gets_its_graph(segmenting: Where) -> None:
    reads = [True]
    twin = Twin(Watched(lambda x: reads[0]), segmenting)
    for index in range(4):
        twin(segmenting.randn(4, 8, seed=index))
    reads[0] = False
    took = twin.until_replayed(lambda i: (segmenting.randn(4, 8, seed=i),), limit=80)
    assert 60 < took < 70, "a retry, but no storm of them"


def test_other_weights_are_looked_at_afresh(segmenting: Where) -> None:
    reads = [True]
    twin = Twin(Watched(lambda x: reads[0]), segmenting)
    for index in range(4):
        twin(segmenting.randn(4, 8, seed=index))
    reads[0] = False
    for module in (twin.module, twin.plain):
        module.linear.weight = nn.Parameter(torch.ones(8, 8, device=segmenting.device))
    assert twin.until_replayed(lambda i: (segmenting.randn(4, 8, seed=i),)) == 3


def test_an_attribute_that_is_new_in_every_call_makes_no_storm_of_passes(segmenting: Where) -> None:
    """Each new tensor is "other weights", after which a refusal is taken back: not every time."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.ones(8)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale * x.max().item()

    twin = Twin(Reads(), segmenting)
    for index in range(64):
        for module in (twin.module, twin.plain):
            module.scale = torch.full((8,), float(index), device=segmenting.device)
        twin(segmenting.randn(3, 8, seed=index))
    assert twin.replays == 0
    assert twin.fallbacks["host_read"] > 50, twin.fallbacks


def test_debug_runs_host_reads_as_they_are() -> None:
    twin = Twin(Reader(_READS["if"]), Where("debug", torch.device("cpu")))
    with torch.no_grad():
        for index in range(7):
            twin(torch.randn(4, 8, generator=torch.Generator().manual_seed(index)))
    assert twin.replays == 4
