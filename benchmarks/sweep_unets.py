"""What every UNet of diffusers is called with, for the sweep.

Owns the inputs only. Knows nothing of graphs. The surprising fact: a "timestep" is a whole number,
a fraction or a ratio, depending on the family; a prompt comes once per sample or once per frame.
"""

from __future__ import annotations

import torch

from benchmarks.sweep_cases import Case, Draw, Tree

__all__ = ["CASES"]

_CROSS = 16


def _conditioned(draw: Draw, batch: int, width: int) -> Tree:
    """The call of a latent-diffusion UNet: latents, a timestep, a prompt of 6 tokens."""
    return {
        "sample": draw(batch, 4, 8, 8 * width),
        "timestep": draw.step(batch),
        "encoder_hidden_states": draw(batch, 6, _CROSS),
    }


def _sdxl(draw: Draw, batch: int, width: int) -> Tree:
    sizes = torch.tensor([[64.0, 64.0, 0.0, 0.0, 64.0, 64.0]]).repeat(batch, 1)
    added = {"text_embeds": draw(batch, 8), "time_ids": sizes}
    return {**_conditioned(draw, batch, width), "added_cond_kwargs": added}


def _frames(draw: Draw, batch: int, width: int) -> Tree:
    """Video UNets of the 2D kind: 3 frames on their own axis."""
    return {**_conditioned(draw, batch, width), "sample": draw(batch, 4, 3, 8, 8 * width)}


def _frames_first(draw: Draw, batch: int, width: int) -> Tree:
    return {
        "sample": draw(batch, 2, 8, 8, 8 * width),
        "timestep": draw.step(batch),
        "encoder_hidden_states": draw(batch, 1, _CROSS),
        "added_time_ids": torch.tensor([[6.0, 127.0, 0.02]]).repeat(batch, 1),
    }


def _image_to_video(draw: Draw, batch: int, width: int) -> Tree:
    return {
        "sample": draw(batch, 4, 3, 8, 8 * width),
        "timestep": draw.step(batch),
        "fps": torch.full((batch,), 16),
        "image_latents": draw(batch, 4, 3, 8, 8 * width),
        "image_embeddings": draw(batch, _CROSS),
        "encoder_hidden_states": draw(batch, 6, _CROSS),
    }


def _audio(draw: Draw, batch: int, width: int) -> Tree:
    return {
        "sample": draw(batch, 4, 8, 8 * width),
        "timestep": draw.step(batch),
        "encoder_hidden_states": draw(batch, 5, _CROSS),
        "encoder_hidden_states_1": draw(batch, 6, 12),
        "encoder_attention_mask_1": torch.ones(batch, 6),
    }


def _cascade(draw: Draw, batch: int, width: int) -> Tree:
    return {
        "sample": draw(batch, 4, 8, 8 * width),
        "timestep_ratio": draw.unit(batch),
        "clip_text_pooled": draw(batch, 1, 8),
        "clip_text": draw(batch, 5, 12),
        "clip_img": draw(batch, 1, 6),
    }


def _tokens(draw: Draw, batch: int, width: int) -> Tree:
    return {
        "input_ids": draw.tokens(31, batch, 8, 8 * width),
        "encoder_hidden_states": draw(batch, 6, 8),
        "pooled_text_emb": draw(batch, 8),
        "micro_conds": torch.tensor([[64.0, 64.0, 0.0, 0.0, 6.0]]).repeat(batch, 1),
    }


def _two_modalities(draw: Draw, batch: int, width: int) -> Tree:
    """UniDiffuser has one size only: its positions are a parameter."""
    return {
        "latent_image_embeds": draw(batch, 4, 8, 8),
        "image_embeds": draw(batch, 1, 16),
        "prompt_embeds": draw(batch, 6, 16),
        "timestep_img": draw.step(batch),
        "timestep_text": draw.step(batch),
    }


CASES: tuple[Case, ...] = (
    Case(
        kind="unet",
        name="UNet1DModel",
        # Dance Diffusion's call: samples of sound, the time embedding fills the other channels
        inputs=lambda draw, batch, width: {
            "sample": draw(batch, 2, 64 * width),
            "timestep": draw.unit(batch),
        },
    ),
    Case(
        kind="unet",
        name="UNet2DModel",
        inputs=lambda draw, batch, width: {
            "sample": draw(batch, 3, 16, 16 * width),
            "timestep": draw.step(batch),
        },
    ),
    Case(
        kind="unet",
        name="UNet2DConditionModel",
        inputs=_conditioned,
    ),
    Case(
        kind="unet",
        name="UNet2DConditionModel",
        variant="SDXL",
        inputs=_sdxl,
    ),
    Case(
        kind="unet",
        name="UNet3DConditionModel",
        inputs=_frames,
    ),
    Case(
        kind="unet",
        name="UNetMotionModel",
        inputs=lambda draw, batch, width: {
            **_frames(draw, batch, width),
            # one prompt per sample, as AnimateDiff passes it: the model repeats it per frame
            "encoder_hidden_states": draw(batch * 3, 6, _CROSS),
        },
    ),
    Case(
        kind="unet",
        name="UNetSpatioTemporalConditionModel",
        inputs=_frames_first,
    ),
    Case(
        kind="unet",
        name="I2VGenXLUNet",
        inputs=_image_to_video,
    ),
    Case(
        kind="unet",
        name="Kandinsky3UNet",
        inputs=lambda draw, batch, width: {
            **_conditioned(draw, batch, width),
            "encoder_hidden_states": draw(batch, 6, 12),
            "encoder_attention_mask": torch.ones(batch, 6),
        },
    ),
    Case(
        kind="unet",
        name="AudioLDM2UNet2DConditionModel",
        inputs=_audio,
    ),
    Case(kind="unet", name="DreamLiteUNetModel", inputs=_conditioned),
    Case(
        kind="unet",
        name="StableCascadeUNet",
        inputs=_cascade,
    ),
    Case(
        kind="unet",
        name="UVit2DModel",
        inputs=_tokens,
    ),
    Case(
        kind="unet",
        name="UniDiffuserModel",
        inputs=_two_modalities,
        widths=(1,),
    ),
)
