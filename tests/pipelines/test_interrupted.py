"""A pipeline call that raises leaves no request behind."""

from __future__ import annotations

import pytest
import tiny
import torch

import dit_graphs
from dit_graphs.request_scope import current_request


def test_weights_replaced_after_a_failed_call_are_seen_by_a_bare_call() -> None:
    pipe = tiny.build("wan")
    arguments = tiny.call_kwargs("wan", steps=6)
    call = tiny.denoiser_calls(pipe, arguments)[0]
    dit_graphs.accelerate(pipe, backend="recorded", capture="first_use")

    def stop(pipe: object, step: int, time: object, values: dict[str, object]) -> dict[str, object]:
        if step == 4:
            raise KeyboardInterrupt
        return values

    with pytest.raises(KeyboardInterrupt):
        pipe(**arguments, callback_on_step_end=stop)
    assert current_request() is None
    with torch.no_grad():
        parameter = next(pipe.transformer.parameters())
        parameter.data = parameter.data * 2.0
        got = call()[0]
        with dit_graphs.disabled(pipe):
            expected = call()[0]
    assert torch.equal(got, expected)
