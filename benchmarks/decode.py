"""Texts written from graphs beside transformers: python -m benchmarks.decode --model qwen3-4b

Owns the order of things: equality first, timing last. Knows the decode only through `accelerate`.
The surprising fact: in bf16 two correct decoders may write different texts. So ours is held to its
own eager steps token for token, and against transformers a first difference counts only where the
two best logits lie further apart than the two ways of computing them.

Prints a table, then one line of JSON. Exits 1 when a text was wrong or did not come from a graph.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers as tf
from torch import Tensor, nn

import dit_graphs
from benchmarks import protocol, results
from benchmarks.tables import table
from benchmarks.weights import randomise
from dit_graphs.config import GraphConfig
from dit_graphs.pipelines.text_encoder.causal_lm import CausalLM

Row = dict[str, object]
SCRIPT = "benchmarks/decode.py"
LEAD = 9  # tokens of the short text; the long one is longer by --new-tokens
P6_BUSY = 1.05
COLUMNS = (
    ("model", "model", "{}"),
    ("batch", "batch", "{}"),
    ("context", "context", "{}"),
    ("dynamic_ms", "transformers ms/token", "{:.2f}"),
    ("static_ms", "static+compile ms/token", "{:.2f}"),
    ("graph_ms", "graphs ms/token", "{:.2f}"),
    ("busy_ms", "busy ms/token", "{:.2f}"),
    ("speedup", "speed-up", "{:.1f}x"),
    ("first_token_ms", "first token ms", "{:.1f}"),
    ("dynamic_first_token_ms", "transformers' ms", "{:.1f}"),
    ("padded_prompt_ms", "half padding ms", "{:.1f}"),
    ("empty_slot_ms", "1 empty slot ms/token", "{:.2f}"),
    ("kv_bytes", "slots", "{:,}"),
    ("capture_ms", "capture ms", "{:.0f}"),
    ("first_difference", "differs at", "{}"),
    ("problems", "problems", "{}"),
)


def _qwen3_4b() -> tf.PretrainedConfig:
    return tf.Qwen3Config(
        vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        max_position_embeddings=40_960,
    )  # fmt: skip


def _mistral_24b() -> tf.PretrainedConfig:
    return tf.MistralConfig(
        vocab_size=131_072, hidden_size=5120, intermediate_size=32_768, num_hidden_layers=40,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, sliding_window=None,
        max_position_embeddings=131_072,
    )  # fmt: skip


def _tiny() -> tf.PretrainedConfig:
    return tf.Qwen3Config(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=4096,
    )  # fmt: skip


MODELS: dict[str, Callable[[], tf.PretrainedConfig]] = {
    "qwen3-4b": _qwen3_4b,
    "mistral-24b": _mistral_24b,
    "tiny": _tiny,
}


@dataclass(frozen=True, slots=True)
class Options:
    """How every row of this run is measured."""

    device: str
    backend: str
    new_tokens: int
    rounds: int
    with_static: bool


def build(name: str, device: str) -> nn.Module:
    """The model with random weights in bf16 (fp32 on a CPU); it never ends a text."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = tf.AutoModelForCausalLM.from_config(MODELS[name](), dtype=dtype)
    finally:
        torch.set_default_dtype(before)
    randomise(model)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return cast(nn.Module, model.eval())


@contextmanager
def _bare(model: nn.Module) -> Iterator[None]:
    """Inside, the model is as transformers made it: compilation too would stop at an intercept."""
    names = ("_compiled_call_impl", "generate")
    ours = {name: vars(model).pop(name) for name in names if name in vars(model)}
    try:
        yield
    finally:
        vars(model).update(ours)


class Texts:
    """Greedy texts of one model, by transformers and by graphs, for one batch of prompts."""

    def __init__(self, model: nn.Module, batch: int, context: int, device: str) -> None:
        self.model = model
        generator = torch.Generator().manual_seed(batch * 100_003 + context)
        vocabulary = cast(Any, model).config.vocab_size
        ids = torch.randint(3, vocabulary, (batch, context), generator=generator)
        self.ids = ids.to(device)

    def write(self, count: int, ids: Tensor | None = None, **options: object) -> Tensor:
        """`count` new tokens [B, count] by whatever serves `generate` now."""
        given = self.ids if ids is None else ids
        mask = options.pop("attention_mask", torch.ones_like(given))
        output = cast(Any, self.model).generate(
            input_ids=given, attention_mask=mask, max_new_tokens=count, do_sample=False, **options
        )
        return cast(Tensor, output[:, given.shape[1] :])

    def plain(self, count: int, **options: object) -> Tensor:
        """The same, by transformers, with nothing of ours on the model."""
        with _bare(self.model):
            return self.write(count, **options)

    def half_padded(self) -> dict[str, Tensor]:
        """The prompts behind as much left padding."""
        mask = torch.ones_like(self.ids)
        return {
            "ids": torch.cat([torch.zeros_like(self.ids), self.ids], dim=1),
            "attention_mask": torch.cat([torch.zeros_like(mask), mask], dim=1),
        }


def measure(model: nn.Module, name: str, batch: int, context: int, options: Options) -> Row:
    """One row; `problems` is empty when every text was right and written from graphs."""
    texts = Texts(model, batch, context, options.device)
    row: Row = {
        "key": f"{name} batch {batch} context {context} {options.backend}",
        "model": name,
        "batch": batch,
        "context": context,
        "device": options.device,
        "backend": options.backend,
        "new_tokens": options.new_tokens,
    }
    dit_graphs.restore(model)
    config = GraphConfig(backend=cast(Any, options.backend), components=("text_encoder",))
    dit_graphs.accelerate(model, config)
    try:
        found, problems = _equality(texts, options)
        row |= found
        if not problems:
            row |= _timing(texts, options)
            row |= _paddings(texts, options)
        row |= _record(model)
    finally:
        dit_graphs.restore(model)
    return {**row, "is_equal": not problems, "problems": problems}


def _equality(texts: Texts, options: Options) -> tuple[Row, list[str]]:
    count = LEAD + options.new_tokens
    graphs = texts.write(count)
    before = _decode(texts.model)["replays"]
    again = texts.write(count)
    problems = [] if torch.equal(graphs, again) else ["graphs differ from themselves"]
    replays = cast(int, _decode(texts.model)["replays"]) - cast(int, before)
    if replays != count - 1:
        problems.append(f"{replays} of {count - 1} steps from a graph")
    dit_graphs.restore(texts.model)
    dit_graphs.accelerate(texts.model, backend="debug", components=("text_encoder",))
    if not torch.equal(texts.write(count), graphs):
        problems.append("graphs differ from their own eager steps")
    dit_graphs.restore(texts.model)
    config = GraphConfig(backend=cast(Any, options.backend), components=("text_encoder",))
    dit_graphs.accelerate(texts.model, config)
    row, wrong = _against_transformers(texts, graphs)
    return row, problems + wrong


def _against_transformers(texts: Texts, graphs: Tensor) -> tuple[Row, list[str]]:
    """Where the texts part, and whether the logits there were too close to tell."""
    plain = texts.plain(graphs.shape[1])
    problems: list[str] = []
    firsts: list[int] = []
    for number in range(plain.shape[0]):
        unequal = (plain[number] != graphs[number]).nonzero()
        if not len(unequal):
            continue
        at = int(unequal[0])
        firsts.append(at)
        prefix = torch.cat([texts.ids[number], plain[number, :at]])[None]
        gap, noise = _gap_and_noise(texts.model, prefix)
        if gap > noise:
            problems.append(f"row {number} differs at {at}: gap {gap:.3g}, noise {noise:.3g}")
    return {
        "first_difference": min(firsts) if firsts else None,
        "rows_apart": len(firsts),
    }, problems


def _gap_and_noise(model: nn.Module, prefix: Tensor) -> tuple[float, float]:
    """The best logit's lead behind `prefix`, and how far two attention kernels disagree there."""
    tokens = prefix.shape[1]
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=prefix.device).tril()[None, None]
    positions = torch.arange(tokens, device=prefix.device)[None]
    with torch.no_grad():
        one = cast(Any, model).forward(input_ids=prefix, use_cache=False).logits[0, -1].float()
        lm = CausalLM(model)
        allowed = dict.fromkeys(lm.windows, causal)
        other = lm.step(prefix, positions, allowed, _Kept()).float()[0, -1]
    best = one.topk(2).values
    return float(best[0] - best[1]), 2 * float((one - other).abs().max())


class _Kept:
    """Keeps nothing; attends over the pass itself."""

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys, values


def _timing(texts: Texts, options: Options) -> Row:
    variants: dict[str, Callable[[int], Tensor]] = {"dynamic": lambda count: texts.plain(count)}
    if options.with_static:
        variants["static"] = lambda count: texts.plain(count, cache_implementation="static")
    variants["graph"] = lambda count: texts.write(count)
    calls: dict[str, Callable[[], object]] = {}
    for name, write in variants.items():
        calls[f"{name} short"] = lambda write=write: write(LEAD)  # type: ignore[misc]
        calls[f"{name} long"] = lambda write=write: write(LEAD + options.new_tokens)  # type: ignore[misc]
        calls[f"{name} first"] = lambda write=write: write(1)  # type: ignore[misc]
    walls = protocol.interleaved(calls, rounds=options.rounds)
    row: Row = {"timings": {name: timing.as_dict() for name, timing in walls.items()}}
    for name in variants:
        added = walls[f"{name} long"].median_ms - walls[f"{name} short"].median_ms
        row[f"{name}_ms"] = added / options.new_tokens
    row["first_token_ms"] = walls["graph first"].median_ms
    row["dynamic_first_token_ms"] = walls["dynamic first"].median_ms
    if options.device == "cuda":
        row |= _busy(texts, options, cast(float, row["graph_ms"]), cast(float, row["dynamic_ms"]))
    return row


def _busy(texts: Texts, options: Options, graph_ms: float, dynamic_ms: float) -> Row:
    long = protocol.busy(lambda: texts.write(LEAD + options.new_tokens))
    short = protocol.busy(lambda: texts.write(LEAD))
    busy_ms = (long.ms - short.ms) / options.new_tokens
    return {
        "busy_ms": busy_ms,
        "speedup": dynamic_ms / graph_ms,
        "graph_over_busy": graph_ms / busy_ms,
        "is_within_p6": graph_ms <= P6_BUSY * busy_ms,
    }


def _paddings(texts: Texts, options: Options) -> Row:
    """What padded prompt columns cost before the first token, and a padded row at every token."""
    padded = texts.half_padded()
    calls: dict[str, Callable[[], object]] = {"padded": lambda: texts.write(1, **padded)}  # type: ignore[arg-type]
    fewer = texts.ids[:-1]
    if len(fewer):
        calls["short"] = lambda: texts.write(LEAD, fewer)
        calls["long"] = lambda: texts.write(LEAD + options.new_tokens, fewer)
    walls = protocol.interleaved(calls, rounds=options.rounds, warmups=4)
    row: Row = {"padded_prompt_ms": walls["padded"].median_ms}
    if len(fewer):
        added = walls["long"].median_ms - walls["short"].median_ms
        row["empty_slot_ms"] = added / options.new_tokens
    return row


def _decode(model: nn.Module) -> Row:
    components = cast("dict[str, Row]", dit_graphs.stats(model)["components"])
    return components["decode"]


def _record(model: nn.Module) -> Row:
    decode = _decode(model)
    graphs = cast("list[Row]", decode["graphs"])
    return {
        "kv_bytes": decode["kv_bytes"],
        "slots": decode["slots"],
        "slot_tokens": decode["slot_tokens"],
        "row_padding": decode["row_padding"],
        "prompt_padding": decode["prompt_padding"],
        "capture_ms": sum(cast(float, graph["capture_ms"]) for graph in graphs),
        "graph_bytes": sum(cast(int, graph["nbytes"]) for graph in graphs),
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line. Exits 2 on a wrong one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode", description=__doc__, allow_abbrev=False
    )
    sizes = {"type": lambda text: [int(part) for part in text.split(",")]}
    parser.add_argument("--model", choices=MODELS, default="qwen3-4b")
    parser.add_argument("--batch", default=[1, 4], **sizes)  # type: ignore[arg-type]
    parser.add_argument("--context", default=[128, 1024], **sizes)  # type: ignore[arg-type]
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--backend", default="full", choices=("auto", "full", "recorded"))
    parser.add_argument("--rounds", type=int, default=protocol.MIN_ROUNDS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--no-static", action="store_true", help="without static cache + compile")
    results.add_arguments(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Measures every batch at every context; the exit status says whether every text was right."""
    given = parse(arguments)
    origin = results.provenance(commit=given.commit, allow_dirty=given.allow_dirty)
    backend = "recorded" if given.device == "cpu" else given.backend
    options = Options(given.device, backend, given.new_tokens, given.rounds, not given.no_static)
    model = build(given.model, given.device)
    with protocol.GpuClock.maybe(given.device) as clock:
        rows = [
            measure(model, given.model, batch, context, options)
            for batch in given.batch
            for context in given.context
        ]
    print(table(rows, COLUMNS), flush=True)
    if given.output:
        run = results.run_record(SCRIPT, rows, provenance=origin, clocks=clock.summary())
        results.write(Path(given.output), run)
    is_equal = all(row["is_equal"] for row in rows)
    slim = [{key: value for key, value in row.items() if key != "timings"} for row in rows]
    print(json.dumps({"is_equal": is_equal, "output": given.output, "rows": slim}))
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
