"""One small forward of (nearly) every denoiser class of diffusers: tests/data/model_cases.json.

Owns the reading of that table: class, constructor arguments, inputs. Each case comes with inputs
and *changed* inputs of the same shapes, because a graph that returns its capture's output passes
any test on unchanged ones. The surprising fact: which leaves may change is not in the data — masks,
positions and index tensors stay as they are (they steer shapes), everything else gets new values.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import diffusers
import torch
from torch import Tensor, nn

from benchmarks.weights import randomise

TABLE = Path(__file__).resolve().parent.parent / "data" / "model_cases.json"

_STEP = re.compile(r"(^|_)(timesteps?|t|guidance)(_r)?$")
_TOKENS = re.compile(r"^(class_labels|input_ids|prior_token_id)$")
_CONSTANT_DATA = re.compile(r"^id_(vit_hidden|cond)$")

# Inputs that cannot change more than half of the output, and why; found by tests/test_support.py.
WEAK_INPUTS: dict[str, frozenset[str]] = {
    # The face passes layer norms over two channels, which keep little more than a sign.
    "ConsisIDTransformer3DModel": frozenset({"['id_vit_hidden']", "['id_cond']"}),
    # Accepted and never read.
    "LongCatImageTransformer2DModel": frozenset({"['guidance']"}),
    "TransformerTemporalModel": frozenset({"['timestep']"}),
    # Conditions the first of two samples only.
    "OmniGenTransformer2DModel": frozenset({"['input_img_latents']"}),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model in eval mode on the CPU and two sets of keyword arguments for its forward."""

    name: str
    module: nn.Module
    inputs: dict[str, object]
    changed: dict[str, object]


@cache
def _table() -> dict[str, dict[str, object]]:
    table: dict[str, dict[str, object]] = json.loads(TABLE.read_text())
    return table


def names() -> list[str]:
    """The cases whose class the installed diffusers has."""
    return [name for name, case in _table().items() if hasattr(diffusers, str(case["class"]))]


def build(name: str, *, seed: int = 0) -> Case:
    """The case of that name: seeded weights without zero gates, inputs, changed inputs.

    Inputs are new objects on every call. Raises KeyError for an unknown name.
    """
    entry = _table()[name]
    init, inputs = entry["init"], entry["inputs"]
    assert isinstance(init, dict) and isinstance(inputs, dict)
    module = getattr(diffusers, str(entry["class"]))(**init).eval()
    randomise(module, seed=seed)
    return Case(
        name=name,
        module=module,
        inputs={key: _value(value, name, key, change=False) for key, value in inputs.items()},
        changed={key: _value(value, name, key, change=True) for key, value in inputs.items()},
    )


def _value(spec: object, case: str, path: str, *, change: bool) -> object:
    """A JSON value as the argument it stands for."""
    match spec:
        case {"tensor": _}:
            return _tensor(spec, case, path, change=change)
        case {"list": items}:
            return [_value(v, case, f"{path}/{i}", change=change) for i, v in enumerate(items)]
        case {"tuple": items}:
            return tuple(_value(v, case, f"{path}/{i}", change=change) for i, v in enumerate(items))
        case {"dict": entries}:
            return {
                int(key) if key.isdigit() else key: _value(v, case, f"{path}/{key}", change=change)
                for key, v in entries.items()
            }
        case list():
            return [_value(v, case, f"{path}/{i}", change=change) for i, v in enumerate(spec)]
        case _:
            return spec


def _tensor(spec: dict[str, object], case: str, path: str, *, change: bool) -> Tensor:
    dtype = getattr(torch, str(spec["dtype"]))
    shape = spec["tensor"]
    assert isinstance(shape, list)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case}/{path}/{change}".encode()))
    argument = path.split("/")[0]
    if "values" not in spec and "fill" not in spec:
        return torch.randn(shape, dtype=dtype, generator=generator)
    tensor = (
        torch.tensor(spec["values"], dtype=dtype)
        if "values" in spec
        else torch.full(shape, spec["fill"], dtype=dtype)
    )
    if not change or dtype == torch.bool:
        return tensor
    if _STEP.search(argument):
        # Towards the middle of the range, whatever the range is, and never the same value.
        return tensor * 0.9 + 0.04 if dtype.is_floating_point else (tensor + 17) % 1000
    if _TOKENS.match(argument):
        return (tensor + 1) % max(int(tensor.max()) + 1, 2)
    if dtype.is_floating_point and ("fill" not in spec or _CONSTANT_DATA.match(argument)):
        return tensor + 0.5 * torch.randn(shape, dtype=dtype, generator=generator)
    return tensor
