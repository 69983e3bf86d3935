"""Owns `DecodeRunner`: prompts in slots, one token per row and step, from graphs.

Must never know transformers. The surprising fact: a step is two graphs. One runs the model and
fills the logits buffer, for a bucket of rows; the other chooses tokens, for exactly the rows there
are, so that a seed draws the same numbers whatever the bucket.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from ..config import GraphConfig
from ..counters import log
from ..errors import CaptureAborted, GraphError, Reason
from ..memory import device_state
from ..module_watch import Change, ModuleWatch
from ..watch import BreakPolicy
from .buckets import batch_bucket, default_max_rows, device_memory, slot_length
from .decode_stats import DecodeStats
from .kv import SlotCache
from .model import LanguageModel
from .passes import PassRunner
from .sampling import GREEDY, Sampling
from .state import MAX_EOS, DecodeState
from .writing import OnTokens, Prefill, Prompt, Writing

__all__ = ["DecodeRunner", "Prompt"]

_TABLE_STEP = 64  # columns; position tables are as wide as a multiple of it
_PATIENCE_S = 2.0


class DecodeRunner:
    """Writes texts with one model. One `generate` at a time; others wait.

    Not for ever: whoever reads along may itself wait for another text, which then is eager.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: GraphConfig,
        *,
        label: str = "decode",
        watch: ModuleWatch | None = None,
        policy: BreakPolicy | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.stats = DecodeStats(label)
        self.disabled = 0
        self.lock = threading.RLock()
        self.watch = watch if watch is not None else ModuleWatch(model.module)
        self.change: Change | None = None  # what the last look at the module found
        self._writer: int | None = None  # the thread that writes a text now
        self._told_at: float | None = None  # since when its reader has had the word
        self._policy = policy
        self._settle_on(model.device)

    def _settle_on(self, device: torch.device) -> None:
        self.device = device
        self.state = device_state(device)
        self.backend = _resolve(self.config, device)
        self.cache: SlotCache | None = None
        self.rows: DecodeState | None = None
        self.passes = PassRunner(
            self.model.module, self.state, self.config, backend=self.backend,
            component="decode", stats=self.stats, policy=self._policy,
        )  # fmt: skip

    # Before a call.
    def refusal(self) -> tuple[Reason, str] | None:
        """Why no graph can write now, or None; graphs of moved weights are dropped."""
        if self.disabled or self.backend == "off":
            return Reason.DISABLED, ""
        if self._writer == threading.get_ident():
            return Reason.NESTED_REPLAY, "the reader of a text asked for another one"
        if self.config.is_switched_off():
            return Reason.KILL_SWITCH, ""
        here = self.model.device
        if here != self.device:
            self.release()
            self.state.retire_if_unused()
            self._settle_on(here)
        if self.backend == "none":
            return Reason.NO_CUDA, str(self.device)
        self.watch.ran_eager = True  # a model's own caches may move; weights are told apart
        self.change = change = self.watch.refresh(None)
        if change == "weights":
            self.model.forget_layout()
        if change == "weights" and self.passes.holds_graphs():
            self.passes.forget()
            self.stats.invalidations += 1
            log.info("%s: weights changed; graphs dropped", self.stats.component)
        elif change == "caches":
            self.passes.distrust()
        return self.watch.refusal

    def too_large(self, rows: int, tokens: int) -> tuple[Reason, str] | None:
        """Why a batch of `rows` texts of `tokens` has no bucket, or None."""
        with self._turn():
            return self._too_large(rows, tokens)

    def _too_large(self, rows: int, tokens: int) -> tuple[Reason, str] | None:
        self._fit_model()
        budget = self.config.budget_for("decode")
        needed = rows * slot_length(tokens, 0) * self.slots().token_bytes
        if budget != "auto" and needed > budget:
            detail = f"{needed >> 10} KiB of keys and values, {budget >> 10} KiB are allowed"
            return Reason.MEMORY_BUDGET, detail
        limit = self.max_rows(tokens)
        if batch_bucket(rows, limit) is None:
            return Reason.ABOVE_MAX_SIZE, f"{rows} rows, max_size['decode'] is {limit}"
        return None

    def max_rows(self, tokens: int) -> int:
        """The largest bucket at a context of `tokens`."""
        asked = (self.config.max_size or {}).get("decode")
        if asked is not None:
            return asked
        cache = self.slots()
        total, free = device_memory(self.device)
        bytes_of_slot = cache.token_bytes * slot_length(tokens, 0)
        rows = default_max_rows(
            total_bytes=total, free_bytes=free + cache.nbytes, slot_bytes=bytes_of_slot
        )
        return max(rows, cache.slots if tokens <= cache.capacity else 1)

    def slots(self) -> SlotCache:
        """The slots, laid out for this model; nothing is allocated before a call needs it."""
        if self.cache is None:
            self.cache = SlotCache(self.model.layout(), self.device)
        return self.cache

    def _fit_model(self) -> None:
        """Slots and rows laid out for what the model was before are given back."""
        layout, cache, rows = self.model.layout(), self.cache, self.rows
        is_wider = rows is not None and rows.logits.shape[1] != self.model.vocabulary
        if is_wider or (cache is not None and cache.layout != layout):
            self.release()

    # One call.
    def generate(
        self,
        prompt: Prompt,
        prefill: Prefill,
        *,
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        eos: Sequence[int] = (),
        pad: int = 0,
        on_tokens: OnTokens | None = None,
    ) -> Tensor:
        """The new tokens, int64 [B, n ≤ max_new_tokens]; after a row's end only `pad`.

        `on_tokens` gets them as they are written, column by column, on the host; it may raise.

        `prefill(store)` reads the prompts, storing their keys and values, and returns the last
        tokens' logits [B, vocabulary]. Raises `GraphError` before any device work where the batch
        has no bucket, and `CaptureAborted` where the text being written waits for its reader.
        """
        rows = len(prompt.lengths)
        self._check(prompt, max_new_tokens, eos)
        reserved = prompt.reserved(max_new_tokens)
        told = partial(self._tell, on_tokens) if on_tokens is not None else None
        with self._writing(), torch.no_grad():
            clock = self.state.stopwatch()
            bucket = batch_bucket(rows, self.max_rows(reserved))
            assert bucket is not None
            self._reserve(bucket, reserved, prompt.table_shape)
            eager = self.stats.eager_calls
            writing = Writing(self, prompt, bucket, sampling, max_new_tokens)
            writing.read(prefill, eos, pad)
            writing.choose()
            clock.stop()
            tokens = writing.write(can_end=bool(eos), on_tokens=told)
            self.stats.finish(
                clock.elapsed_ms(wait=True), rows=rows, bucket=bucket, lengths=prompt.lengths,
                width=prompt.width, new_tokens=tokens.shape[1],
            )  # fmt: skip
            if self.stats.eager_calls > eager:  # a replay changes nothing on the module
                self.watch.adopt_changes()
        return tokens

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Inside, no other thread writes. Raises `CaptureAborted` where waiting may be in vain."""
        while not self.lock.acquire(timeout=_PATIENCE_S):
            since = self._told_at
            if since is not None and time.monotonic() - since >= _PATIENCE_S:
                raise CaptureAborted(Reason.NESTED_REPLAY, "a text is held up by its reader")
        try:
            yield
        finally:
            self.lock.release()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Inside, this thread writes a text."""
        with self._turn():
            self._writer = threading.get_ident()
            try:
                yield
            finally:
                self._writer = None

    def _tell(self, on_tokens: OnTokens, column: Tensor) -> None:
        self._told_at = time.monotonic()
        try:
            on_tokens(column)
        finally:
            self._told_at = None

    def _check(self, prompt: Prompt, max_new_tokens: int, eos: Sequence[int]) -> None:
        if max_new_tokens < 1:
            raise GraphError(f"max_new_tokens: expected a number ≥ 1, got {max_new_tokens}")
        if min(prompt.lengths) < 1:
            raise GraphError("a prompt is empty: every row needs at least one token")
        if len(eos) > MAX_EOS:
            raise GraphError(f"{len(eos)} end tokens; at most {MAX_EOS} can be watched")
        large = self.too_large(len(prompt.lengths), prompt.reserved(max_new_tokens))
        if large is not None:
            raise GraphError(f"{large[0]}: {large[1]}")

    def _reserve(self, rows: int, tokens: int, table_shape: tuple[int, int]) -> None:
        """There are `rows` slots of `tokens`; larger ones are kept, others are made anew."""
        cache, held = self.slots(), self.rows
        slots = max(rows, cache.slots)
        if rows > cache.slots > 0:
            slots = max(rows, min(2 * cache.slots, self.max_rows(tokens)))
        length = max(slot_length(tokens, cache.length), cache.length)
        shape = (table_shape[0], -(-table_shape[1] // _TABLE_STEP) * _TABLE_STEP)
        fits = held is not None and held.has_table_for(*shape)
        if fits and (slots, length) == (cache.slots, cache.length):
            return
        self.passes.forget()
        self.rows = None
        if (slots, length) != (cache.slots, cache.length):
            self._allocate(cache, slots, length)
        self.rows = DecodeState(slots, length, self.model.vocabulary, shape, self.device)

    def _allocate(self, cache: SlotCache, slots: int, length: int) -> None:
        try:
            cache.allocate(slots, length)
        except torch.OutOfMemoryError:
            self.state.retire()
            try:
                cache.allocate(slots, length)
            except torch.OutOfMemoryError:
                needed = slots * length * cache.token_bytes
                raise CaptureAborted(
                    Reason.OUT_OF_MEMORY,
                    f"max_size['decode'] and the context ask for {slots} slots × {length} tokens "
                    f"= {needed >> 20} MiB of keys and values; lower one of them",
                ) from None
        log.info(
            "%s: %d slots × %d tokens × %d bytes = %.1f MiB", self.stats.component, slots, length,
            cache.token_bytes, cache.nbytes / 2**20,
        )  # fmt: skip

    def grow(self, cache: SlotCache, rows: DecodeState, tokens: int) -> DecodeState:
        """`cache` holds texts of `tokens`, and what it held; returns `rows` for it.

        Whoever was released while a text is written keeps neither.
        """
        self.passes.forget()
        cache.extend(slot_length(tokens, cache.length))
        longer = rows.extended(cache.length)
        if self.cache is cache:
            self.rows = longer
        log.info("%s: slots grew to %d tokens", self.stats.component, cache.length)
        return longer

    # After.
    def drop_graphs(self) -> int:
        """Closes every graph."""
        return self.passes.drop_graphs()

    def holds_graphs(self) -> bool:
        """Whether any graph is held."""
        return self.passes.holds_graphs()

    def release(self) -> None:
        """All memory of this runner is given back."""
        self.passes.forget()
        self.cache, self.rows = None, None

    def close(self) -> None:
        """As `release`; the last holder of graphs on the device also frees the pool."""
        self.release()
        self.state.holders.discard(self.passes)
        self.state.retire_if_unused()

    def mark_changed(self) -> None:
        """A mutator ran. Every call looks at the module; graphs of moved weights go at once."""
        if not (self.holds_graphs() and self.watch.has_moved()):
            return
        with self.state.gate.alone() as is_alone:
            if is_alone and self.lock.acquire(blocking=False):  # else a text is being written
                try:
                    if self._writer is not None:  # by this very thread
                        return
                    self.release()
                finally:
                    self.lock.release()
                self.stats.invalidations += 1
                self.state.retire_if_unused()

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Inside, every call is the model's own."""
        self.disabled += 1
        try:
            yield
        finally:
            self.disabled -= 1

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Inside, every bucket met is captured at once (also under warmup_only)."""
        before, self.passes.is_warming_up = self.passes.is_warming_up, True
        try:
            yield
        finally:
            self.passes.is_warming_up = before

    def report(self) -> dict[str, object]:
        """Counters, memory and one record per held graph, JSON-serialisable."""
        cache, rows = self.cache, self.rows
        return {
            **self.stats.as_dict(),
            "backend": self.backend,
            "device": str(self.device),
            "pool_bytes": self.state.pool_bytes(),
            "slots": cache.slots if cache is not None else 0,
            "slot_tokens": cache.length if cache is not None else 0,
            "slot_bytes": cache.slot_bytes if cache is not None else 0,
            "kv_bytes": cache.nbytes if cache is not None else 0,
            "row_bytes": rows.nbytes if rows is not None else 0,
            "graphs": self.passes.records(),
        }

    def explain_misses(self) -> Iterator[str]:
        """Buckets without a graph, and why."""
        for held in self.passes.held.values():
            if not held.entry.is_held and held.entry.blocked is not None:
                reason, detail = held.entry.blocked
                yield f"  no graph for {held.used.name}: {reason}: {detail}".rstrip()


def _resolve(config: GraphConfig, device: torch.device) -> str:
    name = config.backend_for("decode")
    if name == "off" or device.type == "cuda" or name in ("recorded", "debug"):
        return name
    return "none"
