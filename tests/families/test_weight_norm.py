"""Audio autoencoders normalise weights in a hook before every forward; graphs do it inside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import remove_weight_norm, weight_norm
from twin import Twin
from where import graphing

__all__ = ["graphing"]

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")


class _Audio(nn.Module):
    """x [B, 4, T]: two convolutions with normalised weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = weight_norm(nn.Conv1d(4, 8, 3, padding=1))
        self.second = weight_norm(nn.Conv1d(8, 4, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).sin())


def _ready(where: object) -> Twin:
    twin = Twin(_Audio(), where)
    for seed in range(6):
        twin(where.randn(1, 4, 16, seed=seed))
    assert twin.graphs == 1 and twin.replays >= 2
    assert set(twin.fallbacks) == {"warming_up"}, twin.details
    return twin


def test_normalised_weights_replay(graphing: object) -> None:
    _ready(graphing)


def test_the_weight_a_capture_computed_is_not_left_on_the_module(graphing: object) -> None:
    twin = _ready(graphing)
    for name in ("first", "second"):
        mine, theirs = twin.module.get_submodule(name), twin.plain.get_submodule(name)
        assert torch.equal(mine.weight, theirs.weight), "a replay never writes it, a capture may"


def test_a_scale_written_in_place_is_used_by_the_next_replay(graphing: object) -> None:
    twin = _ready(graphing)
    before = twin.replays
    for module in (twin.module, twin.plain):
        module.get_submodule("first").weight_g.mul_(2.0)
    twin(graphing.randn(1, 4, 16, seed=9))
    assert twin.replays == before + 1


def test_weights_without_the_norm_are_other_weights(graphing: object) -> None:
    twin = _ready(graphing)
    for module in (twin.module, twin.plain):
        remove_weight_norm(module.get_submodule("first"))
    for seed in range(6):
        twin(graphing.randn(1, 4, 16, seed=seed))
    assert twin.captures == 2


def test_any_other_hook_still_means_eager(graphing: object) -> None:
    twin = _ready(graphing)
    before = twin.replays
    for module in (twin.module, twin.plain):
        module.get_submodule("first").register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    for seed in range(4):
        twin(graphing.randn(1, 4, 16, seed=seed))
    assert twin.replays == before and twin.fallbacks["hooks"] == 4
