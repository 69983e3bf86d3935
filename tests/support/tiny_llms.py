"""Tiny language models of every class that diffusers pipelines encode or write with.

Random weights spread wide enough that greedy decoding does not fall into one repeated token.
Owns sizes only. The surprising fact: a few initialisers scale so small that any two prompts give
the same text; every matrix is therefore drawn again.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers as tf
from packaging.version import Version
from torch import nn

HIDDEN = 32
VOCABULARY = 96
PAD, EOS = 0, 1
WINDOW = 16

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "eos_token_id": EOS,
}
Options = dict[str, object]
TRANSFORMERS = Version(tf.__version__)
_VISION = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "image_size": 28,
    "patch_size": 14,
}


def _last(text: Options) -> int:
    """Special tokens of image models are the last ones of the vocabulary."""
    return int(str(text["vocab_size"]))


def _qwen3(text: Options) -> nn.Module:
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**text))


def _qwen3_sliding(text: Options) -> nn.Module:
    layers = ["full_attention", "sliding_attention", "sliding_attention"]
    config = tf.Qwen3Config(
        **text, use_sliding_window=True, sliding_window=WINDOW, layer_types=layers
    )
    return tf.Qwen3ForCausalLM(config)


def _llama(text: Options) -> nn.Module:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**text))


def _gemma2(text: Options) -> nn.Module:
    config = tf.Gemma2Config(**text, sliding_window=WINDOW, query_pre_attn_scalar=8)
    return tf.Gemma2ForCausalLM(config)


def _gemma3(text: Options) -> nn.Module:
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    config = tf.Gemma3TextConfig(
        **text, sliding_window=WINDOW, query_pre_attn_scalar=8, layer_types=layers
    )
    return tf.Gemma3ForCausalLM(config)


def _mistral(text: Options) -> nn.Module:
    return tf.MistralForCausalLM(tf.MistralConfig(**text, sliding_window=WINDOW))


def _ministral3(text: Options) -> nn.Module:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "llama_4_scaling_beta": 0.1,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    config = tf.Ministral3Config(**text, rope_parameters=rope, sliding_window=None)
    return tf.Ministral3ForCausalLM(config)


def _mistral3(text: Options) -> nn.Module:
    config = tf.Mistral3Config(
        text_config=tf.MistralConfig(**text, sliding_window=None),
        vision_config=tf.PixtralVisionConfig(**_VISION, head_dim=8),
        image_token_id=_last(text) - 1,
    )
    return tf.Mistral3ForConditionalGeneration(config)


def _qwen25_vl(text: Options) -> nn.Module:
    inner = {name: value for name, value in text.items() if name != "head_dim"}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
    config = tf.Qwen2_5_VLConfig(
        text_config={**inner, "rope_parameters": rope},
        vision_config={
            "depth": 1,
            "hidden_size": HIDDEN,
            "intermediate_size": 37,
            "num_heads": 4,
            "out_hidden_size": HIDDEN,
            "fullatt_block_indexes": [0],
        },
        vision_start_token_id=_last(text) - 4,
        vision_end_token_id=_last(text) - 3,
        video_token_id=_last(text) - 2,
        image_token_id=_last(text) - 1,
    )
    return tf.Qwen2_5_VLForConditionalGeneration(config)


def _gemma3_vl(text: Options) -> nn.Module:
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    inner = tf.Gemma3TextConfig(
        **text, sliding_window=WINDOW, query_pre_attn_scalar=8, layer_types=layers
    )
    config = tf.Gemma3Config(
        text_config=inner,
        vision_config=tf.SiglipVisionConfig(**_VISION),
        mm_tokens_per_image=4,
        image_token_index=_last(text) - 1,
        boi_token_index=_last(text) - 2,
        eoi_token_index=_last(text) - 3,
    )
    return tf.Gemma3ForConditionalGeneration(config)


def _t5(kind: type[nn.Module], config: type) -> nn.Module:
    options = {"d_model": HIDDEN, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4}
    return kind(config(vocab_size=VOCABULARY, **options))


DECODERS: dict[str, Callable[[Options], nn.Module]] = {
    "qwen3": _qwen3,
    "qwen3-sliding": _qwen3_sliding,
    "qwen2.5-vl": _qwen25_vl,
    "mistral": _mistral,
    "mistral3": _mistral3,
    "ministral3": _ministral3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3-vl": _gemma3_vl,
    "llama": _llama,
}
ENCODERS: dict[str, Callable[[Options], nn.Module]] = {
    "t5": lambda _: _t5(tf.T5EncoderModel, tf.T5Config),
    "umt5": lambda _: _t5(tf.UMT5EncoderModel, tf.UMT5Config),
}


def build(
    name: str, dtype: torch.dtype = torch.float32, seed: int = 0, vocabulary: int = VOCABULARY
) -> nn.Module:
    """A tiny model of that name, eval mode, on the CPU; the same weights for the same seed."""
    model = {**DECODERS, **ENCODERS}[name]({**_TEXT, "vocab_size": vocabulary})
    return spread(model.eval(), seed).to(dtype)


def spread(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model with every matrix drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5, generator=generator)
    return model


def prompts(lengths: list[int], *, seed: int = 0, side: str = "left") -> dict[str, torch.Tensor]:
    """Token ids [B, T] and their mask, padded on `side` to the longest of `lengths`."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.full((len(lengths), width), PAD)
    mask = torch.zeros((len(lengths), width), dtype=torch.long)
    for row, length in enumerate(lengths):
        tokens = torch.randint(3, VOCABULARY - 4, (length,), generator=generator)
        where = slice(width - length, width) if side == "left" else slice(0, length)
        ids[row, where], mask[row, where] = tokens, 1
    return {"input_ids": ids, "attention_mask": mask}


def needs_ready_masks(name: str) -> None:
    """Skips where this transformers lets UMT5 take no mask but its own: such a call stays eager."""
    if name == "umt5" and Version("5.15") > TRANSFORMERS:
        pytest.skip("UMT5 takes a mask that is ready from transformers 5.15 on")
