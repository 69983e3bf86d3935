"""What every ControlNet of diffusers is called with, and those that hold several, for the sweep.

Owns the inputs only. Knows nothing of graphs. The surprising fact: Z-Image's ControlNet has no
weights of its own for text and time, it borrows modules of the transformer it is loaded for.
"""

from __future__ import annotations

from collections.abc import Callable

import diffusers
import torch
from torch import nn

from benchmarks.sweep_cases import Case, Draw, Tree, made

__all__ = ["CASES"]

_CROSS = 16


def _picture(draw: Draw, batch: int, width: int) -> Tree:
    """Latents of 8 × 8 and their control picture, twice as large with two embedding widths."""
    return {
        "sample": draw(batch, 4, 8, 8 * width),
        "timestep": draw.step(batch),
        "encoder_hidden_states": draw(batch, 6, _CROSS),
        "controlnet_cond": draw(batch, 3, 16, 16 * width),
    }


def _union(draw: Draw, batch: int, width: int) -> Tree:
    return {
        **_picture(draw, batch, width),
        "controlnet_cond": [draw(batch, 3, 16, 16 * width)],
        "control_type": torch.tensor([[0.0, 1.0, 0.0]]).repeat(batch, 1),
        "control_type_idx": [1],
    }


def _several(draw: Draw, batch: int, width: int) -> Tree:
    return {
        **_picture(draw, batch, width),
        "controlnet_cond": [draw(batch, 3, 16, 16 * width) for _ in range(2)],
        "conditioning_scale": [1.0, 0.5],
        "return_dict": False,
    }


def _sparse(draw: Draw, batch: int, width: int) -> Tree:
    """Three frames; the first one is given."""
    given = torch.zeros(batch, 1, 3, 8, 8 * width)
    given[:, :, 0] = 1.0
    return {
        "sample": draw(batch, 4, 3, 8, 8 * width),
        "timestep": draw.step(batch),
        "encoder_hidden_states": draw(batch * 3, 6, _CROSS),
        "controlnet_cond": draw(batch, 4, 3, 8, 8 * width),
        "conditioning_mask": given,
    }


def _flux(draw: Draw, batch: int, width: int) -> Tree:
    rows = torch.arange(4.0).repeat_interleave(4 * width)
    columns = torch.arange(4.0 * width).repeat(4)
    return {
        "hidden_states": draw(batch, 16 * width, 4),
        "controlnet_cond": draw(batch, 16 * width, 4),
        "encoder_hidden_states": draw(batch, 6, 16),
        "pooled_projections": draw(batch, 8),
        "timestep": draw.unit(batch),
        "img_ids": torch.stack([torch.zeros(16 * width), rows, columns], dim=1),
        "txt_ids": torch.zeros(6, 3),
    }


def _flux_several(draw: Draw, batch: int, width: int) -> Tree:
    return {
        **_flux(draw, batch, width),
        "controlnet_cond": [draw(batch, 16 * width, 4) for _ in range(2)],
        "controlnet_mode": [torch.zeros(batch, dtype=torch.long)] * 2,
        "conditioning_scale": [1.0, 0.5],
        "return_dict": False,
    }


def _qwen(draw: Draw, batch: int, width: int) -> Tree:
    return {
        "hidden_states": draw(batch, 16 * width, 16),
        "controlnet_cond": draw(batch, 16 * width, 16),
        "encoder_hidden_states": draw(batch, 6, 16),
        "encoder_hidden_states_mask": torch.ones(batch, 6, dtype=torch.bool),
        "timestep": draw.unit(batch),
        "img_shapes": [[(1, 4, 4 * width)]] * batch,
    }


def _qwen_several(draw: Draw, batch: int, width: int) -> Tree:
    return {
        **_qwen(draw, batch, width),
        "controlnet_cond": [draw(batch, 16 * width, 16) for _ in range(2)],
        "conditioning_scale": [1.0, 0.5],
        "return_dict": False,
    }


def _sd3(draw: Draw, batch: int, width: int) -> Tree:
    return {
        "hidden_states": draw(batch, 4, 8, 8 * width),
        "controlnet_cond": draw(batch, 4, 8, 8 * width),
        "encoder_hidden_states": draw(batch, 6, 16),
        "pooled_projections": draw(batch, 8),
        "timestep": draw.step(batch),
    }


def _sd3_several(draw: Draw, batch: int, width: int) -> Tree:
    return {
        **_sd3(draw, batch, width),
        "controlnet_cond": [draw(batch, 4, 8, 8 * width) for _ in range(2)],
        "conditioning_scale": [1.0, 0.5],
    }


def _sana(draw: Draw, batch: int, width: int) -> Tree:
    return {
        "hidden_states": draw(batch, 4, 8, 8 * width),
        "controlnet_cond": draw(batch, 4, 8, 8 * width),
        "encoder_hidden_states": draw(batch, 6, 8),
        "encoder_attention_mask": torch.ones(batch, 6),
        "timestep": draw.step(batch),
    }


def _hunyuan(draw: Draw, batch: int, width: int) -> Tree:
    """The positions are for one size: the class fixes its own to `sample_size`."""
    return {
        "hidden_states": draw(batch, 4, 8, 8),
        "controlnet_cond": draw(batch, 4, 8, 8),
        "timestep": draw.step(batch).float(),
        "encoder_hidden_states": draw(batch, 4, 8),
        "text_embedding_mask": torch.ones(batch, 4),
        "encoder_hidden_states_t5": draw(batch, 4, 8),
        "text_embedding_mask_t5": torch.ones(batch, 4),
        "image_meta_size": torch.full((batch, 6), 64.0),
        "style": torch.zeros(batch, dtype=torch.long),
        "image_rotary_emb": [torch.ones(16, 8), torch.full((16, 8), 0.5)],
    }


def _hunyuan_several(draw: Draw, batch: int, width: int) -> Tree:
    return {
        **_hunyuan(draw, batch, width),
        "controlnet_cond": [draw(batch, 4, 8, 8) for _ in range(2)],
        "conditioning_scale": [1.0, 0.5],
    }


def _cosmos(draw: Draw, batch: int, width: int) -> Tree:
    return {
        "controls_latents": draw(batch, 4, 1, 8, 8 * width),
        "latents": draw(batch, 4, 1, 8, 8 * width),
        "timestep": draw.unit(batch),
        "encoder_hidden_states": draw(batch, 6, _CROSS),
        "condition_mask": torch.ones(batch, 1, 1, 8, 8 * width),
        "padding_mask": torch.zeros(1, 1, 8, 8 * width),
    }


def _z_image(draw: Draw, batch: int, width: int) -> Tree:
    return {
        "x": [draw(4, 1, 16, 16 * width) for _ in range(batch)],
        "t": draw.unit(batch),
        "cap_feats": [draw(8, 16) for _ in range(batch)],
        "control_context": [draw(4, 1, 16, 16 * width) for _ in range(batch)],
    }


def _z_image_net() -> nn.Module:
    transformer, net = made("ZImageTransformer2DModel"), made("ZImageControlNetModel")
    joined = diffusers.ZImageControlNetModel.from_transformer(net, transformer)
    assert isinstance(joined, nn.Module)
    return joined


def _several_of(name: str, holder: str, count: int = 2) -> Callable[[], nn.Module]:
    """Makes ControlNets of one class in the class that sums them."""

    def make() -> nn.Module:
        held = getattr(diffusers, holder)([made(name) for _ in range(count)])
        assert isinstance(held, nn.Module)
        return held

    return make


CASES: tuple[Case, ...] = (
    Case(kind="controlnet", name="ControlNetModel", inputs=_picture),
    Case(
        kind="controlnet",
        name="MultiControlNetModel",
        make=_several_of("ControlNetModel", "MultiControlNetModel"),
        inputs=_several,
        why_weak={"['timestep']": "many of the residuals lie before the first time embedding"},
    ),
    Case(
        kind="controlnet",
        name="ControlNetUnionModel",
        inputs=_union,
    ),
    Case(
        kind="controlnet",
        name="UNetControlNetXSModel",
        inputs=_picture,
    ),
    Case(
        kind="controlnet",
        name="SparseControlNetModel",
        inputs=_sparse,
        why_weak={"['sample']": "with a conditioning mask the model replaces it by zeros"},
    ),
    Case(kind="controlnet", name="FluxControlNetModel", inputs=_flux),
    Case(
        kind="controlnet",
        name="FluxMultiControlNetModel",
        make=_several_of("FluxControlNetModel", "FluxMultiControlNetModel"),
        inputs=_flux_several,
    ),
    Case(kind="controlnet", name="QwenImageControlNetModel", inputs=_qwen),
    Case(
        kind="controlnet",
        name="QwenImageMultiControlNetModel",
        # it takes one net, for many pictures
        make=_several_of("QwenImageControlNetModel", "QwenImageMultiControlNetModel", 1),
        inputs=_qwen_several,
    ),
    Case(kind="controlnet", name="SD3ControlNetModel", inputs=_sd3),
    Case(
        kind="controlnet",
        name="SD3MultiControlNetModel",
        make=_several_of("SD3ControlNetModel", "SD3MultiControlNetModel"),
        inputs=_sd3_several,
    ),
    Case(
        kind="controlnet",
        name="SanaControlNetModel",
        inputs=_sana,
    ),
    Case(
        kind="controlnet",
        name="HunyuanDiT2DControlNetModel",
        inputs=_hunyuan,
        widths=(1,),
    ),
    Case(
        kind="controlnet",
        name="HunyuanDiT2DMultiControlNetModel",
        make=_several_of("HunyuanDiT2DControlNetModel", "HunyuanDiT2DMultiControlNetModel"),
        inputs=_hunyuan_several,
        widths=(1,),
    ),
    Case(
        kind="controlnet",
        name="CosmosControlNetModel",
        inputs=_cosmos,
    ),
    Case(
        kind="controlnet",
        name="ZImageControlNetModel",
        make=_z_image_net,
        inputs=_z_image,
    ),
)
