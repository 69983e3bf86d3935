"""A denoiser in one quantised file, beside the other components of a base."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import dit_graphs
from dit_graphs.app import demo_model
from dit_graphs.pipelines.generate import (
    GenerateRequest,
    LoadedPipeline,
    ModelSpec,
    generate,
    load_pipeline,
)

gguf = pytest.importorskip("gguf")

BUNDLED = ModelSpec(model=str(demo_model.path()), device="cpu")
REQUEST = GenerateRequest(
    prompt="a red heart",
    seed=7,
    height=128,
    width=128,
    num_inference_steps=6,
    guidance_scale=2.0,
    set={"max_sequence_length": 64},
)


def _write(path: Path) -> int:
    """The bundled denoiser with its blocks' matrices in Q8_0; returns how many those are."""
    kind = gguf.GGMLQuantizationType.Q8_0
    transformer = load_pipeline(BUNDLED).pipe.transformer
    writer = gguf.GGUFWriter(str(path), "z-image")
    num_quantised = 0
    for name, tensor in transformer.state_dict().items():
        values = tensor.float().numpy()
        is_block = ".attention.to_" in name or ".feed_forward.w" in name
        if is_block and values.ndim == 2 and values.shape[1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
            num_quantised += 1
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return num_quantised


def test_a_gguf_denoiser_draws_the_picture_and_replays_to_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "denoiser.gguf"
    assert _write(path) > 20
    spec = ModelSpec(model=str(path), base=str(demo_model.path()), device="cpu")

    def pixels(loaded: LoadedPipeline) -> torch.Tensor:
        (item,) = generate(loaded, REQUEST)
        (picture,) = item.media
        return torch.from_numpy(np.array(picture.frames[0])).float()

    loaded = load_pipeline(spec)
    plain = pixels(loaded)
    dit_graphs.accelerate(loaded.pipe, backend="recorded")
    assert torch.equal(pixels(loaded), plain)
    assert torch.equal(pixels(loaded), plain)
    assert dit_graphs.stats(loaded.pipe)["components"]["denoiser"]["replays"] >= 6
    unquantised = pixels(load_pipeline(BUNDLED))
    difference = (plain - unquantised).abs().mean()
    assert 0 < difference < 8, "eight bits a weight change the picture a little"
