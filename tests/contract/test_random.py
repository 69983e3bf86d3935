"""Random numbers: each call draws what eager would, and the stream goes on as if nothing happened.

Observing, capturing, comparing and discarded replays leave no trace in the default generators nor
in an explicit one. `Twin` compares the default streams after every call.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from twin import Twin, Where

import dit_graphs
from dit_graphs import eager_on_graph

CAPTURES = ["second_use", "first_use"]


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.rand_like(x) * torch.randn(8, device=x.device)


@pytest.mark.parametrize("capture", CAPTURES)
def test_rand_in_the_forward_is_eagers(where: Where, capture: str) -> None:
    twin = Twin(Noisy(), where, capture=capture)
    for index in range(8):
        twin(where.randn(3, 8, seed=index))
    assert twin.replays >= 5


@pytest.mark.parametrize("capture", CAPTURES)
def test_same_seed_same_result_other_seed_another(where: Where, capture: str) -> None:
    twin = Twin(Noisy(), where, capture=capture)
    x = where.randn(3, 8)
    twin.until_replayed(lambda i: (where.randn(3, 8, seed=i),))
    results = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        results.append(twin(x))
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[1])


def test_two_replays_in_a_row_draw_different_numbers(where: Where) -> None:
    twin = Twin(Noisy(), where)
    x = where.randn(3, 8)
    twin.until_replayed(lambda i: (where.randn(3, 8, seed=i),))
    assert not torch.equal(twin.module(x), twin.module(x))


def test_the_stream_of_a_whole_session_is_eagers(where: Where) -> None:
    """Draws of the caller between calls, too: nothing was consumed or given back in secret."""
    module = Noisy().to(where.device)
    plain = Noisy().to(where.device)
    plain.load_state_dict(module.state_dict())
    dit_graphs.wrap(module, backend=where.backend)

    def session(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(5)
        found = []
        for index in range(7):
            found.append(model(where.randn(2 + index % 2, 8, seed=index)))
            found.append(torch.randn(3, device=where.device))
        return found

    for _ in range(2):
        for mine, theirs in zip(session(module), session(plain), strict=True):
            assert torch.equal(mine, theirs)


class Explicit(nn.Module):
    def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return x + torch.randn(x.shape, generator=generator, device=x.device)


@pytest.mark.parametrize("capture", CAPTURES)
def test_b60_an_explicit_generator_goes_on_as_eagers(graphing: Where, capture: str) -> None:
    module = Explicit()
    dit_graphs.wrap(module, backend=graphing.backend, capture=capture)
    mine = torch.Generator(graphing.device).manual_seed(3)
    theirs = torch.Generator(graphing.device).manual_seed(3)
    for index in range(9):  # one pass finds the draw, and from then on generators have names
        x = graphing.randn(4, seed=index)
        expected = x + torch.randn(4, generator=theirs, device=graphing.device)
        assert torch.equal(module(x, mine), expected), f"call {index}"
        assert torch.equal(mine.get_state(), theirs.get_state())
    assert dit_graphs.stats(module)["components"]["denoiser"]["replays"] >= 4


def test_another_generator_is_another_signature(graphing: Where) -> None:
    module = Explicit()
    dit_graphs.wrap(module, backend=graphing.backend)
    for seed in range(4):
        mine = torch.Generator(graphing.device).manual_seed(seed)
        theirs = torch.Generator(graphing.device).manual_seed(seed)
        for index in range(4):
            x = graphing.randn(4, seed=index)
            expected = x + torch.randn(4, generator=theirs, device=graphing.device)
            assert torch.equal(module(x, mine), expected)


def test_a_generator_that_is_only_handed_on_is_no_part_of_the_signature(graphing: Where) -> None:
    """Stable Diffusion passes the picture's generator to an autoencoder that never asks it."""

    class Decodes(nn.Module):
        def forward(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
            return x * 2 + 1

    module = Decodes()
    dit_graphs.wrap(module, backend=graphing.backend)
    for seed in range(8):
        x = graphing.randn(4, seed=seed)
        generator = torch.Generator(graphing.device).manual_seed(seed)
        assert torch.equal(module(x, generator=generator), x * 2 + 1)
    component = dit_graphs.stats(module)["components"]["denoiser"]
    assert component["replays"] == 5 and component["captures"] == 1


def test_a_draw_that_one_size_alone_makes_is_found(graphing: Where) -> None:
    """Sizes like an earlier one are captured without a pass of their own."""

    class Draws(nn.Module):
        def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
            if x.shape[0] < 5:
                return x + 1
            return x + torch.randn(x.shape, generator=generator, device=x.device)

    module = Draws()
    dit_graphs.wrap(module, backend=graphing.backend)
    for size in (3, 4, 6, 3, 6):
        for seed in range(3):
            mine = torch.Generator(graphing.device).manual_seed(seed)
            theirs = torch.Generator(graphing.device).manual_seed(seed)
            for index in range(4):
                x = graphing.randn(size, seed=index)
                noise = torch.randn(size, generator=theirs, device=graphing.device)
                expected = x + (1 if size < 5 else noise)
                assert torch.equal(module(x, mine), expected), (size, seed, index)
                if size >= 5:
                    assert torch.equal(mine.get_state(), theirs.get_state())
    assert dit_graphs.stats(module)["components"]["denoiser"]["replays"] >= 10


def test_a_generator_held_by_the_module(graphing: Where) -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator(graphing.device).manual_seed(1)

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rand(x.shape, generator=self.generator, device=x.device)

    module = Holds()
    dit_graphs.wrap(module, backend=graphing.backend)
    theirs = torch.Generator(graphing.device).manual_seed(1)
    for index in range(8):
        x = graphing.randn(4, seed=index)
        expected = x * torch.rand(4, generator=theirs, device=graphing.device)
        assert torch.equal(module(x), expected), f"call {index}"


def test_random_numbers_inside_a_break(breaking: Where) -> None:
    noise = eager_on_graph(lambda x: x + torch.rand_like(x))

    class Mixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return noise(x * torch.rand_like(x)) + torch.rand_like(x)

    twin = Twin(Mixed(), breaking)
    for index in range(7):
        twin(breaking.randn(3, seed=index))
    assert twin.replays == 4


def test_an_explicit_generator_inside_a_break(segmenting: Where) -> None:
    draw = eager_on_graph(
        lambda x, generator: x + torch.rand(x.shape, generator=generator, device=x.device)
    )

    class Mixed(nn.Module):
        def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
            return draw(x * 2, generator)

    module = Mixed()
    dit_graphs.wrap(module, backend=segmenting.backend)
    mine = torch.Generator(segmenting.device).manual_seed(3)
    theirs = torch.Generator(segmenting.device).manual_seed(3)
    for index in range(8):
        x = segmenting.randn(4, seed=index)
        expected = x * 2 + torch.rand(4, generator=theirs, device=segmenting.device)
        assert torch.equal(module(x, mine), expected), f"call {index}"


def test_dropout_in_a_training_module(where: Where) -> None:
    twin = Twin(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), where)
    twin.module.train()
    twin.plain.train()
    for index in range(7):
        twin(where.randn(3, 8, seed=index))
    assert twin.replays == 4


def test_a_failed_capture_leaves_the_stream_alone(graphing: Where) -> None:
    class Reads(Noisy):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * super().forward(x).max().item()

    twin = Twin(Reads(), graphing)
    for index in range(6):
        twin(graphing.randn(3, 8, seed=index))
    assert twin.replays == 0


@pytest.mark.parametrize("draws", [True, False])
def test_what_was_captured_without_a_pass_is_known_to_draw_once_it_was_compared(
    where: Where, draws: bool
) -> None:
    """Until then each replay would have to be undone where it is given up."""

    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + (torch.rand_like(x) if draws else 1)

    twin = Twin(Noisy(), where)
    for rows in (3, 5):
        with dit_graphs.request(8):
            for step in range(8):
                twin(where.randn(rows, 8, seed=step))
    unwatched = [entry for entry in twin.runner.cache.held() if entry.observation is None]
    assert len(unwatched) == (0 if where.backend == "debug" else 1)
    assert all(entry.has_effects is draws for entry in unwatched)
