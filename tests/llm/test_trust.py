"""When a decode graph must not be used: weights moved, graphs that do nothing, switches, memory."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny_llms
import torch

import dit_graphs
from dit_graphs import ConfigError, FallbackError, GraphConfig, GraphError, Reason
from dit_graphs.backends.recorded import RecordedRecording
from dit_graphs.llm import DecodeRunner, Prompt, Sampling, SlotCache, passes
from dit_graphs.llm.kv import LayerLayout
from dit_graphs.pipelines.text_encoder.causal_lm import CausalLM
from dit_graphs.pipelines.text_encoder.generate import TextGenerator


def both(generator, model, **kwargs):
    batch = tiny_llms.prompts([9, 4])
    options = {"max_new_tokens": 12, "do_sample": False, **kwargs}
    return generator(**batch, **options), model.generate(**batch, **options)


def test_weights_changed_in_place_are_seen_by_the_same_graph(recorded):
    model = tiny_llms.build("qwen3")
    generator = recorded(model)
    first, _ = both(generator, model)
    model.model.layers[1].mlp.down_proj.weight.mul_(-1.5)
    second, expected = both(generator, model)
    assert torch.equal(second, expected) and not torch.equal(first, second)
    assert generator.runner.stats.captures == 2


def test_weights_at_another_address_drop_the_graphs(recorded):
    model = tiny_llms.build("qwen3")
    generator = recorded(model)
    both(generator, model)
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.data = weight.data * -1.5
    written, expected = both(generator, model)
    assert torch.equal(written, expected)
    assert generator.runner.stats.invalidations == 1 and generator.runner.stats.captures == 4


def test_a_graph_that_does_nothing_is_never_trusted(recorded, qwen3, monkeypatch):
    monkeypatch.setattr(RecordedRecording, "replay", lambda self: None)
    generator = recorded(qwen3)
    written, expected = both(generator, qwen3)
    assert torch.equal(written, expected)
    assert generator.runner.stats.replays == 0
    assert Reason.VERIFY_MISMATCH in generator.runner.stats.fallbacks


def test_verify_always_compares_every_step_and_false_none(recorded, qwen3):
    always, never = recorded(qwen3, verify="always"), recorded(qwen3, verify=False)
    for generator in (always, never):
        written, expected = both(generator, qwen3)
        assert torch.equal(written, expected)
    assert always.runner.stats.replays == 0 and always.runner.stats.compares == 11 + 12
    assert never.runner.stats.replays == 11 and never.runner.stats.compares == 0


def test_switches_lead_to_transformers_own_loop(recorded, qwen3, monkeypatch):
    generator = recorded(qwen3)
    with generator.runner.switched_off():
        assert torch.equal(*both(generator, qwen3))
    monkeypatch.setenv("DIT_GRAPHS", "off")
    assert torch.equal(*both(generator, qwen3))
    assert generator.runner.stats.fallbacks == {Reason.DISABLED: 1, Reason.KILL_SWITCH: 1}
    assert generator.runner.cache is None


def test_auto_on_a_cpu_is_transformers_own_loop(qwen3):
    generator = TextGenerator(qwen3, qwen3.generate, GraphConfig())
    assert torch.equal(*both(generator, qwen3))
    assert generator.runner.stats.fallbacks == {Reason.NO_CUDA: 1}


def test_phases_choose_their_backends_alone(qwen3):
    config = GraphConfig(backend={"decode": "recorded", "prefill": "off"})
    generator = TextGenerator(qwen3, qwen3.generate, config)
    for _ in range(4):
        assert torch.equal(*both(generator, qwen3))
    assert generator.runner.stats.replays > 40
    assert generator.prefill.stats.fallbacks == {Reason.DISABLED: 4}


def test_warmup_only_captures_in_a_warm_up_only(recorded, qwen3):
    generator = recorded(qwen3, capture="warmup_only")
    assert torch.equal(*both(generator, qwen3))
    assert generator.runner.stats.captures == 0
    with generator.runner.warming_up():
        both(generator, qwen3)
    assert torch.equal(*both(generator, qwen3))
    assert generator.runner.stats.captures == 2 and generator.runner.stats.replays == 10 + 11


def test_strict_raises_with_the_argument_named(recorded, qwen3):
    generator = recorded(qwen3, strict=True)
    with pytest.raises(FallbackError, match="num_beams=2"):
        both(generator, qwen3, num_beams=2)


def test_strict_raises_where_a_prompt_is_read_without_a_graph(recorded, qwen3):
    generator = recorded(qwen3, strict=True, max_size={"prefill": 8})
    with pytest.raises(FallbackError, match=r"9 tokens, max_size\['prefill'\] is 8"):
        both(generator, qwen3)


def test_strict_does_not_mind_what_was_asked_for(recorded, qwen3):
    generator = recorded(qwen3, strict=True)
    with generator.runner.switched_off():
        assert torch.equal(*both(generator, qwen3))


def reads_the_host():
    """A model of whose steps none can be captured."""
    model = tiny_llms.build("qwen3")
    layer = model.model.layers[1].mlp
    original = layer.forward
    layer.forward = lambda x: original(x) * (1.0 if x.sum().item() > 0 else 0.5)
    return model


def test_strict_raises_where_a_step_has_no_graph(recorded):
    model = reads_the_host()
    generator = recorded(model, strict=True)
    with pytest.raises(FallbackError, match="DECODE 2 rows"):
        both(generator, model)


def test_a_step_that_reads_the_host_is_written_eagerly_and_named(recorded):
    model = reads_the_host()
    generator = recorded(model)
    for _ in range(2):
        assert torch.equal(*both(generator, model))
    stats = generator.runner.stats
    assert stats.replays == 0 and stats.captures == 1  # the choice of tokens only
    assert stats.fallbacks[Reason.CAPTURE_FAILED] == 22


def test_keys_and_values_count_in_the_memory_budget(recorded, qwen3):
    # 2 rows × 32 tokens × 384 bytes = 24 KiB; the recorder's graph holds another 26 KiB
    tight, wide = (
        recorded(qwen3, memory_budget={"decode": kib << 10}) for kib in (23, 32)
    )  # fmt: skip
    for generator in (tight, wide):
        assert torch.equal(*both(generator, qwen3))
    assert tight.runner.stats.fallbacks == {Reason.MEMORY_BUDGET: 1}
    assert tight.runner.cache.nbytes == 0
    assert wide.runner.stats.replays == 10


def test_attention_asked_to_be_eager_is_not_captured(qwen3):
    model = tiny_llms.build("qwen3")
    dit_graphs.accelerate(model, backend="recorded", attention="eager")
    batch = tiny_llms.prompts([9])
    expected = qwen3.generate(**batch, max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(**batch, max_new_tokens=8, do_sample=False), expected)
    decode = dit_graphs.stats(model)["components"]["decode"]
    assert decode["replays"] == 0 and decode["fallbacks"] == {"capture_failed": 7}


def test_debug_takes_the_same_path_without_any_graph(qwen3, caplog):
    generator = TextGenerator(qwen3, qwen3.generate, GraphConfig(backend="debug"))
    with caplog.at_level("DEBUG", logger="dit_graphs"):
        assert torch.equal(*both(generator, qwen3))
    assert generator.runner.stats.captures == 0 and generator.runner.stats.fallbacks == {}
    assert not any("recorder" in record.getMessage() for record in caplog.records)


def test_inference_mode(recorded, qwen3):
    generator = recorded(qwen3)
    with torch.inference_mode():
        for _ in range(4):
            assert torch.equal(*both(generator, qwen3))
    assert torch.equal(*both(generator, qwen3))
    assert generator.runner.stats.replays >= 50


def test_two_threads_take_turns(recorded, qwen3):
    generator = recorded(qwen3)
    expected = both(generator, qwen3)[1]
    results = []

    def work():
        with torch.no_grad():
            results.extend(both(generator, qwen3)[0] for _ in range(3))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6 and all(torch.equal(result, expected) for result in results)


def test_dropped_graphs_come_back(recorded, qwen3):
    generator = recorded(qwen3)
    both(generator, qwen3)
    assert generator.runner.drop_graphs() == 2
    assert torch.equal(*both(generator, qwen3))
    assert generator.runner.stats.captures == 4


def test_closing_gives_every_byte_back(recorded, qwen3):
    generator = recorded(qwen3)
    both(generator, qwen3)
    generator.close()
    report = generator.runner.report()
    assert report["kv_bytes"] == 0 and report["row_bytes"] == 0 and report["graphs"] == []
    assert torch.equal(*both(generator, qwen3))


def test_out_of_memory_names_the_sizes_to_lower(recorded, qwen3, monkeypatch, caplog):
    def full(self, slots, length):
        self.release()
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(SlotCache, "allocate", full)
    generator = recorded(qwen3)
    assert torch.equal(*both(generator, qwen3))
    assert generator.runner.stats.fallbacks == {Reason.OUT_OF_MEMORY: 1}
    assert generator.runner.stats.details[Reason.OUT_OF_MEMORY].startswith("max_size['decode']")


def prompt(lengths=(3,), width=3):
    numbers = torch.zeros(1, len(lengths), 1, dtype=torch.long)
    return Prompt(lengths=lengths, width=width, table=lambda: numbers)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (prompt(), {"max_new_tokens": 0}, "max_new_tokens"),
        (prompt((3, 0)), {"max_new_tokens": 4}, "empty"),
        (prompt((3, 3, 3)), {"max_new_tokens": 4}, "max_size"),
        (prompt(), {"max_new_tokens": 4, "eos": range(20)}, "end tokens"),
    ],
)
def test_a_call_that_cannot_work_raises_before_any_work(qwen3, given, options, message):
    config = GraphConfig(backend="recorded", max_size={"decode": 2})
    runner = DecodeRunner(CausalLM(qwen3), config)
    with pytest.raises(GraphError, match=message):
        runner.generate(given, lambda store: pytest.fail("the model ran"), **options)
    assert runner.cache is None or runner.cache.slots == 0


def test_a_layer_that_was_not_laid_out_is_an_error():
    cache = SlotCache([LayerLayout(1, 4, 4, torch.float32)], torch.device("cpu"))
    cache.allocate(2, 16)
    keys = torch.zeros(1, 1, 1, 4)
    with pytest.raises(GraphError, match="layer 1 of 1"):
        cache.write(1, keys, keys, torch.zeros(1, 1, dtype=torch.long))


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": 0.0}, {"top_k": -1}, {"top_p": 1.5}, {"repetition_penalty": 0.0}],
)
def test_sampling_values_are_checked(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(do_sample=True, **wrong)


def test_graphs_that_go_while_a_step_waits_for_its_turn_are_not_replayed(recorded, qwen3):
    """Another pipeline replays, runs out of memory and lets every graph of the device go."""
    generator = recorded(qwen3)
    batch = tiny_llms.prompts([7, 12], seed=0)
    expected = qwen3.generate(**batch, max_new_tokens=12, do_sample=False)
    for _ in range(2):
        assert torch.equal(generator(**batch, max_new_tokens=12, do_sample=False), expected)
    state = generator.runner.state
    with ThreadPoolExecutor(1) as pool:
        with state.replay_lock:
            done = pool.submit(generator, **batch, max_new_tokens=12, do_sample=False)
            time.sleep(0.5)
            assert not done.done()
            state.retire()
        assert torch.equal(done.result(timeout=60), expected)


@pytest.mark.parametrize("call", [1, 2])
def test_a_runner_that_is_closed_while_it_reads_a_prompt_writes_the_text(recorded, call):
    """As another thread's `restore` does: in the plain pass, and in the compare."""
    model = tiny_llms.build("qwen3")
    batch = tiny_llms.prompts([9, 4])
    expected = model.generate(**batch, max_new_tokens=5, do_sample=False)
    generator, reads, original = recorded(model), [], model._prefill

    def read(*args, **kwargs):
        reads.append(1)
        if len(reads) == call:
            generator.close()
        return original(*args, **kwargs)

    model.__dict__["_prefill"] = read
    for _ in range(4):
        assert torch.equal(generator(**batch, max_new_tokens=5, do_sample=False), expected)
    assert len(reads) >= call


def test_a_runner_that_is_closed_between_capture_and_use_writes_on(recorded, qwen3, monkeypatch):
    generator, kept = recorded(qwen3), passes.keep_budget

    def keep(*args):
        kept(*args)
        generator.runner.close()

    monkeypatch.setattr(passes, "keep_budget", keep)
    assert torch.equal(*both(generator, qwen3))
    monkeypatch.undo()
    assert torch.equal(*both(generator, qwen3))
    assert generator.runner.stats.replays > 0
