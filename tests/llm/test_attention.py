"""One token attends as its model says: heads folded over shared keys, nothing else touched."""

from __future__ import annotations

import inspect
import threading

import pytest
import tiny_llms
import torch
import transformers.integrations.sdpa_attention as sdpa_code
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from dit_graphs import Reason
from dit_graphs.pipelines.text_encoder.attention import one_token_attention
from dit_graphs.pipelines.text_encoder.causal_lm import CausalLM

# older transformers ask without the values
TAKES_VALUES = "value" in inspect.signature(sdpa_code.use_gqa_in_sdpa).parameters


def shares_keys(mask, key, value):
    """What transformers' attention asks before each call."""
    if TAKES_VALUES:
        return sdpa_code.use_gqa_in_sdpa(mask, key, value)
    return sdpa_code.use_gqa_in_sdpa(mask, key)


class Seen(TorchFunctionMode):
    """Remembers the shapes of every SDPA call that reaches torch."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is scaled_dot_product_attention:
            self.calls.append(tuple(tuple(tensor.shape) for tensor in args[:3]))
        return func(*args, **(kwargs or {}))


class Keep:
    """Keeps nothing: sixteen positions all hold the token itself."""

    def store(self, layer, keys, values):
        return keys.repeat(1, 1, 16, 1), values.repeat(1, 1, 16, 1)


def drawn(*, heads=6, shared=2, tokens=1, context=16):
    generator = torch.Generator().manual_seed(7)
    shapes = ((3, heads, tokens, 8), (3, shared, context, 8), (3, shared, context, 8))
    query, key, value = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    ends = torch.tensor([1, 9, 16])
    mask = torch.arange(context)[None, :] < ends[:, None]
    return query, key, value, mask[:, None, None, :].expand(3, 1, tokens, context)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_every_query_head_meets_its_own_keys(scale):
    """Head h shares the keys of h // 3: softmax(q · k) · v by hand, in float64."""
    query, key, value, mask = drawn()
    with one_token_attention():
        mine = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
        )
    for head in range(6):
        scores = (query[:, head] @ key[:, head // 3].mT) * (scale or 8**-0.5)
        weights = scores.masked_fill(~mask[:, 0], float("-inf")).softmax(-1)
        torch.testing.assert_close(mine[:, head], weights @ value[:, head // 3])


@pytest.mark.parametrize("name", ["qwen3", "qwen3-sliding", "llama", "gemma2"])
def test_a_step_reads_shared_keys_once(name):
    """4 query heads over 2 pairs of keys and values: what torch is asked has 2 heads, 2 queries."""
    model = CausalLM(tiny_llms.build(name))
    token = torch.tensor([[5], [6]])
    allowed = dict.fromkeys(model.windows, torch.ones(2, 1, 1, 16, dtype=torch.bool))
    with Seen() as seen:
        model.step(token, torch.zeros_like(token), allowed, Keep())
    if name == "gemma2":  # soft caps: transformers' own products, no SDPA
        assert seen.calls in ([], [((2, 2, 2, 8), (2, 2, 16, 8), (2, 2, 16, 8))] * 3)
    else:
        assert seen.calls == [((2, 2, 2, 8), (2, 2, 16, 8), (2, 2, 16, 8))] * 3


def test_longer_queries_and_calls_without_a_mask_are_torchs_own():
    query, key, value, mask = drawn(tokens=4)
    alone = query[:, :, :1]
    with one_token_attention(), Seen() as seen:
        longer = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        bare = scaled_dot_product_attention(alone, key, value, enable_gqa=True)
    assert [call[0] for call in seen.calls] == [(3, 6, 4, 8), (3, 6, 1, 8)]
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    assert torch.equal(longer, expected)
    assert torch.equal(bare, scaled_dot_product_attention(alone, key, value, enable_gqa=True))


def test_transformers_shares_keys_under_a_mask_in_this_thread_only():
    _, key, value, mask = drawn()
    with one_token_attention():
        answers = [shares_keys(mask, key, value)]
        other = threading.Thread(target=lambda: answers.append(shares_keys(mask, key, value)))
        other.start()
        other.join()
    answers.append(shares_keys(mask, key, value))
    assert answers == [True, False, False]


def test_a_compiled_model_is_compiled_as_before():
    """What is patched in transformers must not split a graph: `fullgraph` raises where it does."""
    query, key, value, mask = drawn()
    with one_token_attention():
        pass  # the patch is there from now on

    def ask(query, key, value, mask):
        shares = shares_keys(mask, key, value)
        return query * 2 if shares else query * 3

    compiled = torch.compile(ask, backend="eager", fullgraph=True)
    assert torch.equal(compiled(query, key, value, mask), query * 3)


def test_a_step_that_repeats_itself_only_for_a_while_is_named_unsteady(recorded):
    """Three equal runs, then other bits: the graph is refused, and not for its own fault."""
    model = tiny_llms.build("qwen3")
    layer = model.model.layers[1].mlp
    original, reasons = layer.forward, set()
    for start in range(3):  # in one of these the graph is captured at the end of such three
        runs = iter(range(start, 1_000_000))
        layer.forward = lambda x, runs=runs: original(x) + 1e-3 * (next(runs) // 3)
        generator = recorded(model)
        generator(**tiny_llms.prompts([9, 4]), max_new_tokens=12, do_sample=False)
        reasons |= set(generator.runner.stats.fallbacks)
    assert Reason.EAGER_NONDETERMINISTIC in reasons
    assert Reason.VERIFY_MISMATCH not in reasons
