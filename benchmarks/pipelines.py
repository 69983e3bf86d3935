"""Full-size pipelines with random weights and no text encoder: whole pictures, no download.

Owns the schedulers, autoencoders and call arguments that go with the denoisers of
benchmarks/models.py. Knows nothing of timing. The surprising fact: a pipeline runs without text
encoder and tokenizer as long as its embeddings are passed, so 20 GB of language model need not be
built to measure a denoising loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import diffusers as df
import torch
from accelerate import init_empty_weights
from torch import nn

from benchmarks import models
from benchmarks.shapes import Draw, Size
from benchmarks.weights import randomise


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """What surrounds a denoiser, and one call: `steps` is the family's usual number."""

    denoiser: str
    steps: int
    vae: str
    vae_config: Mapping[str, object]
    small_vae: Mapping[str, object]
    assemble: Callable[[nn.Module, nn.Module], df.DiffusionPipeline]
    arguments: Callable[[Draw], dict[str, object]]


_VIDEO = ("wan-1.3b", "ltx")
_FOUR = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
}
_WIDTHS = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2}
_NARROW = {"block_out_channels": (32,) * 4, "layers_per_block": 1}
_NARROW_VIDEO = {"base_dim": 8, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}


_FLUX_VAE = {
    **_FOUR,
    **_WIDTHS,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
}


def _z_image(transformer: nn.Module, vae: nn.Module) -> df.DiffusionPipeline:
    scheduler = df.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return df.ZImagePipeline(scheduler, vae, None, None, transformer)


def _flux2_klein(transformer: nn.Module, vae: nn.Module) -> df.DiffusionPipeline:
    scheduler = df.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return df.Flux2KleinPipeline(scheduler, vae, None, None, transformer, is_distilled=True)


def _qwen_image(transformer: nn.Module, vae: nn.Module) -> df.DiffusionPipeline:
    scheduler = df.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )
    return df.QwenImagePipeline(scheduler, vae, None, None, transformer)


def _sdxl(unet: nn.Module, vae: nn.Module) -> df.DiffusionPipeline:
    scheduler = df.EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        timestep_spacing="leading",
        steps_offset=1,
    )
    return df.StableDiffusionXLPipeline(
        vae, None, None, None, None, unet, scheduler, add_watermarker=False
    )


def _wan(transformer: nn.Module, vae: nn.Module) -> df.DiffusionPipeline:
    scheduler = df.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    return df.WanPipeline(None, None, vae, scheduler, transformer)


def _flux1(transformer: nn.Module, vae: nn.Module) -> df.DiffusionPipeline:
    scheduler = df.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return df.FluxPipeline(scheduler, vae, None, None, None, None, transformer)


def _sd3(transformer: nn.Module, vae: nn.Module) -> df.DiffusionPipeline:
    scheduler = df.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return df.StableDiffusion3Pipeline(
        transformer, scheduler, vae, None, None, None, None, None, None
    )


def _pixart(transformer: nn.Module, vae: nn.Module) -> df.DiffusionPipeline:
    scheduler = df.DPMSolverMultistepScheduler(beta_start=0.0001, beta_end=0.02)
    return df.PixArtSigmaPipeline(None, None, vae, transformer, scheduler)


def _sana(transformer: nn.Module, vae: nn.Module) -> df.DiffusionPipeline:
    scheduler = df.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    return df.SanaPipeline(None, None, vae, transformer, scheduler)


def _ltx(transformer: nn.Module, vae: nn.Module) -> df.DiffusionPipeline:
    scheduler = df.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        base_shift=0.95,
        max_shift=2.05,
        shift_terminal=0.1,
    )
    return df.LTXPipeline(scheduler, vae, None, None, transformer)


def _masked(draw: Draw, length: int, width: int) -> dict[str, object]:
    """A prompt of 40 tokens and an empty one of two, padded, with their masks."""
    positions = torch.arange(length)[None]
    return {
        "prompt_embeds": draw(1, length, width),
        "prompt_attention_mask": (positions < 40).to(torch.int64),
        "negative_prompt": None,
        "negative_prompt_embeds": draw(1, length, width),
        "negative_prompt_attention_mask": (positions < 2).to(torch.int64),
    }


PIPELINES: dict[str, PipelineSpec] = {
    "z-image": PipelineSpec(
        "z-image",
        9,
        "AutoencoderKL",
        _FLUX_VAE,
        _NARROW,
        _z_image,
        lambda draw: {"prompt_embeds": [draw(64, 2560)], "guidance_scale": 0.0},
    ),
    "flux2-klein": PipelineSpec(
        "flux2-klein",
        4,
        "AutoencoderKLFlux2",
        {},
        _NARROW,
        _flux2_klein,
        lambda draw: {"prompt_embeds": draw(1, 512, 7680), "guidance_scale": 1.0},
    ),
    "qwen-image": PipelineSpec(
        "qwen-image",
        20,
        "AutoencoderKLQwenImage",
        {},
        _NARROW_VIDEO,
        _qwen_image,
        lambda draw: {
            "prompt_embeds": draw(1, 64, 3584),
            "prompt_embeds_mask": torch.ones(1, 64, dtype=torch.int64),
            "negative_prompt_embeds": draw(1, 8, 3584),
            "negative_prompt_embeds_mask": torch.ones(1, 8, dtype=torch.int64),
            "true_cfg_scale": 4.0,
        },
    ),
    "sdxl": PipelineSpec(
        "sdxl-unet",
        8,
        "AutoencoderKL",
        {**_FOUR, **_WIDTHS, "latent_channels": 4, "scaling_factor": 0.13025},
        _NARROW,
        _sdxl,
        lambda draw: {
            "prompt_embeds": draw(1, 77, 2048),
            "pooled_prompt_embeds": draw(1, 1280),
            "negative_prompt_embeds": draw(1, 77, 2048),
            "negative_pooled_prompt_embeds": draw(1, 1280),
            "guidance_scale": 5.0,
        },
    ),
    "wan-1.3b": PipelineSpec(
        "wan-1.3b",
        20,
        "AutoencoderKLWan",
        {},
        _NARROW_VIDEO,
        _wan,
        lambda draw: {
            "prompt_embeds": draw(1, 512, 4096),
            "negative_prompt_embeds": draw(1, 512, 4096),
            "guidance_scale": 5.0,
        },
    ),
    "flux1": PipelineSpec(
        "flux1",
        28,
        "AutoencoderKL",
        _FLUX_VAE,
        _NARROW,
        _flux1,
        lambda draw: {
            "prompt_embeds": draw(1, 512, 4096),
            "pooled_prompt_embeds": draw(1, 768),
            "guidance_scale": 3.5,
        },
    ),
    "sd3.5-medium": PipelineSpec(
        "sd3.5-medium",
        28,
        "AutoencoderKL",
        {**_FLUX_VAE, "scaling_factor": 1.5305, "shift_factor": 0.0609},
        _NARROW,
        _sd3,
        lambda draw: {
            "prompt_embeds": draw(1, 333, 4096),
            "pooled_prompt_embeds": draw(1, 2048),
            "negative_prompt_embeds": draw(1, 333, 4096),
            "negative_pooled_prompt_embeds": draw(1, 2048),
            "guidance_scale": 4.5,
        },
    ),
    "pixart-sigma": PipelineSpec(
        "pixart-sigma",
        20,
        "AutoencoderKL",
        {**_FOUR, **_WIDTHS, "latent_channels": 4, "scaling_factor": 0.13025},
        _NARROW,
        _pixart,
        lambda draw: {
            **_masked(draw, 300, 4096),
            "guidance_scale": 4.5,
            "use_resolution_binning": False,
        },
    ),
    "sana": PipelineSpec(
        "sana",
        20,
        "AutoencoderDC",
        {
            "latent_channels": 32,
            "attention_head_dim": 32,
            "encoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
            "decoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
            "encoder_block_out_channels": (128, 256, 512, 512, 1024, 1024),
            "decoder_block_out_channels": (128, 256, 512, 512, 1024, 1024),
            "encoder_layers_per_block": (2, 2, 2, 3, 3, 3),
            "decoder_layers_per_block": (3, 3, 3, 3, 3, 3),
            "encoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
            "decoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
            "upsample_block_type": "interpolate",
            "downsample_block_type": "conv",
            "decoder_norm_types": "rms_norm",
            "decoder_act_fns": "silu",
            "scaling_factor": 0.41407,
        },
        {
            "encoder_block_out_channels": (32,) * 6,
            "decoder_block_out_channels": (32,) * 6,
            "encoder_layers_per_block": (1,) * 6,
            "decoder_layers_per_block": (1,) * 6,
        },
        _sana,
        lambda draw: {
            **_masked(draw, 300, 2304),
            "guidance_scale": 4.5,
            "use_resolution_binning": False,
        },
    ),
    "ltx": PipelineSpec(
        "ltx",
        20,
        "AutoencoderKLLTXVideo",
        {},
        {"block_out_channels": (32, 32, 32, 32), "decoder_block_out_channels": (32, 32, 32, 32)},
        _ltx,
        lambda draw: {
            **_masked(draw, 128, 4096),
            "guidance_scale": 3.0,
        },
    ),
}


def build(
    name: str, device: str | torch.device = "cuda", *, small: bool = False
) -> df.DiffusionPipeline:
    """The named pipeline on `device` in bfloat16. Raises KeyError for an unknown name."""
    spec = PIPELINES[name]
    denoiser = models.build(spec.denoiser, device, small=small)
    config = {**spec.vae_config, **(spec.small_vae if small else {})}
    with init_empty_weights(include_buffers=False):
        vae: nn.Module = getattr(df, spec.vae)(**config)
    models.materialise(vae, torch.device(device))
    randomise(vae, seed=1)
    pipe = spec.assemble(denoiser, vae.eval().requires_grad_(False))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call_kwargs(
    name: str,
    size: Size,
    *,
    steps: int | None = None,
    seed: int = 0,
    device: str | torch.device = "cuda",
    output_type: str = "pt",
) -> dict[str, object]:
    """Arguments of one call that ends in the picture tensor on the device.

    The prompt embeddings depend on `seed`, as the noise does: another seed is another picture of
    another prompt. The generator is fresh.
    """
    spec = PIPELINES[name]
    given = {key: models.moved(value, device) for key, value in spec.arguments(Draw(seed)).items()}
    frames = {"num_frames": size.frames} if name in _VIDEO else {}
    return {
        **given,
        **frames,
        "height": size.height,
        "width": size.width,
        "num_inference_steps": spec.steps if steps is None else steps,
        "generator": torch.Generator(device).manual_seed(seed),
        "output_type": output_type,
    }


def picture(pipe: df.DiffusionPipeline, arguments: dict[str, object]) -> torch.Tensor:
    """The first element of what the pipeline returns: pictures, frames or latents."""
    output = pipe(**arguments, return_dict=False)[0]
    assert isinstance(output, torch.Tensor)
    return output
