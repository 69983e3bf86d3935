"""Tokenizers and text encoders small enough to build in a test, from nothing but code.

Owns their vocabularies (single bytes) and sizes. Knows nothing of pipelines. The surprising fact:
`T5EncoderModel(config)` starts in training mode with dropout, so everything here is `.eval()`.
"""

from __future__ import annotations

import transformers as tf
from torch import nn

HIDDEN = 32
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
)


def _byte_characters() -> list[str]:
    """The 256 printable characters that byte-level tokenizers use for bytes, in byte order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def clip_tokenizer() -> tf.CLIPTokenizer:
    """Bytes, word-final bytes, start and end; the end has the largest id, as in the real one."""
    characters = _byte_characters()
    words = [*characters, *(f"{c}</w>" for c in characters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: index for index, word in enumerate(words)}
    return tf.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def t5_tokenizer() -> tf.T5Tokenizer:
    """SentencePiece over single ASCII characters, with `</s>` appended."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(chr(code), -3.0) for code in range(33, 127)]
    return tf.T5Tokenizer(vocab=pieces, extra_ids=0)


def qwen_tokenizer() -> tf.Qwen2Tokenizer:
    """Byte-level, right padded; its chat template puts one mark before and one after the text."""
    vocabulary = {character: index for index, character in enumerate(_byte_characters())}
    tokenizer = tf.Qwen2Tokenizer(
        vocab=vocabulary, merges=[], pad_token="<|endoftext|>", padding_side="right"
    )
    tokenizer.add_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def clip_text(*, projected: bool) -> nn.Module:
    """CLIPTextModel, or with a projection; pooled output and projection are HIDDEN wide."""
    tokenizer = clip_tokenizer()
    config = tf.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=37,
        num_hidden_layers=3,
        num_attention_heads=4,
        projection_dim=HIDDEN,
        max_position_embeddings=77,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = tf.CLIPTextModelWithProjection if projected else tf.CLIPTextModel
    return model(config).eval()


def _t5_options(width: int) -> dict[str, int]:
    return {
        "vocab_size": 128,
        "d_model": width,
        "d_kv": 8,
        "d_ff": 37,
        "num_layers": 2,
        "num_heads": 4,
    }


def t5_encoder(width: int = HIDDEN) -> nn.Module:
    """T5EncoderModel of that width."""
    return tf.T5EncoderModel(tf.T5Config(**_t5_options(width))).eval()


def umt5_encoder() -> nn.Module:
    """UMT5EncoderModel, HIDDEN wide."""
    return tf.UMT5EncoderModel(tf.UMT5Config(**_t5_options(HIDDEN))).eval()


def _qwen_text_options(tokenizer: tf.Qwen2Tokenizer) -> dict[str, int]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 37,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.convert_tokens_to_ids("<|im_start|>"),
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
    }


def qwen3() -> nn.Module:
    """Qwen3ForCausalLM: 4 layers, HIDDEN wide, 2 of 4 heads for keys and values."""
    config = tf.Qwen3Config(**_qwen_text_options(qwen_tokenizer()), head_dim=8)
    return tf.Qwen3ForCausalLM(config).eval()


def qwen25_vl() -> nn.Module:
    """Qwen2_5_VLForConditionalGeneration with a one-layer image tower."""
    tokenizer = qwen_tokenizer()
    config = tf.Qwen2_5_VLConfig(
        text_config={
            **_qwen_text_options(tokenizer),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [1, 1, 2],
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": HIDDEN,
            "intermediate_size": 37,
            "num_heads": 4,
            "out_hidden_size": HIDDEN,
            "fullatt_block_indexes": [0],
        },
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|im_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        image_token_id=len(tokenizer) - 1,
        video_token_id=len(tokenizer) - 1,
    )
    return tf.Qwen2_5_VLForConditionalGeneration(config).eval()
