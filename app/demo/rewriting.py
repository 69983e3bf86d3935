"""Owns the step from a short prompt to a longer one, shown while it is being written.

Must never know the page. The surprising fact: not every text encoder can write. Only a causal
language model with a chat template decodes; for the others the button is not there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from diffusers import DiffusionPipeline

__all__ = ["can_rewrite", "rewrite"]


def can_rewrite(pipe: DiffusionPipeline) -> bool:
    """Whether the pipeline's text encoder is a language model that can answer a prompt."""
    encoder, tokenizer = getattr(pipe, "text_encoder", None), getattr(pipe, "tokenizer", None)
    can_generate = getattr(encoder, "can_generate", None)
    has_template = bool(getattr(tokenizer, "chat_template", None))
    return has_template and callable(can_generate) and bool(can_generate())


def rewrite(
    pipe: DiffusionPipeline,
    prompt: str,
    *,
    seed: int = 0,
    max_new_tokens: int = 96,
    on_text: Callable[[str], None] = lambda text: None,
) -> str:
    """A longer prompt. `on_text` gets the text so far after each token and may raise to stop."""
    tokenizer, encoder = pipe.tokenizer, pipe.text_encoder
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    ).to(encoder.device)
    writer = _Writer(tokenizer, on_text)
    torch.manual_seed(seed)
    with torch.inference_mode():
        encoder.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=False,
            streamer=writer,
        )
    return writer.text or prompt


class _Writer:
    """What `generate` hands its tokens to."""

    def __init__(self, tokenizer: object, on_text: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._on_text = on_text
        self._tokens: list[int] = []
        self._is_prompt = True
        self.text = ""

    def put(self, value: torch.Tensor) -> None:
        """One more token, or the prompt itself, which comes first."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self._tokens += value.flatten().tolist()
        decode = self._tokenizer.decode  # type: ignore[attr-defined]
        self.text = str(decode(self._tokens, skip_special_tokens=True)).strip()
        self._on_text(self.text)

    def end(self) -> None:
        """No more tokens."""
