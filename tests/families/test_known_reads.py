"""Host reads of what the signature determines: read once, handed back to captures, never wrong.

Plain modules and a family of their own, on every backend. The reads are those of diffusers'
classes: a length cut out of a mask, a bool index, a branch, a count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from twin import Twin
from where import graphing, where

from dit_graphs.calls import RunnerOptions
from dit_graphs.pipelines.families.base import Fact, ModelFamily, layout, same_bytes
from dit_graphs.wrapping import wrap_with

__all__ = ["graphing", "where"]


class _Masked(ModelFamily):
    known: ClassVar[Mapping[str, Fact]] = {"mask": layout}


class _Reader(nn.Module):
    """What `read` does with x [B, L, 8] and a mask [B, L]."""

    def __init__(self, read: object) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.read = read

    def forward(self, x: Tensor, mask: Tensor) -> object:
        return self.read(self.linear(x), mask)


def _cut(x: Tensor, mask: Tensor) -> object:
    lengths = mask.sum(dim=1).tolist()
    return [x[row, :length] * 2 for row, length in enumerate(lengths)]


def _cut_by_tensor(x: Tensor, mask: Tensor) -> object:
    return x[:, : mask.sum(dim=1)[0]] + 1


def _picked(x: Tensor, mask: Tensor) -> object:
    return torch.cat([x[mask.bool()], x[~mask.bool()] * 0.5])


def _written(x: Tensor, mask: Tensor) -> object:
    out = torch.zeros_like(x)
    out[mask.bool()] = x[mask.bool()] * 3
    return out


def _scaled(x: Tensor, mask: Tensor) -> object:
    rows = mask.bool().all(dim=1)
    out = x * 1
    out[rows] *= 0.0
    return out


def _branched(x: Tensor, mask: Tensor) -> object:
    return x.sin() if mask.bool().all() else x.cos()


def _counted(x: Tensor, mask: Tensor) -> object:
    places = torch.nonzero(mask.flatten()).flatten()
    return x.flatten(0, 1)[places], x.repeat_interleave(mask[0].long() + 1, dim=1)


def _host_built(x: Tensor, mask: Tensor) -> object:
    sizes = torch.tensor([[x.shape[1], 2]], device=x.device).repeat(x.shape[0], 1)
    return torch.stack([x[row, : int(n)].sum(0) for row, (n, _) in enumerate(sizes)])


READS = (
    _cut,
    _cut_by_tensor,
    _picked,
    _written,
    _scaled,
    _branched,
    _counted,
    _host_built,
)


def _twin(read: object, where: object, family: type[ModelFamily] | None = _Masked) -> Twin:
    torch.manual_seed(0)
    module = _Reader(read)
    twin = Twin(module, where)
    if family is not None:
        import dit_graphs

        config = twin.runner.config
        dit_graphs.unwrap(module)
        wrap_with(module, config, RunnerOptions(family=family(module)))
    return twin


def _mask(where: object, *lengths: int, width: int = 6, dtype: torch.dtype = torch.long) -> Tensor:
    valid = torch.arange(width) < torch.tensor(lengths)[:, None]
    return valid.to(dtype).to(where.device)


@pytest.mark.parametrize("read", READS, ids=lambda read: read.__name__)
def test_what_follows_from_a_known_mask_is_read_once(read: object, graphing: object) -> None:
    twin = _twin(read, graphing)
    for lengths in ((4, 4), (6, 3), (4, 4), (6, 3)):
        for seed in range(4):
            twin(graphing.randn(2, 6, 8, seed=seed), _mask(graphing, *lengths))
    assert twin.graphs == 2, "one graph per layout of the mask, whatever else changes"
    assert set(twin.fallbacks) == {"warming_up"}, twin.details
    assert all(graph["breaks"] == 0 for graph in twin.runner.report()["graphs"])
    assert twin.replays >= 8


@pytest.mark.parametrize("read", [_cut, _picked, _branched], ids=lambda read: read.__name__)
def test_without_the_fact_the_read_is_named(read: object, graphing: object) -> None:
    twin = _twin(read, graphing, family=None)
    for seed in range(5):
        twin(graphing.randn(2, 6, 8, seed=seed), _mask(graphing, 4, 2))
    assert twin.graphs == 0 and "host_read" in twin.fallbacks


def test_a_mask_with_holes_is_known_by_its_bytes(graphing: object) -> None:
    twin = _twin(_picked, graphing)
    holes = torch.tensor([[1, 0, 1, 1, 0, 0], [0, 1, 1, 0, 0, 1]]).to(graphing.device)
    for index in range(12):
        given = holes if index % 2 else _mask(graphing, 3, 3)  # as many valid ones, elsewhere
        twin(graphing.randn(2, 6, 8, seed=index), given.clone())
    assert twin.graphs == 2 and twin.replays >= 4


def test_a_mask_changed_in_place_is_read_again(graphing: object) -> None:
    twin = _twin(_cut, graphing)
    mask = _mask(graphing, 4, 4)
    for index in range(6):
        twin(graphing.randn(2, 6, 8, seed=index), mask)
    assert twin.replays >= 2
    mask[0, 4:] = 1
    for index in range(6):
        twin(graphing.randn(2, 6, 8, seed=index), mask)
    assert twin.graphs == 2


def test_a_read_of_something_else_is_still_a_host_read(graphing: object) -> None:
    def read(x: Tensor, mask: Tensor) -> object:
        length = int(mask.sum())  # known
        return x * length if x.sum() > 0 else x  # not known: latents

    twin = _twin(read, graphing)
    for index in range(5):
        twin(graphing.randn(2, 6, 8, seed=index), _mask(graphing, 4, 2))
    assert twin.graphs == 0 and "host_read" in twin.fallbacks


def test_a_known_value_mixed_with_latents_is_not_known(graphing: object) -> None:
    def read(x: Tensor, mask: Tensor) -> object:
        weight = mask.float().mean()  # known
        weight += x.mean()  # and no longer
        return x * 2 if weight > 0 else x * 3

    twin = _twin(read, graphing)
    for index in range(5):
        twin(graphing.randn(2, 6, 8, seed=index), _mask(graphing, 4, 2))
    assert twin.graphs == 0 and "host_read" in twin.fallbacks


def test_what_a_read_returns_may_be_written(graphing: object) -> None:
    def read(x: Tensor, mask: Tensor) -> object:
        places = torch.nonzero(mask.flatten()).flatten()
        places += 1  # a replay that adds once more each time would run out of x
        counts = mask.sum(1).tolist()
        counts.append(1)
        return x.flatten(0, 1)[places - 1] * len(counts)

    twin = _twin(read, graphing)
    for index in range(9):
        twin(graphing.randn(2, 6, 8, seed=index), _mask(graphing, 4, 2))
    assert twin.replays >= 5


def test_inference_tensors_are_read_on_every_call(where: object) -> None:
    twin = _twin(_cut, where)
    with torch.inference_mode():
        mask = _mask(where, 4, 4)
        for index in range(4):
            twin(where.randn(2, 6, 8, seed=index), mask)
        mask[0, 4:] = 1  # no version tells
        for index in range(4):
            twin(where.randn(2, 6, 8, seed=index), mask)


def test_first_use_proves_a_family_s_graph_on_its_next_call(graphing: object) -> None:
    torch.manual_seed(0)
    module = _Reader(_branched)
    twin = Twin(module, graphing, capture="first_use")
    import dit_graphs

    config = twin.runner.config
    dit_graphs.unwrap(module)
    wrap_with(module, config, RunnerOptions(family=_Masked(module)))
    for seed in range(4):
        twin(graphing.randn(2, 6, 8, seed=seed), _mask(graphing, 6, 6, dtype=torch.float32))
    assert twin.replays == 2


def test_layout_tells_lengths_from_other_masks() -> None:
    assert layout(torch.tensor([[1, 1, 0], [1, 1, 1]])) == ("valid", 2, 3)
    assert layout(torch.tensor([True, False])) == ("valid", 1)
    left = torch.tensor([[0, 1, 1]])
    assert layout(left) == same_bytes(left) != layout(torch.tensor([[1, 1, 0]]))
    half = torch.tensor([[0.5, 0.5, 0.0]])
    assert layout(half) == same_bytes(half), "only ones and zeros are a length"
    assert layout(torch.ones(1, 2)) == layout(torch.ones(1, 2, dtype=torch.bool))
