"""A loop of one's own, inside one request: whatever is exchanged counts from the next call on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from blend import Blend, again, inputs, skip, swap, table, turn
from torch import Tensor, nn
from twin import Twin, Where

import dit_graphs
from dit_graphs.wrapping import runner_of


def _assign(module: Blend) -> None:
    fresh = {name: weight * 2 for name, weight in module.state_dict().items()}
    module.load_state_dict(fresh, assign=True)


def _child_assign(module: Blend) -> None:
    fresh = {name: weight * 2 for name, weight in module.linear.state_dict().items()}
    module.linear.load_state_dict(fresh, assign=True)


def _move(module: Blend) -> None:
    module.linear.double().float()


def _write(module: Blend) -> None:
    module.linear.weight.data.mul_(2)


def _hook(module: Blend) -> None:
    module.act.register_forward_hook(lambda module, given, result: result * 2)


def _patch(module: Blend) -> None:
    own = module.act.forward
    module.act.forward = lambda x: own(x) * 2


@pytest.mark.parametrize("is_noisy", [False, True])
@pytest.mark.parametrize("at", range(1, 7))
@pytest.mark.parametrize(
    "change",
    [swap, turn, skip, table, again, _assign, _child_assign, _move, _write, _hook, _patch],
)
def test_the_next_call_of_a_request_by_hand_sees_it(
    change: Callable[[Blend], None], at: int, is_noisy: bool
) -> None:
    """Whatever the call would have done: plain, capture, compare or replay, with traces or not."""

    class Noisy(Blend):
        def forward(self, x: Tensor, row: Tensor) -> Tensor:
            y = super().forward(x, row)
            return y + torch.rand_like(y) if is_noisy else y

    module, plain = Noisy().eval(), Noisy().eval()
    dit_graphs.wrap(module, backend="recorded")
    with torch.no_grad(), dit_graphs.request(total_steps=12) as request:
        for step in range(12):
            if step == at:
                change(module)
                change(plain)
            results = []
            for each in (module, plain):
                torch.manual_seed(step)
                results.append(each(*inputs(step)))
                results.append(torch.rand(2))
            assert torch.equal(results[0], results[2]), step
            assert torch.equal(results[1], results[3]), step
    assert runner_of(module).stats.replays > 0 or change is _hook
    assert sum(request.calls.values()) <= 12, "a call that is made anew is one call"


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("at", range(1, 8))
def test_a_size_that_no_pass_was_watched_for_draws_once(at: int, verify: bool) -> None:
    """It was captured right after its plain step, as one of a code path that is known."""

    class Noisy(nn.Module):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale + torch.rand_like(x)

    twin = Twin(Noisy(), Where("recorded", torch.device("cpu")), verify=verify)
    with torch.no_grad():
        for size, change_at in ((3, None), (5, at)):
            with dit_graphs.request(total_steps=8):
                for step in range(8):
                    if step == change_at:
                        twin.module.scale = twin.plain.scale = 2.0
                    twin(twin.where.randn(size, seed=step))
    assert twin.captures == 3
