"""Owns what `generate()` was asked for: read from what transformers prepared, or refused by name.

Must never know graphs. The surprising fact: the answer is never taken from arguments alone.
transformers merges them with the model's own generation config (Qwen2.5-VL's asks for a repetition
penalty that no pipeline mentions), so what counts are the processors and criteria it has built.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation import logits_process, stopping_criteria

from dit_graphs.errors import Reason
from dit_graphs.llm import Sampling
from dit_graphs.llm.state import MAX_EOS

from .encode_call import CACHES

__all__ = ["Asked", "Refused", "left_lengths", "read", "refused_before"]

_MODES = (
    "num_beams",
    "num_beam_groups",
    "prompt_lookup_num_tokens",
    "penalty_alpha",
    "dola_layers",
    "assistant_early_exit",
    "constraints",
    "force_words_ids",
)
# a cache is filled for whoever gave it; slots fill none
_PARTNERS = ("assistant_model", "synced_gpus", "custom_generate", "inputs_embeds", *CACHES)
_ORDER = (
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
)
_MAX_NEW_TOKENS = 1 << 20


class Refused(Exception):
    """These arguments go to transformers; `reason` and `detail` say why."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One call of `generate()`. `penalty`: the repetition processor, where there is one."""

    sampling: Sampling
    max_new_tokens: int
    eos: tuple[int, ...]
    pad: int
    lengths: tuple[int, ...]
    penalty: object | None


def refused_before(arguments: Mapping[str, object], config: object) -> str | None:
    """The argument that asks for more than one token after the other in our slots, or None."""
    for name in _PARTNERS:
        value = arguments.get(name)
        if value is not None and value is not False:  # never `==`: a tensor compares element-wise
            return name
    given = arguments.get("generation_config")
    for name in _MODES:
        value = arguments.get(name, getattr(given if given is not None else config, name, None))
        if value not in (None, 0, 1, False):
            return f"{name}={value!r}"
    return None


def read(
    input_ids: Tensor,
    processors: Sequence[object],
    criteria: Iterable[object],
    config: object,
    model_kwargs: Mapping[str, object],
) -> Asked:
    """What was asked for. Raises `Refused` with the first thing that decode graphs do not have."""
    _check_config(config)
    sampling, penalty = _sampling(processors, bool(getattr(config, "do_sample", False)))
    limit, eos = _stops(criteria)
    max_new_tokens = limit - input_ids.shape[1]
    if not 1 <= max_new_tokens <= _MAX_NEW_TOKENS:
        raise Refused(Reason.GENERATE_ARGUMENT, f"{max_new_tokens} new tokens")
    mask = model_kwargs.get("attention_mask")
    pad = getattr(config, "_pad_token_tensor", None)
    return Asked(
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        eos=eos,
        pad=int(pad) if pad is not None else 0,  # sync: once per call
        lengths=left_lengths(input_ids, mask),
        penalty=penalty,
    )


def _check_config(config: object) -> None:
    for name in ("return_dict_in_generate", "prefill_chunk_size", "cache_implementation"):
        value = getattr(config, name, None)
        if value not in (None, False, "dynamic"):
            raise Refused(Reason.GENERATE_ARGUMENT, f"{name}={value!r}")
    keeps = getattr(config, "use_cache", True)
    if not keeps:  # None too, which some forwards take for "no"
        raise Refused(Reason.GENERATE_ARGUMENT, f"use_cache={keeps!r}")
    if getattr(config, "is_assistant", False):
        raise Refused(Reason.GENERATE_ARGUMENT, "is_assistant")


def _sampling(processors: Sequence[object], do_sample: bool) -> tuple[Sampling, object | None]:
    found: dict[type, object] = {}
    last = -1
    for processor in processors:
        kind = type(processor)
        rank = _ORDER.index(kind) if kind in _ORDER else -1
        if rank <= last:
            raise Refused(Reason.GENERATE_ARGUMENT, f"{kind.__name__} in this place")
        if getattr(processor, "filter_value", -float("inf")) != -float("inf"):
            raise Refused(Reason.GENERATE_ARGUMENT, f"{kind.__name__}.filter_value")
        if getattr(processor, "min_tokens_to_keep", 1) != 1:
            raise Refused(Reason.GENERATE_ARGUMENT, f"{kind.__name__}.min_tokens_to_keep")
        found[kind] = processor
        last = rank
    penalty, heat, best, mass = (found.get(kind) for kind in _ORDER)
    sampling = Sampling(
        do_sample=do_sample,
        temperature=float(getattr(heat, "temperature", 1.0)),
        top_k=int(getattr(best, "top_k", 0)),
        top_p=float(getattr(mass, "top_p", 1.0)),
        repetition_penalty=float(getattr(penalty, "penalty", 1.0)),
    )
    return sampling, penalty


def _stops(criteria: Iterable[object]) -> tuple[int, tuple[int, ...]]:
    limit: int | None = None
    eos: list[int] = []
    for criterion in criteria:
        if type(criterion) is stopping_criteria.MaxLengthCriteria:
            limit = math.ceil(cast(Any, criterion).max_length)  # which may be a fraction
        elif type(criterion) is stopping_criteria.EosTokenCriteria:
            ids: Tensor = cast(Any, criterion).eos_token_id
            eos += ids.flatten().tolist()  # sync: once per call
        else:
            raise Refused(Reason.GENERATE_ARGUMENT, type(criterion).__name__)
    if limit is None:
        raise Refused(Reason.GENERATE_ARGUMENT, "no max_length")
    if len(eos) > MAX_EOS:
        raise Refused(Reason.GENERATE_ARGUMENT, f"{len(eos)} end tokens")
    return limit, tuple(eos)


def left_lengths(input_ids: Tensor, mask: object) -> tuple[int, ...]:
    """Real tokens per row of a left-padded batch. Raises `Refused` for any other padding."""
    rows, width = input_ids.shape
    if not rows or not width:
        raise Refused(Reason.PADDING, "no prompt")
    if mask is None:
        return (width,) * rows
    if not isinstance(mask, Tensor) or mask.shape != input_ids.shape:
        raise Refused(Reason.GENERATE_ARGUMENT, "an attention mask of another shape")
    real = (mask != 0).to("cpu")  # sync: once per call
    lengths = real.sum(dim=1)
    if int(lengths.min()) < 1:
        raise Refused(Reason.PADDING, "a row without any token")
    if not bool(real[:, -1].all()):
        raise Refused(
            Reason.PADDING,
            "right padding: a text would go on behind the padding; set padding_side='left'",
        )
    if not torch.equal(
        real, torch.arange(width, device="cpu")[None, :] >= width - lengths[:, None]
    ):
        raise Refused(Reason.PADDING, "holes in the attention mask")
    return tuple(int(length) for length in lengths)
