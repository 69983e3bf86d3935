"""Owns the two passes of one step, as functions over slots and rows: run the model, choose tokens.

Must never know who calls them. The surprising fact: they close over the state, never over a call,
because a graph outlives the call it was captured in.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from ..memory import DeviceState
from .kv import SlotCache
from .model import LanguageModel
from .passes import Pass
from .prefill import StepStore
from .sampling import Sampling
from .state import DecodeState

__all__ = ["choice_pass", "model_pass"]


def model_pass(
    model: LanguageModel, cache: SlotCache, state: DecodeState, device: DeviceState,
    *, rows: int, context: int, is_flat: bool, key: Hashable,
) -> Pass:  # fmt: skip
    """Runs the model on the current tokens of the first `rows` slots; fills the logits buffer.

    `is_flat`: the model takes positions as [B, T], not [P, B, T].
    """

    def run() -> None:
        positions = state.positions_now(rows)
        allowed = {
            kind: state.allowed(rows, context, window) for kind, window in model.windows.items()
        }
        store = StepStore(cache, state.position[:rows, None], context)
        at = positions[0] if is_flat else positions
        logits = model.step(state.token[:rows, None], at, allowed, store)
        state.logits[:rows].copy_(logits[:, -1])

    def poison() -> None:
        state.logits[:rows].fill_(float("nan"))
        cache.poison(state.position[:rows])

    return Pass(
        name=f"DECODE {rows} rows, context {context}",
        path=("model", is_flat),
        key=("model", rows, context, is_flat, key),
        run=run,
        results=lambda: [state.logits[:rows]],
        witnesses=lambda: cache.at(state.position[:rows]),
        poison=poison,
        resting=lambda: _resting(state, device),
    )


def choice_pass(
    state: DecodeState, device: DeviceState, *, rows: int, sampling: Sampling, key: Hashable
) -> Pass:
    """Chooses the next token of the first `rows` rows from the logits buffer."""
    return Pass(
        name=f"choice of {rows} tokens, {_in_words(sampling)}",
        path=("choice", sampling),
        key=("choice", rows, sampling, key),
        run=lambda: state.advance(rows, sampling),
        results=lambda: state.advanced(rows),
        witnesses=list,
        poison=lambda: None,  # the results are put back to before the step, which differ
        resting=lambda: _resting(state, device),
    )


@contextmanager
def _resting(state: DecodeState, device: DeviceState) -> Iterator[None]:
    """Inside, every row is padding; rows, texts and random numbers are as before afterwards."""
    random = device.random_state()
    tensors = [*state.advanced(state.slots), state.table, state.logits]
    kept = [(tensor, tensor.clone()) for tensor in tensors]
    state.rest()
    try:
        yield
    finally:
        for tensor, before in kept:
            tensor.copy_(before)
        device.set_random_state(random)


def _in_words(sampling: Sampling) -> str:
    """`greedy` or `temperature 0.7, top_p 0.9`."""
    words = ["greedy"]
    if sampling.do_sample:
        words = [f"temperature {sampling.temperature}"]
        words += [f"top_k {sampling.top_k}"] if sampling.top_k else []
        words += [f"top_p {sampling.top_p}"] if sampling.top_p < 1.0 else []
    if sampling.penalises:
        words.append(f"repetition penalty {sampling.repetition_penalty}")
    return ", ".join(words)
