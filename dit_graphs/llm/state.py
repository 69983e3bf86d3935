"""Owns what a decode knows of each row, in static tensors that its graphs read and advance.

Must never know models. The surprising fact: the host never learns a token while rows are being
written. Positions, counters, stop flags and the text itself live on the device; the host reads one
flag every few steps and the text once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .sampling import Sampling, choose

__all__ = ["MAX_EOS", "DecodeState"]

MAX_EOS = 16


class DecodeState:
    """Rows of one decode. All tensors have one entry per slot; int64 unless said otherwise.

    `position`: where the current token's keys and values go. `written`: tokens chosen so far.
    `table`: [P, slots, width], the position number of the i-th chosen token, as the model counts;
    behind its last column numbers go on by one.
    """

    def __init__(
        self,
        slots: int,
        length: int,
        vocabulary: int,
        table_shape: tuple[int, int],
        device: torch.device,
    ) -> None:
        self.device = device
        self.slots = slots
        self.table_shape = table_shape
        self.trash = length - 1
        kinds, width = table_shape
        with torch.inference_mode(False):

            def ints(*shape: int) -> Tensor:
                return torch.zeros(shape, dtype=torch.int64, device=device)

            self.token, self.position, self.written = ints(slots), ints(slots), ints(slots)
            self.stop_at = ints(slots)
            self.text = ints(slots, length)
            self.table, self.table_end = ints(kinds, slots, width), ints(1)
            self.eos, self.pad = ints(MAX_EOS), ints(1)
            self.finished = torch.zeros(slots, dtype=torch.bool, device=device)
            self.logits = torch.zeros((slots, vocabulary), dtype=torch.float32, device=device)
            self.seen: Tensor | None = None
        self._span = torch.arange(length, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.token, self.position, self.written, self.stop_at, self.text, self.table)
        others = (self.table_end, self.eos, self.pad, self.finished, self.logits, self._span)
        return sum(t.nbytes for t in (*tensors, *others, self.seen) if t is not None)

    def begin(
        self,
        lengths: Sequence[int],
        table: Tensor,
        *,
        eos: Sequence[int],
        pad: int,
        max_new_tokens: int,
    ) -> None:
        """Rows hold prompts of `lengths` tokens and nothing is written; other rows are padding.

        `table`: [P, B, n], n at most the width of the state's table.
        """
        rows = len(lengths)
        self.rest()
        # "cpu" by name: the default device may be any
        last = torch.tensor([n - 1 for n in lengths], dtype=torch.int64, device="cpu")
        self.position[:rows].copy_(last)
        self.stop_at.fill_(max_new_tokens)
        self.table[:, :rows, : table.shape[-1]].copy_(table)
        self.table_end.fill_(table.shape[-1] - 1)
        self.eos.fill_(-1)
        self.eos[: len(eos)].copy_(torch.tensor(list(eos), dtype=torch.int64, device="cpu"))
        self.pad.fill_(pad)

    def has_table_for(self, kinds: int, width: int) -> bool:
        """Whether a position table of this shape has room."""
        return self.table_shape[0] == kinds and self.table_shape[1] >= width

    def rest(self) -> None:
        """Every row is padding: it writes to the trash position and has chosen one token."""
        self.token.zero_()
        self.position.fill_(self.trash)
        self.written.fill_(1)
        self.finished.zero_()
        self.table.zero_()

    def start_writing(self, rows: int) -> None:
        """The next choice is the first of each of these rows."""
        self.written[:rows].zero_()

    def keep_seen(self) -> Tensor:
        """The mask of tokens seen, allocated on first use: bool [slots, vocabulary]."""
        if self.seen is None:
            with torch.inference_mode(False):
                self.seen = torch.zeros(self.logits.shape, dtype=torch.bool, device=self.device)
        return self.seen

    def extended(self, length: int) -> DecodeState:
        """A copy with room for texts of `length`; what rows hold is kept."""
        longer = DecodeState(
            self.slots, length, self.logits.shape[1], self.table_shape, self.device
        )
        for name in ("token", "position", "written", "stop_at", "table", "table_end"):
            getattr(longer, name).copy_(getattr(self, name))
        for name in ("eos", "pad", "finished", "logits"):
            getattr(longer, name).copy_(getattr(self, name))
        longer.text[:, : self.text.shape[1]].copy_(self.text)
        if self.seen is not None:
            longer.keep_seen().copy_(self.seen)
        return longer

    # What graphs run.
    def positions_now(self, rows: int) -> Tensor:
        """[P, rows, 1]: the position numbers of the current tokens."""
        at = (self.written[:rows] - 1).clamp(min=0)
        known = torch.minimum(at, self.table_end)
        kinds = self.table_shape[0]
        numbers = self.table[:, :rows].gather(-1, known.expand(kinds, rows).unsqueeze(-1))
        return numbers + (at - known)[None, :, None]

    def allowed(self, rows: int, context: int, window: int | None) -> Tensor:
        """Bool [rows, 1, 1, context]: which positions the current tokens attend to."""
        here = self.position[:rows, None]
        span = self._span[None, :context]
        inside = span <= here
        if window is not None:
            inside = inside & (span > here - window)
        return inside[:, None, None, :]

    def advance(self, rows: int, sampling: Sampling) -> None:
        """Each row's next token is chosen from its logits and becomes the current one."""
        seen = self.seen[:rows] if sampling.penalises and self.seen is not None else None
        chosen = choose(self.logits[:rows], sampling, seen)
        finished, written = self.finished[:rows], self.written[:rows]
        token = torch.where(finished, self.pad, chosen)
        ends = (token[:, None] == self.eos).any(dim=-1) & ~finished
        self.text[:rows].scatter_(1, written[:, None], token[:, None])
        if seen is not None:
            seen.scatter_(1, token[:, None], True)
        written.add_(1)
        self.stop_at[:rows].copy_(torch.where(ends, written, self.stop_at[:rows]))
        finished.logical_or_(ends)
        self.position[:rows].add_(1)
        self.token[:rows].copy_(token)

    def advanced(self, rows: int) -> list[Tensor]:
        """The tensors `advance` writes, as views."""
        tensors = [self.token, self.position, self.written, self.stop_at, self.finished]
        tensors.append(self.text)
        if self.seen is not None:
            tensors.append(self.seen)
        return [tensor[:rows] for tensor in tensors]
