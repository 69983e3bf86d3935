"""What must not be taken for the same thing: addresses, memos, styles, absent arguments."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where

import dit_graphs


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(
        self, x: Tensor, prompt: Tensor, guidance: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        out = self.linear(x) * prompt * scale
        return out if guidance is None else out + guidance


def _fresh(where: Where, seed: int, address: int | None = None) -> Tensor | None:
    """Seeded values in new memory, at `address` if the allocator gives that back."""
    kept = []
    for _ in range(200):
        tensor = torch.empty(1024, device=where.device)
        if address in (None, tensor.data_ptr()):
            return tensor.copy_(where.randn(1024, seed=seed))
        kept.append(tensor)
    return None


def test_an_address_is_not_an_identity(where: Where) -> None:
    """Fresh embeddings land where the last ones were freed, with the same version counter.

    A copy skipped because "pointer and version are as last time" would give the new prompt the old
    prompt's picture. So the object itself is held: its place cannot be taken while it counts.
    """

    class Scales(nn.Module):
        def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
            return x * prompt

    twin = Twin(Scales(), where)
    x = where.randn(1024)
    with dit_graphs.request():
        for seed in range(12):
            prompt = _fresh(where, seed)
            assert prompt is not None
            assert torch.equal(twin.module(x, prompt), twin.plain(x, prompt))
            address, version = prompt.data_ptr(), prompt._version
            del prompt
            again = _fresh(where, 100 + seed, address)
            if again is not None:
                assert again._version == version
                assert torch.equal(twin.module(x, again), twin.plain(x, again))
            del again
    assert twin.replays >= 9


def test_the_same_object_with_new_values_is_copied_again(where: Where) -> None:
    """`is` is not enough either: latents are updated in place by some schedulers."""
    twin = Twin(Mixes(), where)
    x, prompt = where.randn(3, 8), where.randn(8)
    with dit_graphs.request():
        for index in range(8):
            prompt.mul_(-1.0) if index % 2 else x.add_(0.5)
            twin(x, prompt)
    assert twin.replays >= 4


def test_b09_a_memo_built_from_a_static_buffer_is_not_kept(where: Where) -> None:
    """The forward remembers which mask it last saw and skips rebuilding its index for that one.

    During a capture the mask is our static buffer, the same object as in the warm-up: the rebuild
    is skipped, and the index of the first mask is baked in. The first other mask must be noticed.
    """

    class Memoises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last: Tensor | None = None
            self.index: Tensor | None = None

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            if mask is not self.last:
                self.last = mask
                self.index = mask.argsort(dim=0, descending=True)
            return x[:, self.index]

    twin = Twin(Memoises(), where)
    masks = [where.randn(8, seed=seed) for seed in range(3)]
    for index in range(12):
        x = where.randn(3, 8, seed=index)
        mask = masks[(index // 4) % 3]
        assert torch.equal(twin.module(x, mask), x[:, mask.argsort(dim=0, descending=True)])


def test_b11_keywords_reach_the_replay(where: Where) -> None:
    """Keyword arguments used at the capture and not forwarded at the replay stay the first ones."""
    twin = Twin(Mixes(), where)
    for index in range(8):
        twin(
            prompt=where.randn(8, seed=40 + index),
            x=where.randn(3, 8, seed=index),
            guidance=where.randn(8, seed=80 + index),
        )
    assert twin.replays == 5


@pytest.mark.parametrize("seed", range(3))
def test_b11_any_style_any_options_in_any_order(where: Where, seed: int) -> None:
    """Positional, keyword and mixed calls, optional arguments that come and go."""
    twin = Twin(Mixes(), where)
    chance = random.Random(seed)
    for index in range(30):
        values = {
            "x": where.randn(3, 8, seed=index),
            "prompt": where.randn(8, seed=100 + index),
            "guidance": chance.choice([None, where.randn(8, seed=200 + index)]),
            "scale": chance.choice([1.0, 2.0]),
        }
        for name in ("scale", "guidance"):
            value = values[name]
            if (value is None or (name == "scale" and value == 1.0)) and chance.random() < 0.5:
                del values[name]
        names = list(values)
        split = chance.randint(0, len(names))
        positional = names[:split] if "guidance" in values else names[: min(split, 2)]
        args = [values[name] for name in positional]
        rest = [(name, values[name]) for name in names if name not in positional]
        chance.shuffle(rest)
        twin(*args, **dict(rest))
    assert twin.captures <= 4
    assert twin.replays >= 30 - 3 * 4


def test_b12_none_is_not_zeros(where: Where) -> None:
    """An optional mask replaced by zeros "to keep the signature stable" masks everything."""

    class Masks(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return x if mask is None else x * mask

    twin = Twin(Masks(), where)
    for index in range(10):
        twin(where.randn(3, 8, seed=index), None)
        twin(where.randn(3, 8, seed=index), torch.zeros(8, device=where.device))
    assert twin.graphs == 2


def test_b18_feeding_results_back_works_from_the_first_call(where: Where) -> None:
    """x = T(x), and T2(T1(x)): no dependence on how many warm-ups there were."""
    first, second = Twin(Mixes(), where), Twin(Mixes(), where)
    for _ in range(2):
        x, prompt = where.randn(3, 8, seed=5), where.randn(8, seed=6)
        for _ in range(6):
            x = second(first(x, prompt), prompt)
    assert first.replays == second.replays == 9


def test_b57_the_second_caller_may_have_another_mode(where: Where) -> None:
    """Static buffers made in inference mode cannot be written by a no_grad caller."""
    modes = [torch.inference_mode, torch.no_grad]
    for order in (modes, modes[::-1]):
        twin = Twin(Mixes(), where)
        for index in range(8):
            with order[index % 2]():
                twin(where.randn(3, 8, seed=index), where.randn(8, seed=50 + index))
        with torch.enable_grad():
            x = where.randn(3, 8).requires_grad_()
            twin.module(x, where.randn(8)).sum().backward()
            assert x.grad is not None
        assert twin.replays == 5


def test_b59_an_integer_timestep_is_not_a_float_one(where: Where) -> None:
    """copy_ casts in silence: a float timestep in an int64 buffer loses its fraction."""

    class Steps(nn.Module):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return x * t.to(x.dtype)[:, None]

    twin = Twin(Steps(), where)
    for index in range(8):
        twin(where.randn(3, 8, seed=index), torch.full((3,), index, device=where.device))
        twin(where.randn(3, 8, seed=index), torch.full((3,), index + 0.5, device=where.device))
        half = torch.full((3,), index + 0.5, device=where.device, dtype=torch.float64)
        twin(where.randn(3, 8, seed=index), half)
    assert twin.graphs == 3
