"""What must not be believed, and what must not pass in silence."""

from __future__ import annotations

import logging
from collections.abc import Callable

import diffusers
import pytest
import tiny
import torch
from torch import Tensor, nn
from twin import Twin, Where

import dit_graphs
from dit_graphs import FallbackError
from dit_graphs.memory import HostState
from dit_graphs.wrapping import runner_of


class RemembersSums(nn.Module):
    """Sums each mask once, known by its memory, in a place that no sweep of attributes reaches.

    While a graph is captured its mask is one, the static buffer, so the first mask's sum is baked
    in.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        memory = mask.untyped_storage()
        if memory._cdata not in _SUMS:  # kept in a way that no look for escapes sees
            _SUMS[memory._cdata] = memory, mask.sum()[None].untyped_storage()
        _, total = _SUMS[memory._cdata]
        return self.linear(x) / torch.empty(0, device=x.device).set_(total)


_SUMS: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}


def test_b09_a_baked_sum_passes_the_first_request_and_is_blocked_on_the_second(
    graphing: Where, caplog: pytest.LogCaptureFixture
) -> None:
    """In the first request the mask never changes: all compares are equal, and prove nothing of it.

    So trust is per input: the first call with another mask is compared as well.
    """
    twin = Twin(RemembersSums(), graphing)
    masks = [(graphing.randn(5, seed=seed) > 0).float() + 0.5 for seed in range(3)]
    with dit_graphs.request(total_steps=8):
        for step in range(8):
            twin(graphing.randn(3, 8, seed=step), masks[0])
    assert twin.replays == 5
    with caplog.at_level(logging.WARNING, logger="dit_graphs"):
        for number, mask in enumerate(masks[1:], start=1):
            with dit_graphs.request(total_steps=8):
                for step in range(8):
                    twin(graphing.randn(3, 8, seed=10 * number + step), mask)
    assert twin.replays == 5, "no replay since the mask changed"
    assert twin.fallbacks["verify_mismatch"] == 16
    assert twin.graphs == 0
    assert len([r for r in caplog.records if "verify_mismatch" in r.getMessage()]) == 1
    _SUMS.clear()


def _host_read() -> tuple[nn.Module, Callable[[int], tuple[object, ...]]]:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum().item() > 0 else x * 3

    return Reads(), lambda i: (torch.randn(3, generator=torch.Generator().manual_seed(i)),)


def _unknown_object() -> tuple[nn.Module, Callable[[int], tuple[object, ...]]]:
    class Takes(nn.Module):
        def forward(self, x: Tensor, options: object) -> Tensor:
            return x * 2

    return Takes(), lambda i: (torch.full((3,), float(i)), object())


def _varying_number() -> tuple[nn.Module, Callable[[int], tuple[object, ...]]]:
    class Scales(nn.Module):
        def forward(self, x: Tensor, scale: float) -> Tensor:
            return x * scale

    return Scales(), lambda i: (torch.full((3,), float(i)), 0.1 * i)


def _hooked() -> tuple[nn.Module, Callable[[int], tuple[object, ...]]]:
    module = nn.Linear(3, 3)
    module.register_forward_hook(lambda *args: None)
    return module, lambda i: (torch.full((3,), float(i)),)


def _compiled() -> tuple[nn.Module, Callable[[int], tuple[object, ...]]]:
    module = nn.Linear(3, 3)
    module.compile(backend="eager")
    return module, lambda i: (torch.full((3,), float(i)),)


def _changes_itself() -> tuple[nn.Module, Callable[[int], tuple[object, ...]]]:
    class Counts(nn.Module):
        calls: Tensor | int = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls = x.sum()
            return x + 1

    return Counts(), lambda i: (torch.full((3,), float(i)),)


_FALLBACKS = {
    "host_read": _host_read,
    "unsupported_argument": _unknown_object,
    "varying_scalar": _varying_number,
    "hooks": _hooked,
    "compiled": _compiled,
    "python_state": _changes_itself,
}


@pytest.mark.parametrize("reason", _FALLBACKS)
def test_strict_raises_what_explain_prints(reason: str) -> None:
    """Whoever asks for graphs only is told at the first call that cannot have one, and why."""
    module, make = _FALLBACKS[reason]()
    dit_graphs.wrap(module, backend="recorded", strict=True)
    with torch.no_grad(), pytest.raises(FallbackError) as caught, dit_graphs.request(8):
        for index in range(8):
            module(*make(index))
    assert caught.value.reason.value == reason
    assert str(caught.value) in dit_graphs.explain(module)
    runner = runner_of(module)
    assert runner is not None and runner.stats.replays == 0
    with torch.no_grad(), pytest.raises(FallbackError):
        module(*make(9))


def test_the_models_own_error_says_nothing_of_a_refused_graph() -> None:
    """An eager call because of an unknown argument, and the model itself fails: one traceback."""

    class Fails(nn.Module):
        def forward(self, x: Tensor, options: object) -> Tensor:
            try:
                raise KeyError("the model's")
            except KeyError:
                raise ValueError("no such option") from None

    module = Fails()
    dit_graphs.wrap(module, backend="recorded")
    with torch.no_grad(), pytest.raises(ValueError, match="no such option") as caught:
        module(torch.ones(2), object())
    assert isinstance(caught.value.__context__, KeyError), "its own history stays"
    assert caught.value.__context__.__context__ is None


def test_strict_raises_for_a_pipeline_with_what_explain_prints() -> None:
    pipe = tiny.build("flux")
    dit_graphs.accelerate(pipe, backend="recorded", strict=True, components=("denoiser",))
    tiny.latents(pipe, tiny.call_kwargs("flux", size=32))
    pipe.transformer.enable_cache(diffusers.TaylorSeerCacheConfig())
    with pytest.raises(FallbackError) as caught:
        tiny.latents(pipe, tiny.call_kwargs("flux", size=32))
    assert str(caught.value) in dit_graphs.explain(pipe)
    assert "TaylorSeer" in str(caught.value)


def test_b35_running_out_says_how_much_graphs_held(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch's own message calls that memory free: it lies in a pool of its own."""

    class Greedy(nn.Module):
        has_room = True

        def forward(self, x: Tensor) -> Tensor:
            if not self.has_room:
                raise torch.OutOfMemoryError("CUDA out of memory. 40 GiB free")
            return x + 1

    module = Greedy()
    dit_graphs.wrap(module, backend="recorded")
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="dit_graphs"):
        for index in range(5):
            module(torch.full((3,), float(index)))
        monkeypatch.setattr(HostState, "pool_bytes", lambda self: 96 << 20)
        Greedy.has_room = False
        with pytest.raises(torch.OutOfMemoryError):
            module(torch.ones(4))
    told = [r.getMessage() for r in caplog.records if "out of memory" in r.getMessage()]
    assert told and "96 MiB of graphs released" in told[0]
