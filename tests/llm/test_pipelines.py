"""Real diffusers pipelines: prompts encoded, upsampled, captioned and rewritten from graphs."""

from __future__ import annotations

import json

import diffusers as df
import pytest
import tiny
import tiny_llms
import tiny_text
import tiny_writers
import torch
import transformers as tf

import dit_graphs
from dit_graphs import ConfigError, Reason

TEXT_ONLY = {"backend": "recorded", "components": ("text_encoder",)}


@pytest.mark.parametrize("name", tiny_writers.WRITERS)
def test_pipelines_that_write_do_so_from_graphs(name):
    writer = tiny_writers.WRITERS[name]()
    expected = writer.write(writer.pipe)
    dit_graphs.accelerate(writer.pipe, **TEXT_ONLY)
    assert writer.write(writer.pipe) == expected
    components = dit_graphs.stats(writer.pipe)["components"]
    decode = components["decode"]
    rows = 2 if name in ("flux2", "longcat") else 1
    # the weights are random, and with some releases of transformers such a text ends early
    assert decode["replays"] >= decode["new_tokens"] // rows - 2 > 2
    assert set(decode["fallbacks"]) == {"warming_up"}
    with_pictures = name in ("glm-image", "layered")
    reading = "generate_argument" if with_pictures else "warming_up"
    assert set(components["prefill"]["fallbacks"]) == {reading}
    assert "decode:" in dit_graphs.explain(writer.pipe)
    dit_graphs.restore(writer.pipe)
    assert writer.write(writer.pipe) == expected


@pytest.mark.parametrize("name", ["z-image", "flux2-klein", "qwen-image", "wan", "sd3"])
def test_prompts_are_encoded_from_graphs_and_pictures_stay_the_same(name):
    if name == "wan":
        tiny_llms.needs_ready_masks("umt5")
    prompts = ["a red heart", "a red heart", "a red heart", "a blue star"]  # equal lengths
    pipe = tiny.build(name)
    calls = [tiny.call_kwargs(name, steps=1, prompt=prompt) for prompt in prompts]
    expected = [tiny.latents(pipe, call) for call in calls]
    dit_graphs.accelerate(pipe, **TEXT_ONLY)
    calls = [tiny.call_kwargs(name, steps=1, prompt=prompt) for prompt in prompts]
    for call, reference in zip(calls, expected, strict=True):
        assert torch.equal(tiny.latents(pipe, call), reference)
    encoder = dit_graphs.stats(pipe)["components"]["text_encoder"]
    assert encoder["replays"] >= 1
    assert set(encoder["fallbacks"]) == {"warming_up"}
    json.dumps(dit_graphs.stats(pipe))
    dit_graphs.restore(pipe)
    assert "_compiled_call_impl" not in vars(pipe.text_encoder)


def test_a_prompt_encoded_after_a_rewrite_is_the_same():
    """generate() leaves state on image language models that an encode must not read."""
    pipe = tiny.build("qwen-image")
    call = tiny.call_kwargs("qwen-image", steps=1)
    expected = tiny.latents(pipe, call)
    dit_graphs.accelerate(pipe, **TEXT_ONLY)
    for _ in range(4):
        ids = torch.randint(3, 200, (1, 9))
        pipe.text_encoder.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
        assert torch.equal(tiny.latents(pipe, tiny.call_kwargs("qwen-image", steps=1)), expected)
    encoder = dit_graphs.stats(pipe)["components"]["text_encoder"]
    assert encoder["replays"] >= 1 and encoder["invalidations"] == 0


def test_a_bare_language_model_is_accelerated_too():
    model = tiny_llms.build("qwen3")
    batch = tiny_llms.prompts([9])
    with torch.no_grad():
        expected = model.generate(**batch, max_new_tokens=8, do_sample=False)
        dit_graphs.accelerate(model, backend="recorded")
        assert torch.equal(model.generate(**batch, max_new_tokens=8, do_sample=False), expected)
    assert dit_graphs.stats(model)["components"]["decode"]["replays"] == 6
    dit_graphs.restore(model)
    assert "generate" not in vars(model)


def bundled_like():
    """A pipeline as the bundled model is: Qwen3 with a chat template, one tokenizer."""
    words = tiny_text.qwen_tokenizer()
    return df.ZImagePipeline(
        scheduler=df.FlowMatchEulerDiscreteScheduler(),
        vae=None,
        text_encoder=tiny_llms.build("qwen3", vocabulary=len(words)),
        tokenizer=words,
        transformer=None,
    )


def test_b62_rewriting_is_the_same_with_and_without_graphs_and_repeatable():
    pipe = bundled_like()
    plain = [dit_graphs.rewrite_prompt(pipe, "a cat", 20, seed) for seed in (0, 1)]
    dit_graphs.accelerate(pipe, **TEXT_ONLY)
    assert [dit_graphs.rewrite_prompt(pipe, "a cat", 20, seed) for seed in (0, 1)] == plain
    assert plain[0] != plain[1]
    assert dit_graphs.stats(pipe)["components"]["decode"]["replays"] > 20


def test_rewriting_leaves_the_random_numbers_alone():
    pipe = bundled_like()
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    dit_graphs.rewrite_prompt(pipe, "a cat", 8)
    assert torch.equal(torch.rand(3), expected)


def test_temperature_0_is_greedy():
    pipe = bundled_like()
    written = [dit_graphs.rewrite_prompt(pipe, "a cat", 8, seed, temperature=0) for seed in (0, 1)]
    assert written[0] == written[1]


def test_an_encoder_loaded_without_its_head_gets_it_back():
    """Z-Image's AutoModel: the head is tied to the embeddings, so the text is the full model's."""
    pipe = bundled_like()
    pipe.text_encoder.config.tie_word_embeddings = True
    pipe.text_encoder.tie_weights()
    full = dit_graphs.rewrite_prompt(pipe, "a cat", 20)
    headless = bundled_like()
    headless.register_modules(text_encoder=pipe.text_encoder.model)
    assert dit_graphs.rewrite_prompt(headless, "a cat", 20) == full
    dit_graphs.accelerate(headless, **TEXT_ONLY)
    for _ in range(2):
        assert dit_graphs.rewrite_prompt(headless, "a cat", 20) == full
    components = dit_graphs.stats(headless)["components"]
    assert components["decode:text_encoder.head"]["replays"] > 20
    assert components["text_encoder"]["eager_calls"] == 0
    dit_graphs.restore(headless)


def test_a_pipeline_without_a_language_model_says_so():
    with pytest.raises(ConfigError, match="cannot rewrite prompts: T5EncoderModel encodes only"):
        dit_graphs.rewrite_prompt(
            {"text_encoder": tiny_text.t5_encoder(), "tokenizer": tiny_text.t5_tokenizer()}, "a cat"
        )


@pytest.mark.parametrize("text", [["a cat", "a dog"], None])
def test_what_is_no_prompt_is_not_rewritten(text):
    with pytest.raises(ConfigError, match=f"expected one prompt, got {type(text).__name__}"):
        dit_graphs.rewrite_prompt(bundled_like(), text)


def test_offloaded_text_encoders_write_as_transformers_does():
    pipe = bundled_like()
    expected = dit_graphs.rewrite_prompt(pipe, "a cat", 8)
    dit_graphs.accelerate(pipe, **TEXT_ONLY)
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    add_hook_to_module(pipe.text_encoder, AlignDevicesHook("cpu"))
    assert dit_graphs.rewrite_prompt(pipe, "a cat", 8) == expected
    decode = dit_graphs.stats(pipe)["components"]["decode"]
    assert decode["fallbacks"] == {Reason.OFFLOAD.value: 1}


def test_generation_config_defaults_reach_the_graph():
    """Qwen2.5-VL asks for a repetition penalty in its config that no pipeline mentions."""
    model = tiny_llms.build("qwen2.5-vl")
    model.generation_config = tf.GenerationConfig(
        repetition_penalty=1.3, pad_token_id=0, eos_token_id=1
    )
    batch = tiny_llms.prompts([9, 5])
    expected = model.generate(**batch, max_new_tokens=12)
    dit_graphs.accelerate(model, backend="recorded")
    assert torch.equal(model.generate(**batch, max_new_tokens=12), expected)
    signature = dit_graphs.stats(model)["components"]["decode"]["graphs"][0]["signature"]
    assert "repetition penalty 1.3" in signature
