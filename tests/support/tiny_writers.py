"""The diffusers pipelines that write text, with tiny language models and nothing to draw with.

Each case holds a pipeline and the call that makes it write. Owns tokenizers and processors (bytes
and a few special tokens). The surprising fact: the parts that draw may be None; these methods
touch only the language model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import diffusers as df
import tiny_llms
import torch
import transformers as tf
from diffusers.pipelines.longcat_image import pipeline_longcat_image as longcat
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn

TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class Writer:
    """`write(pipe)` makes `pipe` write; its answer must not depend on graphs."""

    pipe: df.DiffusionPipeline
    write: Callable[[df.DiffusionPipeline], object]


def tokenizer(*special: str, **named: str) -> tf.PreTrainedTokenizerFast:
    """Bytes after `<pad>`, `</s>`, `<s>`; `special` tokens have the last ids. Left padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", "</s>", "<s>", *alphabet, *special]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = tf.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        padding_side="left",
        model_max_length=40,
        extra_special_tokens=named,
    )
    made.add_tokens(list(special), special_tokens=True)
    made.chat_template = TEMPLATE
    return made


class _ShortProcessor(tf.PixtralProcessor):
    """Pads to 160 tokens where the pipeline asks for 2,048."""

    def apply_chat_template(self, conversation: object, **kwargs: object) -> object:
        return super().apply_chat_template(conversation, **{**kwargs, "max_length": 160})


def _flux2() -> Writer:
    words = tokenizer("[IMG_END]", "[IMG_BREAK]", "[IMG]")
    template = TEMPLATE.replace("<image>", "[IMG]")
    processor = _ShortProcessor(
        tf.PixtralImageProcessor(), words, patch_size=14, chat_template=template
    )
    model = tiny_llms.build("mistral3", vocabulary=len(words))
    model.generation_config.eos_token_id = list(range(1, 13))  # ends before 512 tokens
    pipe = df.Flux2Pipeline(
        scheduler=df.FlowMatchEulerDiscreteScheduler(),
        vae=None,
        text_encoder=model,
        tokenizer=processor,
        transformer=None,
    )

    def write(pipe: df.Flux2Pipeline) -> object:
        torch.manual_seed(1)
        return pipe.upsample_prompt(["a cat", "two dogs in snow"], temperature=0.5)

    return Writer(pipe, write)


def _vl_processor() -> tf.Qwen2VLProcessor:
    special = ("<|vision_start|>", "<|vision_end|>", "<|video_pad|>", "<|image_pad|>")
    words = tokenizer(*special)
    images = tf.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=56 * 56)
    return tf.Qwen2VLProcessor(images, words, tf.Qwen2VLVideoProcessor(), chat_template=TEMPLATE)


def _longcat() -> Writer:
    processor = _vl_processor()
    pipe = df.LongCatImagePipeline(
        scheduler=df.FlowMatchEulerDiscreteScheduler(),
        vae=None,
        text_encoder=tiny_llms.build("qwen2.5-vl", vocabulary=len(processor.tokenizer)),
        tokenizer=processor.tokenizer,
        text_processor=processor,
        transformer=None,
    )
    pipe.tokenizer_max_length = 40

    def write(pipe: df.LongCatImagePipeline) -> object:
        with mock.patch.object(longcat, "SYSTEM_PROMPT_EN", "Rewrite."):  # it has 10,000 bytes
            return pipe.rewire_prompt(["a cat", "two dogs"], "cpu")

    return Writer(pipe, write)


def _layered() -> Writer:
    processor = _vl_processor()
    pipe = df.QwenImageLayeredPipeline(
        scheduler=df.FlowMatchEulerDiscreteScheduler(),
        vae=None,
        text_encoder=tiny_llms.build("qwen2.5-vl", vocabulary=len(processor.tokenizer)),
        tokenizer=processor.tokenizer,
        processor=processor,
        transformer=None,
    )
    pipe.text_encoder.generation_config.repetition_penalty = 1.05  # as the released model has
    pipe.text_encoder.generation_config.eos_token_id = list(range(1, 13))
    picture = Image.new("RGB", (56, 56), "red")
    caption = "<|vision_start|><|image_pad|><|vision_end|>what is it?"
    pipe.image_caption_prompt_en = caption
    return Writer(pipe, lambda pipe: pipe.get_image_caption(picture, device="cpu"))


def _ernie() -> Writer:
    words = tokenizer()
    pipe = df.ErnieImagePipeline(
        transformer=None,
        vae=None,
        text_encoder=None,
        tokenizer=None,
        scheduler=df.FlowMatchEulerDiscreteScheduler(),
        pe=tiny_llms.build("ministral3", vocabulary=len(words)),
        pe_tokenizer=words,
    )

    def write(pipe: df.ErnieImagePipeline) -> object:
        torch.manual_seed(2)
        return pipe._enhance_prompt_with_pe("a cat", torch.device("cpu"))

    return Writer(pipe, write)


def _ltx2() -> Writer:
    names = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}
    words = tokenizer("<eoi>", "<boi>", "<image>", **names)
    words.image_token_id = words.convert_tokens_to_ids("<image>")
    processor = tf.Gemma3Processor(
        tf.Gemma3ImageProcessor(), words, image_seq_length=4, chat_template=TEMPLATE
    )
    pipe = df.LTX2Pipeline(
        scheduler=df.FlowMatchEulerDiscreteScheduler(),
        vae=None,
        audio_vae=None,
        text_encoder=tiny_llms.build("gemma3-vl", vocabulary=len(words)),
        tokenizer=words,
        connectors=None,
        transformer=None,
        vocoder=None,
        processor=processor,
    )

    def write(pipe: df.LTX2Pipeline) -> object:
        return pipe.enhance_prompt(
            "a cat", system_prompt="Write.", max_new_tokens=40, seed=3, device=torch.device("cpu")
        )

    return Writer(pipe, write)


def _glm_language_model(words: tf.PreTrainedTokenizerFast) -> nn.Module:
    config = tf.GlmImageConfig(
        text_config={
            "vocab_size": len(words),
            "vision_vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "pad_token_id": 0,
            "eos_token_id": None,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0,
                "mrope_section": [1, 1, 2],
            },
        },
        vision_config={
            "depth": 1, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48,
            "image_size": 64,
        },
        vq_config={"embed_dim": 8, "num_embeddings": 16, "latent_channels": 32},
        image_token_id=words.convert_tokens_to_ids("<image>"),
        image_start_token_id=words.convert_tokens_to_ids("<boi>"),
        image_end_token_id=words.convert_tokens_to_ids("<eoi>"),
    )  # fmt: skip
    return tiny_llms.spread(tf.GlmImageForConditionalGeneration(config).eval())


def _glm() -> Writer:
    names = {
        "image_token": "<image>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>",
    }  # fmt: skip
    words = tokenizer("<sop>", "<eop>", "<eoi>", "<boi>", "<image>", **names)
    words.bos_token = "<boi>"
    processor = tf.GlmImageProcessor(tf.GlmImageImageProcessor(), words, chat_template=TEMPLATE)
    pipe = df.GlmImagePipeline(
        tokenizer=None,
        processor=processor,
        text_encoder=None,
        vision_language_encoder=_glm_language_model(words),
        vae=None,
        transformer=None,
        scheduler=df.FlowMatchEulerDiscreteScheduler(),
    )

    def write(pipe: df.GlmImagePipeline) -> object:
        tokens, *_ = pipe.generate_prior_tokens(
            "a cat", height=64, width=32, device=torch.device("cpu"),
            generator=torch.Generator().manual_seed(5),
        )  # fmt: skip
        return tokens.tolist()

    return Writer(pipe, write)


WRITERS: dict[str, Callable[[], Writer]] = {
    "flux2": _flux2,
    "glm-image": _glm,
    "longcat": _longcat,
    "ernie": _ernie,
    "ltx2": _ltx2,
    "layered": _layered,
}
