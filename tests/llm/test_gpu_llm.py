"""Real CUDA graphs: prompts encoded, texts written, at the sizes of real text encoders.

Weights are random: equal bits and equal tokens need no meaning. The large models are built on the
device, once per module of tests, and written with by several tests.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import tiny_llms
import torch
import transformers as tf
from torch import nn

import dit_graphs
from benchmarks.weights import randomise
from dit_graphs import GraphConfig, Reason
from dit_graphs.intercept import find_intercept, install
from dit_graphs.pipelines.text_encoder.attention import one_token_attention
from dit_graphs.pipelines.text_encoder.encode import EncodeRunner
from dit_graphs.pipelines.text_encoder.generate import TextGenerator
from dit_graphs.runner import RunnerOptions

pytestmark = pytest.mark.gpu

FULL = GraphConfig(backend="full")


def on_gpu(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """A model built and filled on the device; its texts never end."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            model = make().eval()
    finally:
        torch.set_default_dtype(before)
    randomise(model)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    return model


def release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _qwen3_4b() -> nn.Module:
    config = tf.Qwen3Config(
        vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    return tf.Qwen3ForCausalLM(config)


def _mistral3_24b() -> nn.Module:
    text = tf.MistralConfig(
        vocab_size=131_072, hidden_size=5120, intermediate_size=32_768, num_hidden_layers=40,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, sliding_window=None,
    )  # fmt: skip
    vision = tf.PixtralVisionConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        head_dim=16, image_size=28, patch_size=14,
    )  # fmt: skip
    config = tf.Mistral3Config(text_config=text, vision_config=vision, image_token_id=10)
    return tf.Mistral3ForConditionalGeneration(config)


@pytest.fixture(scope="module")
def qwen3_4b() -> Iterator[nn.Module]:
    model = on_gpu(_qwen3_4b, torch.bfloat16)
    yield model
    del model
    release()


def prompts(lengths: list[int], *, vocabulary: int, seed: int = 0, side: str = "left"):
    """Ids and mask on the device; `lengths` real tokens per row."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        where = slice(width - length, width) if side == "left" else slice(0, length)
        ids[row, where] = torch.randint(20, vocabulary, (length,), generator=generator)
        mask[row, where] = 1
    return {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}


def check_encode(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> EncodeRunner:
    """Every hidden state of every batch, plain and then wrapped; returns the runner."""

    def states(batch):
        return model(**batch, output_hidden_states=True).hidden_states

    expected = [[state.clone() for state in states(batch)] for batch in batches]
    made = []

    def make(eager):
        made.append(EncodeRunner(model, eager, FULL, RunnerOptions(component="text_encoder")))
        return made[0]

    install(model, "forward", make)
    try:
        for batch, reference in zip(batches, expected, strict=True):
            assert all(map(torch.equal, states(batch), reference))
    finally:
        find_intercept(model, "forward").drop(None)
    assert made[0].stats.replays >= len(batches) - 3, made[0].stats.as_dict()
    assert set(made[0].stats.fallbacks) == {Reason.WARMING_UP}
    return made[0]


@pytest.mark.parametrize("lengths", [[512], [70]], ids=["all ones", "padded to 512"])
def test_qwen3_4b_encodes_512_tokens_from_one_graph(qwen3_4b, lengths):
    """As Z-Image and FLUX.2-klein ask: right padding to 512 tokens, every hidden state."""
    batches = []
    for seed in range(5):
        batch = prompts([512, *lengths], vocabulary=150_000, seed=seed, side="right")
        batches.append({name: value[1:].contiguous() for name, value in batch.items()})
    runner = check_encode(qwen3_4b, batches)
    (entry,) = runner.cache.held()
    assert entry.recording.captured_fraction == 1.0 and entry.recording.segments == 1
    runner.close()
    release()


def test_mistral_24b_encodes_from_one_graph():
    """As FLUX.2 asks: left padding to 512 tokens."""
    model = on_gpu(_mistral3_24b, torch.bfloat16)
    batches = [
        {n: v[1:].contiguous() for n, v in prompts([512, 60], vocabulary=130_000, seed=s).items()}
        for s in range(5)
    ]
    check_encode(model, batches).close()
    del model
    release()


@pytest.mark.parametrize("name", [*tiny_llms.DECODERS, *tiny_llms.ENCODERS])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_every_class_encodes_from_graphs(name, padding):
    model = tiny_llms.build(name, torch.bfloat16).cuda()
    lengths = [21, 21] if padding == "none" else [21, 9]
    batches = [tiny_llms.prompts(lengths, seed=seed) for seed in range(5)]
    batches = [{name: value.cuda() for name, value in batch.items()} for batch in batches]
    check_encode(model, batches).close()


@pytest.mark.parametrize("name", tiny_llms.DECODERS)
def test_every_class_writes_what_transformers_writes(name):
    """fp32: the kernels differ, the tokens may not. Past the sliding window of 16."""
    model = tiny_llms.build(name).cuda()
    model.generation_config.eos_token_id = None
    generator = TextGenerator(model, model.generate, FULL)
    for lengths in ([7, 12, 3], [30], [7, 12, 3]):
        batch = {n: v.cuda() for n, v in tiny_llms.prompts(lengths).items()}
        expected = model.generate(**batch, max_new_tokens=24, do_sample=False)
        assert torch.equal(generator(**batch, max_new_tokens=24, do_sample=False), expected)
    stats = generator.runner.stats
    assert stats.replays >= 3 * 23 - 3 and set(stats.fallbacks) == {Reason.WARMING_UP}
    generator.close()


def test_a_seed_draws_what_transformers_draws():
    """The default generator is captured, advances with every replay and stops where it should."""
    model = tiny_llms.build("qwen3").cuda()
    generator = TextGenerator(model, model.generate, FULL)
    ends = list(range(20, 36))
    for lengths in ([9], [7, 12, 3], [9]):
        batch = {n: v.cuda() for n, v in tiny_llms.prompts(lengths).items()}
        results = []
        for generate in (model.generate, generator):
            torch.manual_seed(3)
            torch.rand(5, device="cuda")
            text = generate(
                **batch, max_new_tokens=20, do_sample=True, temperature=0.8, top_k=30, top_p=0.9,
                eos_token_id=ends,
            )  # fmt: skip
            results.append((text, torch.rand(4, device="cuda")))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
    assert generator.runner.stats.replays > 10
    generator.close()


def test_qwen3_4b_writes_its_own_eager_steps_from_graphs(qwen3_4b):
    """bf16: equal to eager at the same padded shape, 3 rows in a bucket of 4; A, B, A."""
    texts: dict[str, list[torch.Tensor]] = {}
    for backend in ("debug", "full"):
        generator = TextGenerator(qwen3_4b, qwen3_4b.generate, GraphConfig(backend=backend))
        texts[backend] = []
        for lengths, seed in (([90, 33, 60], 1), ([20], 2), ([90, 33, 60], 1)):
            batch = prompts(lengths, vocabulary=150_000, seed=seed)
            output = generator(**batch, max_new_tokens=24, do_sample=False)
            texts[backend].append(output[:, max(lengths) :])
        stats = generator.runner.stats
        if backend == "full":
            assert stats.replays >= 3 * 23 - 2 and set(stats.fallbacks) == {Reason.WARMING_UP}
        generator.close()
        release()
    for eager, graph in zip(texts["debug"], texts["full"], strict=True):
        assert torch.equal(eager, graph)
    assert torch.equal(texts["full"][0], texts["full"][2])
    assert texts["full"][0].unique().numel() > 8  # a text, not one token over and over


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("context", [160, 1056, 2048])
def test_one_token_attends_with_equal_bits_every_time(rows, context):
    """cuDNN's attention at 1,056 keys gave other bits in some calls of 50."""
    torch.manual_seed(context)
    slots = torch.randn(2, rows, 8, 2048, 128, device="cuda", dtype=torch.bfloat16)
    key, value = slots[0, :, :, :context], slots[1, :, :, :context]
    query = torch.randn(rows, 1, 32, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    ends = torch.arange(context - rows, context, device="cuda")
    mask = (torch.arange(context, device="cuda")[None] <= ends[:, None])[:, None, None]

    def attend() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=True
        )

    with torch.no_grad(), one_token_attention():
        first = attend()
        kept = []  # each result at another address, over memory that was never the same
        for number in range(400):
            torch.full((1 << 22,), float(number), device="cuda")
            kept.append(attend())
        assert all(torch.equal(other, first) for other in kept)
    exact = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(first.double(), exact, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("rows", [1, 4])
def test_qwen3_4b_writes_behind_1024_tokens_from_graphs(qwen3_4b, rows):
    """Every step from a graph, the same text each time, and that of the eager steps."""
    batch = prompts([1024] * rows, vocabulary=150_000, seed=rows)
    texts: dict[str, list[torch.Tensor]] = {}
    for backend in ("debug", "full"):
        generator = TextGenerator(qwen3_4b, qwen3_4b.generate, GraphConfig(backend=backend))
        texts[backend] = [
            generator(**batch, max_new_tokens=25, do_sample=False)[:, 1024:] for _ in range(3)
        ]
        stats = generator.runner.stats
        if backend == "full":
            assert stats.replays == 3 * 24 - 1 and set(stats.fallbacks) == {Reason.WARMING_UP}
        generator.close()
        release()
    first, *others = texts["debug"] + texts["full"]
    assert all(torch.equal(other, first) for other in others)


def test_one_rewrite_costs_one_slot_and_close_gives_it_back(qwen3_4b):
    batch = prompts([400], vocabulary=150_000)
    release()
    before = torch.cuda.memory_allocated()
    generator = TextGenerator(qwen3_4b, qwen3_4b.generate, FULL)
    for _ in range(2):
        generator(**batch, max_new_tokens=100, do_sample=False)
    report = generator.runner.report()
    # 36 layers × 8 heads × (128 + 128) × 2 bytes = 147,456 bytes per token; 500 tokens
    assert report["kv_bytes"] + report["row_bytes"] <= 1.2 * 500 * 147_456
    generator.close()
    del generator
    release()
    assert torch.cuda.memory_allocated() - before <= 32 << 20


def test_a_batch_above_the_largest_bucket_and_64_prompts(qwen3_4b, caplog):
    small = TextGenerator(
        qwen3_4b, qwen3_4b.generate, GraphConfig(backend="full", max_size={"decode": 2})
    )
    batch = prompts([8, 8, 8], vocabulary=150_000)
    with caplog.at_level("WARNING", logger="dit_graphs"):
        for _ in range(2):
            assert small(**batch, max_new_tokens=4, do_sample=False).shape == (3, 12)
    assert sum("above_max_size" in record.getMessage() for record in caplog.records) == 1
    small.close()
    many = TextGenerator(qwen3_4b, qwen3_4b.generate, FULL)
    lengths = [4 + (5 * row) % 40 for row in range(64)]
    written = many(**prompts(lengths, vocabulary=150_000), max_new_tokens=8, do_sample=False)
    assert written.shape == (64, max(lengths) + 8)
    assert many.runner.stats.replays >= 6 and many.runner.cache.slots == 64
    many.close()
    release()


def test_encoder_and_decoder_share_the_pool_and_nothing_leaks_between_them():
    """Prompts encoded and texts written in turn, from graphs of one pool."""
    model = tiny_llms.build("qwen3").cuda()
    batch = {n: v.cuda() for n, v in tiny_llms.prompts([12, 5]).items()}
    text = model.generate(**batch, max_new_tokens=12, do_sample=False)
    states = model(**batch, output_hidden_states=True).hidden_states[-1]
    dit_graphs.accelerate(model, backend="full")
    for _ in range(6):
        assert torch.equal(model.generate(**batch, max_new_tokens=12, do_sample=False), text)
        mine = model(**batch, output_hidden_states=True).hidden_states[-1]
        assert torch.equal(mine, states)
    components = dit_graphs.stats(model)["components"]
    assert components["text_encoder"]["replays"] >= 3
    assert components["prefill"]["replays"] >= 3
    assert components["decode"]["replays"] >= 6 * 11 - 2
    dit_graphs.restore(model)


def test_a_step_that_reads_the_host_leaves_the_device_healthy():
    model = tiny_llms.build("qwen3").cuda()
    layer = model.model.layers[1].mlp
    original = layer.forward
    layer.forward = lambda x: original(x) * (1.0 if x.sum().item() > 0 else 0.5)
    batch = {n: v.cuda() for n, v in tiny_llms.prompts([12, 5]).items()}
    expected = model.generate(**batch, max_new_tokens=8, do_sample=False)
    generator = TextGenerator(model, model.generate, FULL)
    assert torch.equal(generator(**batch, max_new_tokens=8, do_sample=False), expected)
    assert generator.runner.stats.replays == 0
    torch.rand(3, device="cuda")
    layer.forward = original
    healthy = TextGenerator(model, model.generate, FULL)
    healthy(**batch, max_new_tokens=8, do_sample=False)
    assert healthy.runner.stats.replays == 6
    generator.close()
    healthy.close()
