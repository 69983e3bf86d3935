"""What the diffusion transformers are called with that tests/data/model_cases.json lacks.

Owns the inputs only. Knows nothing of graphs. The surprising fact: several of these read masks on
the host, so a mask here is never all ones where the class takes one: with a full mask a wrong
graph would go unseen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.sweep_cases import Case, Draw, Skipped, Tree, class_of

__all__ = ["CASES", "SKIPPED", "valid_first"]

_HOME = "diffusers.models.transformers"


def valid_first(batch: int, length: int, dtype: torch.dtype = torch.bool) -> Tensor:
    """A right-padded mask [batch, length] whose rows have one, two, … places of padding."""
    lengths = torch.tensor([max(length - 1 - row, 1) for row in range(batch)])
    return (torch.arange(length) < lengths[:, None]).to(dtype)


def _ids(tokens: int, axes: int) -> Tensor:
    """Position ids [tokens, axes]: the last axis counts, the others are zero."""
    ids = torch.zeros(tokens, axes)
    ids[:, -1] = torch.arange(float(tokens))
    return ids


def _hunyuan_image(draw: Draw, batch: int, width: int) -> Tree:
    return {
        "hidden_states": draw(batch, 4, 4, 4 * width),
        "timestep": draw.step(batch).float(),
        "encoder_hidden_states": draw(batch, 6, 16),
        "encoder_attention_mask": valid_first(batch, 6, torch.long),
        "encoder_hidden_states_2": draw(batch, 4, 12),
        "encoder_attention_mask_2": valid_first(batch, 4, torch.long),
    }


def _kandinsky5(draw: Draw, batch: int, width: int) -> Tree:
    """The class knows one sample per call: its visual tokens lose the batch."""
    return {
        "hidden_states": draw(1, 2, 4, 4 * width, 4),
        "encoder_hidden_states": draw(1, 6, 16),
        "timestep": draw.step(1).float(),
        "pooled_projections": draw(1, 8),
        "visual_rope_pos": [torch.arange(2), torch.arange(2), torch.arange(2 * width)],
        "text_rope_pos": torch.arange(6),
    }


def _kandinsky6(draw: Draw, batch: int, width: int) -> Tree:
    return {
        "hidden_states": draw(batch, 2, 4, 4 * width, 9),
        "encoder_hidden_states": draw(batch, 6, 8),
        "pooled_projections": draw(batch, 8),
        "timestep": draw.step(batch).float(),
        "audio_hidden_states": draw(batch, 5, 4),
    }


def _qwen21(draw: Draw, batch: int, width: int) -> Tree:
    """Four text tokens, then the target picture: one vision slot per 2 × 2 latent tokens."""
    height, wide = 4, 4 * width
    slots = torch.zeros(batch, 4 + height * wide // 4, dtype=torch.bool)
    slots[:, 4:] = True
    return {
        "hidden_states": draw(batch, height * wide, 4),
        "encoder_hidden_states": draw(batch, 4, 8),
        "encoder_hidden_states_mask": valid_first(batch, 4, torch.long),
        "timestep": draw.unit(1).expand(batch),
        "img_shapes": [[(1, height, wide)]] * batch,
        "img_mask": slots,
    }


def _fibo2(draw: Draw, batch: int, width: int) -> Tree:
    return {
        "hidden_states": draw(batch, 4, 8, 8 * width),
        "timestep": draw.unit(batch),
        "encoder_hidden_states": draw(batch, 2, 16, 24),
        "encoder_attention_mask": valid_first(batch, 16),
    }


def _wan_animate2(draw: Draw, batch: int, width: int) -> Tree:
    """A denoising step: 5 frames and their reference, whose keys and values are given."""
    cache = class_of("WanAnimate2KVCache", f"{_HOME}.transformer_wan_animate_2")(2)
    for layer in cache.layer_caches:
        layer.store(draw(1, 8 * width, 2, 16), draw(1, 8 * width, 2, 16))
    return {
        "hidden_states": [draw(16, 3, 4, 4 * width)],
        "timestep": draw.step(1).float(),
        "encoder_hidden_states": [draw(8, 32)],
        "condition_latents": [draw(20, 3, 4, 4 * width)],
        "encoder_hidden_states_image": draw(1, 4, 1280),
        "kv_cache": cache,
        "kv_cache_mode": "cached",
        "seq_len": 12 * width,
        "reference_grid_sizes": torch.tensor([[2, 2, 2 * width]]),
        "origin_len": 5,
        "origin_area": [32, 32 * width],
    }


def _sana_wm(draw: Draw, batch: int, width: int) -> Tree:
    cameras = torch.eye(4).repeat(batch, 4, 1, 1)
    cameras[..., 2, 3] = torch.arange(4.0) * 0.1
    lens = torch.tensor([8.0 * width, 8.0, 4.0 * width, 4.0]).expand(batch, 4, 4)
    return {
        "hidden_states": draw(batch, 4, 4, 8, 8 * width),
        "timestep": draw.step(batch, 1, 4).float(),
        "encoder_hidden_states": draw(batch, 1, 16, 8),
        "encoder_attention_mask": valid_first(batch, 16, torch.long),
        "camera_conditions": torch.cat([cameras.flatten(-2), lens], dim=-1),
        "chunk_plucker": draw(batch, 8, 4, 8, 8 * width),
    }


def _sana_wm_refiner(draw: Draw, batch: int, width: int) -> Tree:
    make = class_of("SanaWMLTX2AudioVideoRotaryPosEmbed", f"{_HOME}.transformer_sana_wm_refiner")
    rope = make(
        dim=16,
        patch_size=1,
        patch_size_t=1,
        base_num_frames=20,
        base_height=2048,
        base_width=2048,
        scale_factors=(8, 32, 32),
        modality="video",
        double_precision=False,
        num_attention_heads=2,
    )
    device = torch.device("cpu")
    coords = rope.prepare_video_coords(batch, 2, 4, 4 * width, device=device, fps=24.0)
    return {
        "hidden_states": draw(batch, 32 * width, 4),
        "encoder_hidden_states": draw(batch, 8, 16),
        "timestep": draw.unit(batch, 32 * width) * 1000,
        "video_rotary_emb": rope(coords, device=device),
        "encoder_attention_mask": torch.ones(batch, 8),
    }


def _flux3(draw: Draw, batch: int, width: int) -> Tree:
    return {
        "hidden_states": draw(batch, 16 * width, 8),
        "encoder_hidden_states": draw(batch, 6, 16),
        "timestep": draw.unit(batch),
        "img_ids": _ids(16 * width, 4),
        "txt_ids": _ids(6, 4),
    }


CASES: tuple[Case, ...] = (
    Case(
        kind="dit",
        name="HunyuanImageTransformer2DModel",
        inputs=_hunyuan_image,
    ),
    Case(
        kind="dit",
        name="Kandinsky5Transformer3DModel",
        inputs=_kandinsky5,
        batches=(1,),
    ),
    Case(
        kind="dit",
        name="Kandinsky6Transformer3DModel",
        inputs=_kandinsky6,
    ),
    Case(
        kind="dit",
        name="Kandinsky6SRTransformer3DModel",
        inputs=lambda draw, batch, width: {
            "hidden_states": draw(batch, 2, 16, 16 * width, 9),
            "timestep": draw.step(batch).float(),
        },
    ),
    Case(
        kind="dit",
        name="QwenImage21Transformer2DModel",
        inputs=_qwen21,
    ),
    Case(
        kind="dit",
        name="BriaFibo2Transformer2DModel",
        inputs=_fibo2,
    ),
    Case(
        kind="dit",
        name="WanAnimate2Transformer3DModel",
        inputs=_wan_animate2,
        batches=(1,),
    ),
    Case(
        kind="dit",
        name="SanaWMTransformer3DModel",
        inputs=_sana_wm,
    ),
    Case(
        kind="dit",
        name="SanaWMLTX2RefinerTransformer3DModel",
        inputs=_sana_wm_refiner,
    ),
    Case(
        kind="dit",
        name="Flux3Transformer2DModel",
        inputs=_flux3,
    ),
    Case(
        kind="dit",
        name="StableAudioDiTModel",
        inputs=lambda draw, batch, width: {
            "hidden_states": draw(batch, 4, 16 * width),
            "timestep": draw.unit(batch),
            "encoder_hidden_states": draw(batch, 6, 8),
            "global_hidden_states": draw(batch, 1, 12),
            "rotary_embedding": (torch.ones(1 + 16 * width, 4), torch.zeros(1 + 16 * width, 4)),
        },
    ),
    Case(
        kind="dit",
        name="Transformer2DModel",
        inputs=lambda draw, batch, width: {
            "hidden_states": draw(batch, 16, 4, 4 * width),
            "encoder_hidden_states": draw(batch, 6, 12),
        },
    ),
    Case(
        kind="dit",
        name="DreamLiteTransformer2DModel",
        inputs=lambda draw, batch, width: {
            "hidden_states": draw(batch, 16, 4, 4 * width),
            "encoder_hidden_states": draw(batch, 6, 12),
        },
    ),
    Case(
        kind="dit",
        name="T5FilmDecoder",
        inputs=lambda draw, batch, width: {
            "encodings_and_masks": [
                (draw(batch, 6, 16), torch.ones(batch, 6)),
                (draw(batch, 4, 16), torch.ones(batch, 4)),
            ],
            "decoder_input_tokens": draw(batch, 8 * width, 8),
            "decoder_noise_time": draw.unit(batch),
        },
    ),
    Case(
        kind="dit",
        name="MiniMaxMusic3RVQDepthDecoder",
        inputs=lambda draw, batch, width: {"inputs_embeds": draw(batch, 4 * width, 16)},
    ),
)

SKIPPED: tuple[Skipped, ...] = (
    Skipped(
        "dit",
        "RFD4ProteinaTransformer",
        "designs proteins: its inputs are residue and atom tables, no tensors that can be drawn",
    ),
)
