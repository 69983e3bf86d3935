"""Quantised weights: other kernels, other memory, often a tensor subclass without an address.

Each library is an optional dependency (`pip install -e ".[interop]"`). Quantising happens in place,
before graphs exist or under them; either way the next picture is the quantised model's.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pair import Pair
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from dit_graphs.backends.base import BreakLog, CapturePlan
from dit_graphs.memory import device_state

pytestmark = pytest.mark.filterwarnings("ignore")


def _replace(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and layer.in_features % 32 == 0:
                setattr(parent, name, make(layer).eval())


def _torchao(name: str) -> Callable[[nn.Module], None]:
    def quantise(model: nn.Module) -> None:
        library = pytest.importorskip("torchao.quantization")
        library.quantize_(model, getattr(library, name)())

    return quantise


def _gguf(model: nn.Module) -> None:
    gguf = pytest.importorskip("gguf")
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    kind = gguf.GGMLQuantizationType.Q8_0

    def make(layer: nn.Linear) -> nn.Module:
        has_bias = layer.bias is not None
        made = GGUFLinear(layer.in_features, layer.out_features, has_bias, layer.weight.dtype)
        packed = gguf.quants.quantize(layer.weight.detach().float().numpy(), kind)
        made.weight = GGUFParameter(torch.from_numpy(packed), quant_type=kind)
        made.bias = layer.bias
        return made

    _replace(model, make)


def _bitsandbytes(bits: int) -> Callable[[nn.Module], None]:
    def quantise(model: nn.Module) -> None:
        layers = pytest.importorskip("bitsandbytes").nn

        def make(layer: nn.Linear) -> nn.Module:
            has_bias, sizes = layer.bias is not None, (layer.in_features, layer.out_features)
            if bits == 4:
                made = layers.Linear4bit(*sizes, has_bias, compute_dtype=layer.weight.dtype)
            else:
                made = layers.Linear8bitLt(*sizes, has_bias, has_fp16_weights=False)
            made.load_state_dict(layer.state_dict())
            return made.to(layer.weight.device)

        _replace(model, make)

    return quantise


def _quanto(model: nn.Module) -> None:
    quanto = pytest.importorskip("optimum.quanto")
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)


_KINDS: dict[str, Callable[[nn.Module], None]] = {
    "torchao int8": _torchao("Int8WeightOnlyConfig"),
    "torchao int8, dynamic": _torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao float8": _torchao("Float8WeightOnlyConfig"),
    "GGUF Q8_0": _gguf,
    "bitsandbytes 4-bit": _bitsandbytes(4),
    "bitsandbytes 8-bit": _bitsandbytes(8),
    "quanto int8": _quanto,
}


@pytest.mark.parametrize("kind", _KINDS)
def test_b59_quantised_before_graphs_or_under_them(kind: str) -> None:
    quantise = _KINDS[kind]
    quantise(nn.Sequential(nn.Linear(32, 32, dtype=torch.bfloat16)))  # skips where it is missing
    pair = Pair("flux", dtype=torch.bfloat16)
    plain = pair.latents(steps=3)
    pair.both(lambda pipe: quantise(pipe.transformer))
    under = [pair.latents(steps=3, seed=seed) for seed in range(3)]
    assert not torch.equal(under[0], plain)
    # bitsandbytes' 8-bit layers lay out their weights anew in the first forward
    assert 1 <= pair.component()["invalidations"] <= 2
    assert set(pair.component()["fallbacks"]) == {"warming_up"}
    before = Pair("flux", dtype=torch.bfloat16, prepare=lambda pipe: quantise(pipe.transformer))
    assert torch.equal(before.latents(steps=4), before.latents(steps=4))
    assert min(pair.replays, before.replays) >= 5


def test_b59_what_a_quantised_weight_wraps_outlives_it() -> None:
    """The wrapper has no memory of its own: a graph must hold the tensors inside."""
    log = BreakLog(CapturePlan(state=device_state(torch.device("cpu")), inputs=()))
    values, scales = torch.ones(4, 4), torch.ones(4, 4)
    log.note_used(TwoTensor(values, scales))
    kept = {tensor.data_ptr() for tensor in log.externals.values()}
    assert kept == {values.data_ptr(), scales.data_ptr()}
