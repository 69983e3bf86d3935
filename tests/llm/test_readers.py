"""Whoever reads a text along may want another one meanwhile: never a torn text, never a hang."""

from __future__ import annotations

import threading

import tiny_llms
import torch

from dit_graphs import Reason
from dit_graphs.llm import decode, writing

GIVEN = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


class _Asking:
    """A streamer that does something at its fourth word."""

    def __init__(self, action) -> None:
        self.action, self.count = action, 0

    def put(self, value):
        self.count += 1
        if self.count == 4:
            self.action()

    def end(self):
        pass


def test_a_reader_that_asks_for_another_text_gets_transformers_own(recorded, qwen3):
    """The slots hold the first text; a second one in the same slots would tear it."""
    generator = recorded(qwen3)
    outer, inner = tiny_llms.prompts([6, 3, 5]), tiny_llms.prompts([4, 2])
    expected = [qwen3.generate(**batch, **GIVEN) for batch in (outer, inner)]
    for _ in range(2):
        found = []
        reader = _Asking(lambda found=found: found.append(generator(**inner, **GIVEN)))
        assert torch.equal(generator(**outer, **GIVEN, streamer=reader), expected[0])
        assert torch.equal(found[0], expected[1])
    assert generator.runner.stats.fallbacks[Reason.NESTED_REPLAY] == 2
    before = generator.runner.stats.replays
    assert torch.equal(generator(**inner, **GIVEN), expected[1])
    assert generator.runner.stats.replays > before


def test_a_reader_that_waits_for_another_threads_text_is_not_waited_for(
    recorded, qwen3, monkeypatch
):
    monkeypatch.setattr(decode, "_PATIENCE_S", 0.05)
    generator, batch = recorded(qwen3), tiny_llms.prompts([6])
    expected, found = qwen3.generate(**batch, **GIVEN), []

    def ask():
        other = threading.Thread(
            target=lambda: found.append(generator(**batch, **GIVEN)), daemon=True
        )
        other.start()
        other.join(20)
        assert not other.is_alive(), "two wait for each other"

    assert torch.equal(generator(**batch, **GIVEN, streamer=_Asking(ask)), expected)
    assert torch.equal(found[0], expected)
    assert generator.runner.stats.fallbacks[Reason.NESTED_REPLAY] == 1


def test_a_reader_that_moves_the_weights_keeps_the_slots_of_its_text(recorded):
    """What moved weights give back are graphs of other texts, not the slots of this one."""
    model = tiny_llms.build("qwen3")
    generator, batch = recorded(model), tiny_llms.prompts([6])
    expected = model.generate(**batch, **GIVEN)
    generator(**batch, **GIVEN)
    held = generator.runner.slots()

    def move():
        weight = model.model.norm.weight
        weight.data = weight.data.clone()
        generator.runner.mark_changed()
        assert generator.runner.cache is held

    assert torch.equal(generator(**batch, **GIVEN, streamer=_Asking(move)), expected)
    assert torch.equal(generator(**batch, **GIVEN), expected)


def test_a_reader_that_closes_the_runner_hears_its_text_to_the_end(recorded, qwen3, monkeypatch):
    """Also where the slots must grow for it; afterwards nothing of them is left."""
    monkeypatch.setattr(writing, "RESERVED_AT_ONCE", 8)
    generator, batch = recorded(qwen3), tiny_llms.prompts([6, 3])
    given = {**GIVEN, "max_new_tokens": 34}
    expected = qwen3.generate(**batch, **given)
    assert torch.equal(generator(**batch, **given, streamer=_Asking(generator.close)), expected)
    report = generator.runner.report()
    assert report["kv_bytes"] == report["row_bytes"] == 0
