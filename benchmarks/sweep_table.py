"""The cases of tests/data/model_cases.json as cases of the sweep, with a second width and batch.

Owns what the table does not say: which sides of which inputs grow with the picture, and which carry
the batch. Knows nothing of graphs. The surprising fact: a second size follows from the first
(the last side of the latents, or the number of tokens); ONE_SIZE names the classes for which it
does not, and why.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.sweep_cases import Case, Draw, Inputs, Tree, class_of

__all__ = ["CASES", "ONE_BATCH", "ONE_SIZE", "TABLE"]

TABLE = Path(__file__).resolve().parent.parent / "tests" / "data" / "model_cases.json"

_STEP = re.compile(r"(^|_)(timesteps?|t|guidance)(_r)?$")
_TOKENS = re.compile(r"^(class_labels|input_ids|prior_token_id)$")
_CONSTANT_DATA = re.compile(r"^id_(vit_hidden|cond)$")
_LATENTS = ("hidden_states", "x")
_GROWS = re.compile(r"^(x|.*hidden_states|.*latents.*|.*_mask|context_latents)$")
_STAYS = re.compile(r"^(encoder|audio_|face_|text_)")
_LISTS_OF_SAMPLES = ("x", "cap_feats", "shape_list")
_WITHOUT_BATCH = re.compile(r"^(padding_mask|prior_token_.*)$")
_CHANNELS_FIRST = ("MiniMaxMusic3Transformer1DModel", "StableAudio3DiTModel")
# The table's size is the largest these classes have positions for: the second one is narrower.
_LARGEST = ("AuraFlowTransformer2DModel", "HiDreamImageTransformer2DModel")

ONE_SIZE: dict[str, str] = {
    "Cosmos3OmniTransformer": "the table's indexes and positions are those of one size",
    "DiTTransformer2DModel": "its positions are those of one square size",
    "Ideogram4Transformer2DModel": "the table's positions are those of one size",
    "JoyImageEditPlusTransformer3DModel": "the table's patches are those of one size",
    "Krea2Transformer2DModel": "the table's positions are those of one size",
    "MiniMaxH3Transformer3DModel": "the table's indices are those of one size",
    "OmniGenTransformer2DModel": "the table's positions are those of one size",
    "PriorTransformer": "embeddings have no size",
}
ONE_BATCH: dict[str, str] = {"Cosmos3OmniTransformer": "the class packs one sample per call"}

# Inputs that cannot change more than half of the output, and why.
WEAK: dict[str, dict[str, str]] = {
    "ConsisIDTransformer3DModel": {
        "['id_vit_hidden']": "passes layer norms over two channels, which keep little but a sign",
        "['id_cond']": "passes layer norms over two channels, which keep little but a sign",
    },
    "LongCatImageTransformer2DModel": {"['guidance']": "accepted and never read"},
    "TransformerTemporalModel": {"['timestep']": "accepted and never read"},
    "OmniGenTransformer2DModel": {"['input_img_latents']": "conditions the first sample only"},
    "DiTTransformer2DModel": {"['class_labels']": "half of the labels drawn are the same"},
}


def _cases() -> Iterator[Case]:
    table: dict[str, Tree] = json.loads(TABLE.read_text())
    for key, entry in table.items():
        name = str(entry["class"])
        config, inputs = entry["init"], entry["inputs"]
        assert isinstance(config, dict) and isinstance(inputs, dict)
        yield Case(
            kind="dit",
            name=name,
            variant=key.partition("#")[2],
            make=_maker(name, config),
            inputs=_reader(name, inputs),
            widths=(1,) if name in ONE_SIZE else (1, 2),
            batches=(1,) if name in ONE_BATCH else (1, 2),
            why_weak=WEAK.get(name),
        )


def _maker(name: str, config: Tree) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = class_of(name)(**config)
        assert isinstance(module, nn.Module)
        return module

    return make


def _reader(name: str, spec: Tree) -> Inputs:
    def inputs(draw: Draw, batch: int, width: int) -> Tree:
        wanted = copy.deepcopy(spec)
        if width > 1:
            _widen(name, wanted)
        if batch > 1:
            _multiply(wanted, batch)
        return {argument: _value(value, argument, draw) for argument, value in wanted.items()}

    return inputs


def _shape(value: object) -> list[int]:
    shape = value.get("tensor") if isinstance(value, dict) else None
    return shape if isinstance(shape, list) else []


def _tensors(value: object) -> Iterator[Tree]:
    """The tensor entries of an argument: itself, or the items of a list."""
    if _shape(value):
        assert isinstance(value, dict)
        yield value
    elif isinstance(value, dict) and isinstance(value.get("list"), list):
        for item in value["list"]:
            yield from _tensors(item)


# Another size.
def _widen(name: str, spec: Tree) -> None:
    """One side of the picture (or the number of tokens) is twice the table's, in every input."""
    latents = next(entry for key in _LATENTS for entry in _tensors(spec.get(key)))
    shape = list(_shape(latents))
    if len(shape) >= 4:
        for key, value in spec.items():
            if _GROWS.match(key) and not _STAYS.match(key):
                for entry in _tensors(value):
                    if len(_shape(entry)) >= 4 and _shape(entry)[-1] == shape[-1]:
                        _resize(entry, -1, 0.5 if name in _LARGEST else 2)
    elif name in _CHANNELS_FIRST:
        _resize(latents, -1, 2)
        for entry in _tensors(spec["encoder_hidden_states"]):
            if _shape(entry)[1] == shape[2]:
                _resize(entry, 1, 2)
    else:
        for key in ("hidden_states", "img_ids", "attention_mask", "context_latents"):
            for entry in _tensors(spec.get(key)):
                side = 0 if len(_shape(entry)) == 2 and key == "img_ids" else 1
                _resize(entry, side, 2)
    if isinstance(spec.get("width"), int):
        spec["width"] = int(str(spec["width"])) * 2
    if "img_shapes" in spec:
        spec["img_shapes"] = _with_wider_tuples(spec["img_shapes"], 2)


def _with_wider_tuples(value: object, factor: int) -> object:
    if isinstance(value, dict) and "tuple" in value:
        *sides, last = value["tuple"]
        return {"tuple": [*sides, last * factor]}
    if isinstance(value, dict):
        return {"list": [_with_wider_tuples(item, factor) for item in value["list"]]}
    return value


# Another batch.
def _multiply(spec: Tree, factor: int) -> None:
    latents = next(entry for name in _LATENTS for entry in _tensors(spec.get(name)))
    batch = _shape(latents)[0]
    for name, value in spec.items():
        if name in _LISTS_OF_SAMPLES and isinstance(value, dict) and "list" in value:
            value["list"] = value["list"] * factor
            continue
        for entry in _tensors(value):
            if _shape(entry)[0] == batch and not _WITHOUT_BATCH.match(name):
                _resize(entry, 0, factor)
    if "x" in spec:
        for entry in _tensors(spec["t"]):
            entry["tensor"] = [factor]


def _resize(entry: Tree, side: int, factor: float) -> None:
    """One side of a tensor entry is `factor` times as long; given values are repeated."""
    shape = entry["tensor"]
    assert isinstance(shape, list)
    shape[side] = int(shape[side] * factor)
    if "values" in entry:
        repeats = [1] * len(shape)
        repeats[side] = int(factor)
        entry["values"] = torch.tensor(entry["values"]).repeat(repeats).tolist()


# From the table's words to arguments.
def _value(spec: object, path: str, draw: Draw) -> object:
    match spec:
        case {"tensor": _}:
            return _tensor(spec, path, draw)
        case {"list": items}:
            return [_value(item, f"{path}/{i}", draw) for i, item in enumerate(items)]
        case {"tuple": items}:
            return tuple(_value(item, f"{path}/{i}", draw) for i, item in enumerate(items))
        case {"dict": entries}:
            return {
                int(key) if key.isdigit() else key: _value(item, f"{path}/{key}", draw)
                for key, item in entries.items()
            }
        case list():
            return [_value(item, f"{path}/{i}", draw) for i, item in enumerate(spec)]
        case _:
            return spec


def _tensor(spec: Tree, path: str, draw: Draw) -> Tensor:
    """Drawn anew unless it steers shapes: masks, positions and sizes are the table's own."""
    dtype, shape = getattr(torch, str(spec["dtype"])), _shape(spec)
    if "values" not in spec and "fill" not in spec:
        return draw(*shape).to(dtype)
    if "values" in spec:
        tensor = torch.tensor(spec["values"], dtype=dtype)
    else:
        fill = spec["fill"]
        assert isinstance(fill, (int, float))
        tensor = torch.full(shape, fill, dtype=dtype)
    argument = path.split("/")[0]
    if _STEP.search(argument):
        # around the table's value, whatever the range is, and never the same one
        unit = draw.unit(*shape)
        return tensor * unit + unit / 8 if dtype.is_floating_point else draw.step(*shape)
    if _TOKENS.match(argument):
        return draw.tokens(max(int(tensor.max()) + 1, 2), *shape)
    if dtype.is_floating_point and ("fill" not in spec or _CONSTANT_DATA.match(argument)):
        return tensor + 0.5 * draw(*shape)
    return tensor


CASES: tuple[Case, ...] = tuple(_cases())
