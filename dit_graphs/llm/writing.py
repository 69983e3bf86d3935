"""Owns one call of a decode: its prompt, its bucket, how far the text has come.

Must never know which model writes. The surprising fact: the text may be longer than was asked of
the device when the loop stops, because the host looks at the stop flags only every few steps; what
lies behind the last end is cut off, and the random numbers it drew are given back.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..ambient import ambient_state
from ..config import GraphConfig
from ..errors import FallbackError
from ..memory import DeviceState
from ..module_watch import ModuleWatch
from .buckets import context_bucket
from .decode_stats import DecodeStats
from .forward_mode import ForwardMode, log_pass
from .kv import SlotCache
from .model import LanguageModel
from .passes import PassRunner
from .prefill import PromptStore, prompt_positions
from .sampling import Sampling, draw_noise
from .state import DecodeState
from .steps import choice_pass, model_pass
from .stop_flag import StopFlag

__all__ = ["RESERVED_AT_ONCE", "OnTokens", "Prefill", "Prompt", "Writer", "Writing"]

RESERVED_AT_ONCE = 1024  # new tokens; for a longer text the slots grow on the way
_POLL_EVERY = 4  # steps between two looks at the stop flags
_MARKS = 4  # chunks whose beginning is remembered: the flag is read up to two late
_CHUNK = 64  # steps between two looks at the slots' length where nothing can end a row

Prefill = Callable[[PromptStore], Tensor]
OnTokens = Callable[[Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """A batch of prompts, as the host knows it.

    `lengths`: real tokens per row. `width`: columns of the batch; row i is its last `lengths[i]`.
    `table()`: int64 [P, B, n], asked for once the prompt was read: the position number of the i-th
    token to be written; behind the last column numbers go on by one. `table_shape`: its P and n.
    `is_flat`: the model takes positions as [B, T], not [P, B, T]. `seen`: bool [B, vocabulary],
    tokens a repetition penalty knows already.
    """

    lengths: tuple[int, ...]
    width: int
    table: Callable[[], Tensor]
    table_shape: tuple[int, int] = (1, 1)
    is_flat: bool = True
    seen: Tensor | None = None

    def reserved(self, max_new_tokens: int) -> int:
        """Positions a slot must have before the first step."""
        return max(self.lengths) + min(max_new_tokens, RESERVED_AT_ONCE)


class Writer(Protocol):
    """Whoever keeps slots, rows and graphs between calls."""

    model: LanguageModel
    config: GraphConfig
    state: DeviceState
    device: torch.device
    backend: str
    cache: SlotCache | None
    rows: DecodeState | None
    passes: PassRunner
    stats: DecodeStats
    watch: ModuleWatch

    def grow(self, cache: SlotCache, rows: DecodeState, tokens: int) -> DecodeState:
        """`cache` holds texts of `tokens`, and what it held; returns `rows` for it."""


class Writing:
    """One `generate`, from reading the prompt to the last token."""

    def __init__(
        self,
        runner: Writer,
        prompt: Prompt,
        bucket: int,
        sampling: Sampling,
        max_new_tokens: int,
    ) -> None:
        self.runner = runner
        self.prompt = prompt
        self.rows = len(prompt.lengths)
        self.bucket = bucket
        self.sampling = sampling
        self.max_new_tokens = max_new_tokens
        self.longest = max(prompt.lengths)
        self.written = 0
        # its own: whoever closes the runner meanwhile does not tear the text
        assert runner.cache is not None and runner.rows is not None
        self.cache, self.state = runner.cache, runner.rows
        self._plan(prompt.reserved(max_new_tokens))

    def _plan(self, tokens: int) -> None:
        """The passes of this bucket over the slots as they are now, for texts of `tokens`."""
        runner = self.runner
        self.context = context_bucket(tokens, self.cache.length)
        key = (ambient_state(runner.device), runner.watch.state_id, self.cache.generation)
        self.model_pass = model_pass(
            runner.model, self.cache, self.state, runner.state,
            rows=self.bucket, context=self.context, is_flat=self.prompt.is_flat, key=key,
        )  # fmt: skip
        self.choice_pass = choice_pass(
            self.state, runner.state, rows=self.rows, sampling=self.sampling, key=key
        )

    def read(self, prefill: Prefill, eos: Sequence[int], pad: int) -> None:
        """The slots hold the prompts, and the logits buffer what follows them."""
        prompt, state = self.prompt, self.state
        positions = prompt_positions(
            prompt.lengths, prompt.width, self.cache.trash, self.runner.device
        )
        logits = prefill(PromptStore(self.cache, positions))
        state.begin(
            prompt.lengths, prompt.table(), eos=eos, pad=pad, max_new_tokens=self.max_new_tokens
        )
        if self.sampling.penalises:
            seen = state.keep_seen()
            seen.zero_()
            if prompt.seen is not None:
                seen[: self.rows].copy_(prompt.seen)
        state.logits[: self.rows].copy_(logits)
        state.start_writing(self.rows)

    def choose(self) -> None:
        """Every row has one more token."""
        self.runner.passes.serve(self.choice_pass, steps_left=self._steps_left)
        self.written += 1

    @property
    def _steps_left(self) -> int:
        return self.max_new_tokens - self.written

    def step(self) -> None:
        """The logits buffer holds what follows the current tokens.

        Raises `FallbackError` where strict and the step is eager.
        """
        runner = self.runner
        reason = runner.passes.serve(self.model_pass, steps_left=self._steps_left)
        if reason is None:
            runner.stats.count_replay()
        else:
            runner.stats.count_eager(reason, self.model_pass.name)
            if runner.config.strict and not reason.is_asked_for:
                raise FallbackError(reason, self.model_pass.name)
        length = self.longest + self.written
        log_pass(
            runner.stats.component, ForwardMode.DECODE,
            f"rows {self.rows}/{self.bucket}, context {length}/{self.context}",
            from_graph=reason is None and runner.backend != "debug", device=runner.device,
        )  # fmt: skip

    def write(self, *, can_end: bool, on_tokens: OnTokens | None = None) -> Tensor:
        """Steps until every row has ended, or to the limit; the new tokens [B, n].

        `on_tokens` gets them as they come, one column [B] on the host after the other.
        """
        stop, replays = StopFlag(self.runner.device), self.runner.stats.replays
        marks: deque[tuple[int, list[Tensor]]] = deque(maxlen=_MARKS)
        told = self._tell(on_tokens, 0)
        while self.written < self.max_new_tokens:
            if can_end:
                stop.post(self.state.finished[: self.rows].all())
                if stop.is_set():
                    break
            if self.sampling.do_sample:
                marks.append((self.written, self.runner.state.random_state()))
            is_watched = can_end or on_tokens is not None
            chunk = min(_POLL_EVERY if is_watched else _CHUNK, self._steps_left)
            self._fit(self.longest + self.written + chunk)
            for _ in range(chunk):
                self.step()
                self.choose()
            told = self._tell(on_tokens, told)
        count = int(self.state.stop_at[: self.rows].max())  # sync: the text is complete
        if marks and count < self.written:
            self._rewind(marks, count)
        self._log(count, self.runner.stats.replays - replays)
        return self.state.text[: self.rows, :count].clone()

    def _tell(self, on_tokens: OnTokens | None, told: int) -> int:
        """Hands out the columns that were written since; returns how many there are now."""
        if on_tokens is None:
            return told
        end = int(self.state.stop_at[: self.rows].max())  # sync: somebody reads along
        count = min(self.written, end)
        for column in self.state.text[: self.rows, told:count].cpu().unbind(dim=1):
            on_tokens(column)
        return count

    def _fit(self, tokens: int) -> None:
        if tokens > self.cache.capacity:
            self.state = self.runner.grow(self.cache, self.state, tokens)
            self._plan(tokens)
        elif tokens > self.context < self.cache.length:
            self._plan(tokens)

    def _rewind(self, marks: Sequence[tuple[int, list[Tensor]]], count: int) -> None:
        """The generator stands where it would without the steps behind the last end."""
        since, random = next(mark for mark in reversed(marks) if mark[0] <= count)
        self.runner.state.set_random_state(random)
        for _ in range(count - since):
            draw_noise(self.state.logits[: self.rows])

    def _log(self, count: int, replays: int) -> None:
        runner = self.runner
        log_pass(
            runner.stats.component, ForwardMode.DECODE,
            f"{count} tokens × {self.rows} rows (bucket {self.bucket}, context {self.context}), "
            f"{replays} steps from a graph",
            from_graph=replays > 0 and runner.backend != "debug",
            device=runner.device, level=logging.INFO,
        )  # fmt: skip
