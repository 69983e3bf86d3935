"""What is said of graphs: what they are worth, how much of them is eager, why a call had none."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where

import dit_graphs
from dit_graphs import eager_on_graph
from dit_graphs.cache import Entry
from dit_graphs.capture import Capturer
from dit_graphs.worth import Worth, expected_speedup

RECORDED = Where("recorded", torch.device("cpu"))


@pytest.fixture(autouse=True)
def _no_grad() -> object:
    with torch.no_grad():
        yield


def _serve(twin: Twin, size: int = 3, calls: int = 5) -> None:
    for index in range(calls):
        twin(twin.where.randn(size, 8, seed=index))


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


# What a graph is worth.


def test_worth_in_words() -> None:
    gib = 1 << 30
    assert str(Worth(55.2, 24.0, gib)) == "expect 2.3x, +1.0 GiB"
    assert str(Worth(30.0, 20.0, 0)) == "expect 1.50x, +0.0 GiB"
    assert str(Worth(104.0, 100.0, gib)) == "compute-bound: 1.04x, +1.0 GiB"
    assert str(Worth(90.0, 100.0, gib // 2)) == "compute-bound: 0.90x, +0.5 GiB"


def test_the_expected_speedup_of_a_mix_counts_each_call() -> None:
    # nine calls of 40 ms instead of 80, one of 10 instead of 10: 730 ms instead of 370
    mix = [(Worth(80.0, 40.0, 0), 9), (Worth(10.0, 10.0, 0), 1)]
    assert expected_speedup(mix) == pytest.approx(730 / 370)
    assert expected_speedup([]) is None


def test_a_recorder_on_the_cpu_claims_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for backend in ("recorded", "debug"):
        twin = Twin(nn.Linear(8, 8), Where(backend, torch.device("cpu")))
        with caplog.at_level(logging.DEBUG, logger="dit_graphs"):
            _serve(twin)
        assert twin.graphs == 1
        report = twin.runner.report()
        assert report["expected_speedup"] is None
        assert report["graphs"][0]["expected_speedup"] is None
        assert "expect" not in dit_graphs.explain(twin.module)
    assert not [text for text in _told(caplog) if "expect" in text or "bound" in text]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU where eager takes 50 ms and a replay 20."""

    def worth(self: Entry, device: torch.device) -> Worth | None:
        return Worth(50.0, 20.0, 1 << 30) if self.replay_ms is not None else None

    monkeypatch.setattr(Entry, "worth", worth)


@pytest.mark.usefixtures("measured")
def test_what_was_measured_is_said_once_per_component(caplog: pytest.LogCaptureFixture) -> None:
    twin = Twin(nn.Linear(8, 8), RECORDED)
    with caplog.at_level(logging.INFO, logger="dit_graphs"):
        _serve(twin)
        _serve(twin, 5)
    assert [text for text in _told(caplog) if "expect" in text] == ["Linear: expect 2.5x, +1.0 GiB"]
    stats = json.loads(json.dumps(dit_graphs.stats(twin.module)))["components"]["denoiser"]
    assert stats["expected_speedup"] == 2.5
    assert [graph["expected_speedup"] for graph in stats["graphs"]] == [2.5, 2.5]
    assert "  expect 2.50x over eager" in dit_graphs.explain(twin.module)


def test_a_graph_that_saves_nothing_is_not_kept_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Entry, "worth", lambda self, device: Worth(104.0, 100.0, 1 << 30))
    monkeypatch.setattr(Capturer, "is_worthless", lambda self, entry: True)
    twin = Twin(nn.Linear(8, 8), RECORDED)
    with caplog.at_level(logging.INFO, logger="dit_graphs"):
        _serve(twin, calls=3)
        assert twin.graphs == 0
        (told,) = [text for text in _told(caplog) if "compute" in text]
        assert told.endswith("(compute-bound: 1.04x, +1.0 GiB, not kept)")
        _serve(twin, calls=6)
    assert len([text for text in _told(caplog) if "compute" in text]) == 1
    assert twin.fallbacks["compute_bound"] == 6
    assert "1.04x, +1.0 GiB, not kept" in dit_graphs.explain(twin.module)


def test_first_use_is_measured_too() -> None:
    twin = Twin(nn.Linear(8, 8), RECORDED, capture="first_use")
    _serve(twin, calls=2)
    (graph,) = twin.runner.report()["graphs"]
    assert graph["eager_ms"] > 0 and graph["replay_ms"] > 0


# How much of a graph is eager.


class Halves(nn.Module):
    """`eager` of its ten operations run in one break."""

    def __init__(self, eager: int) -> None:
        super().__init__()
        self.eager = eager

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(10 - self.eager):
            x = x.sin()
        return _sines(x, self.eager)


@eager_on_graph
def _sines(x: Tensor, count: int) -> Tensor:
    for _ in range(count):
        x = x.sin()
    return x.clone() if not count else x


@pytest.mark.parametrize(("eager", "is_mostly_eager"), [(2, False), (3, True), (9, True)])
def test_one_break_counts_by_what_runs_in_it(
    segmenting: Where, eager: int, is_mostly_eager: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of ten are 80 % captured; one huge break is never coverage."""
    twin = Twin(Halves(eager), segmenting)
    with caplog.at_level(logging.INFO, logger="dit_graphs"):
        twin.until_replayed(lambda i: (segmenting.randn(3, 8, seed=i),))
    (graph,) = twin.runner.report()["graphs"]
    assert graph["captured_fraction"] == pytest.approx(1 - eager / 10)
    assert graph["mostly_eager"] is is_mostly_eager
    share = f"mostly eager: {1 - eager / 10:.0%} captured"
    captured = [text for text in _told(caplog) if "captured x" in text]
    assert [share in text for text in captured] == [is_mostly_eager]
    assert (share in dit_graphs.explain(twin.module)) is is_mostly_eager


# Why a call had none.


def test_a_new_reason_is_told_with_what_differs_from_the_nearest_graph(
    segmenting: Where, caplog: pytest.LogCaptureFixture
) -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor, strength: float = 1.0) -> Tensor:
            return x * x.max().item() if x.shape[0] > 4 else x * strength

    twin = Twin(Reads(), segmenting)
    twin.until_replayed(lambda i: (segmenting.randn(3, 8, seed=i),))
    twin.until_replayed(lambda i: (segmenting.randn(3, 16, seed=i), 0.5))
    with caplog.at_level(logging.WARNING, logger="dit_graphs"):
        for index in range(5):
            twin(segmenting.randn(6, 8, seed=index))
            twin(segmenting.randn(7, 16, seed=index), 0.5)
    (told,) = _told(caplog)
    assert "host_read" in told
    assert told.endswith("From the nearest graph: x: 3×8 float32 → 6×8 float32")


def test_a_reason_without_any_graph_names_no_difference(
    segmenting: Where, caplog: pytest.LogCaptureFixture
) -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.max().item()

    twin = Twin(Reads(), segmenting)
    with caplog.at_level(logging.WARNING, logger="dit_graphs"):
        _serve(twin)
    (told,) = _told(caplog)
    assert "nearest" not in told


def test_settings_are_told_by_what_changed(caplog: pytest.LogCaptureFixture) -> None:
    twin = Twin(nn.Linear(8, 8), RECORDED, max_graphs=1)
    _serve(twin)
    with (
        caplog.at_level(logging.WARNING, logger="dit_graphs"),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        _serve(twin)
    (told,) = _told(caplog)
    assert told.endswith("From the nearest graph: settings: autocast None → torch.bfloat16")


# How a call is named.


class Sized(dict):
    """An options dict of a user's own, known by one of its values."""


@dataclass
class Guide:
    weight: float
    image: Tensor


class Guided(nn.Module):
    def forward(self, size: Sized, guide: Guide, steps: dict[int, int], x: Tensor) -> Tensor:
        return x * size["n"] + guide.image * guide.weight + steps[3]


def test_a_call_is_named_by_what_its_arguments_hold() -> None:
    """Each tensor stands by its own name, and a registered object as its key was written."""
    dit_graphs.register_leaf(Sized, key=lambda size: (size["n"], 0.5))
    twin = Twin(Guided(), RECORDED)
    where = twin.where
    for index in range(4):
        guide = Guide(1.5, where.randn(1, 2, seed=index))
        twin(Sized(n=2), guide, {3: 5}, where.randn(4, 2, seed=index))
    (graph,) = twin.runner.report()["graphs"]
    assert graph["signature"] == (
        "size (2, 0.5), guide.weight 1.5, guide.image 1×2 float32, steps.3 5, x 4×2 float32"
    )


class TwoMethods(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1

    def decode(self, z: Tensor) -> Tensor:
        return z * 2


def test_every_wrapped_method_is_reported_as_the_log_names_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A VAE of which only `decode` is wrapped has numbers, too."""
    module = dit_graphs.wrap(TwoMethods(), backend="recorded", method="decode")
    with caplog.at_level(logging.INFO, logger="dit_graphs"):
        for index in range(5):
            module.decode(RECORDED.randn(4, seed=index))
    assert dit_graphs.stats(module)["components"]["decode"]["replays"] == 2
    assert dit_graphs.explain(module).startswith("TwoMethods.decode: 2/5 ")
    assert any(text.startswith("TwoMethods.decode: captured z 4") for text in _told(caplog))
    with dit_graphs.disabled(module):
        module.decode(RECORDED.randn(4, seed=9))
    assert dit_graphs.stats(module)["components"]["decode"]["fallbacks"]["disabled"] == 1
    dit_graphs.wrap(module, backend="recorded")
    assert set(dit_graphs.stats(module)["components"]) == {"decode", "denoiser"}
    assert dit_graphs.explain(module).endswith("not called: TwoMethods")


def test_one_break_is_no_breaks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dit_graphs"):
        _serve(Twin(nn.Linear(8, 8), RECORDED))
    assert any(": recorded, 1 segment, 0 breaks, " in text for text in _told(caplog))


def test_a_read_on_the_host_says_how_it_may_stay() -> None:
    """The advice is true: the same read in a marked function has its graphs."""
    twin = Twin(Reads(), RECORDED)
    _serve(twin)
    assert "a function marked @eager_on_graph may (" in dit_graphs.explain(twin.module)
    marked = Twin(Reads(eager_on_graph(_sign)), RECORDED)
    _serve(marked)
    assert marked.replays == 2


def _sign(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


class Reads(nn.Module):
    def __init__(self, sign: Callable[[Tensor], Tensor] = _sign) -> None:
        super().__init__()
        self.sign = sign

    def forward(self, x: Tensor) -> Tensor:
        return self.sign(x * 2) + 1
