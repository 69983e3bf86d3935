"""Tiny real diffusers pipelines: the stock classes, random weights, no download.

`build(name)` gives the pipeline, `call_kwargs(name)` the arguments of one small call that ends in
latents. Owns sizes only: what a pipeline does is diffusers' business. The surprising fact: every
parameter is overwritten (benchmarks.weights), because several of these models start with gates at
zero, and then a graph that skips a block still gives equal pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import diffusers as df
import tiny_text as text
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from benchmarks.weights import randomise

LATENT_CHANNELS = 4
HIDDEN = text.HIDDEN


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> df.DiffusionPipeline:
    """A tiny pipeline of the named family on the CPU: eval mode, seeded weights, no progress bar.

    As `from_pretrained(torch_dtype=…)` would: the weights have `dtype`, tables a class computes in
    float32 stay float32. Raises KeyError for an unknown name; NAMES lists the known ones.
    """
    builder = _BUILDERS[name]
    with _default_dtype(dtype):
        pipe = builder()
    for number, component in enumerate(_modules(pipe)):
        randomise(component.eval(), seed=seed * 1000 + number)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call_kwargs(
    name: str,
    *,
    size: int | tuple[int, int] = 64,
    steps: int = 4,
    seed: int = 0,
    prompt: str = "a red heart",
    negative_prompt: str = "blue",
) -> dict[str, object]:
    """Arguments of one call: `size` pixels (or height, width; multiples of 16), latents out.

    Every family that knows guidance runs with it. The generator is fresh: two calls with the same
    arguments give the same latents.
    """
    height, width = (size, size) if isinstance(size, int) else size
    return {
        "prompt": prompt,
        "height": height,
        "width": width,
        "num_inference_steps": steps,
        "generator": torch.Generator("cpu").manual_seed(seed),
        "output_type": "latent",
        **({"negative_prompt": negative_prompt} if name in WITH_NEGATIVE_PROMPT else {}),
        **_EXTRA[name],
    }


def denoisers(pipe: df.DiffusionPipeline) -> list[nn.Module]:
    """The modules called once or more per step."""
    names = ("transformer", "transformer_2", "unet")
    return [module for name in names if (module := getattr(pipe, name, None)) is not None]


@dataclass(frozen=True, slots=True)
class DenoiserCall:
    """One call of a denoiser by a pipeline; `arguments` maps positions and names to values."""

    module: nn.Module
    arguments: dict[str, object]

    def __call__(self, arguments: dict[str, object] | None = None) -> object:
        """What the module returns for these arguments (those recorded, if None)."""
        given = self.arguments if arguments is None else arguments
        positional = [value for name, value in given.items() if name.isdigit()]
        named = {name: value for name, value in given.items() if not name.isdigit()}
        with torch.no_grad():
            return self.module(*positional, **named)


def denoiser_calls(pipe: df.DiffusionPipeline, arguments: dict[str, object]) -> list[DenoiserCall]:
    """Runs the pipeline once and returns every denoiser call it made, in order, tensors copied."""
    calls: list[DenoiserCall] = []

    def record(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        given = {str(index): value for index, value in enumerate(args)} | kwargs
        calls.append(DenoiserCall(module, tree_map_only(torch.Tensor, torch.clone, given)))

    handles = [m.register_forward_pre_hook(record, with_kwargs=True) for m in denoisers(pipe)]
    try:
        pipe(**arguments)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def latents(pipe: df.DiffusionPipeline, arguments: dict[str, object]) -> Tensor:
    """The latents of one call of the pipeline."""
    return pipe(**arguments, return_dict=False)[0]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _modules(pipe: df.DiffusionPipeline) -> list[nn.Module]:
    return [part for part in pipe.components.values() if isinstance(part, nn.Module)]


def _vae(latent_channels: int = LATENT_CHANNELS) -> df.AutoencoderKL:
    return df.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8,) * 4,
        norm_num_groups=4,
        latent_channels=latent_channels,
        scaling_factor=0.4,
        shift_factor=0.1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        force_upcast=False,
        sample_size=64,
    )


def _flux() -> df.FluxPipeline:
    return df.FluxPipeline(
        scheduler=df.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        vae=_vae(),
        text_encoder=text.clip_text(projected=False),
        tokenizer=text.clip_tokenizer(),
        text_encoder_2=text.t5_encoder(),
        tokenizer_2=text.t5_tokenizer(),
        transformer=df.FluxTransformer2DModel(
            in_channels=4 * LATENT_CHANNELS,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=HIDDEN,
            pooled_projection_dim=HIDDEN,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        ),
    )


def _flux2_klein() -> df.Flux2KleinPipeline:
    return df.Flux2KleinPipeline(
        scheduler=df.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        vae=df.AutoencoderKLFlux2(
            block_out_channels=(8,) * 4,
            layers_per_block=1,
            norm_num_groups=4,
            latent_channels=LATENT_CHANNELS,
            mid_block_add_attention=False,
        ),
        text_encoder=text.qwen3(),
        tokenizer=text.qwen_tokenizer(),
        transformer=df.Flux2Transformer2DModel(
            in_channels=4 * LATENT_CHANNELS,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=3 * HIDDEN,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
        ),
    )


def _z_image() -> df.ZImagePipeline:
    return df.ZImagePipeline(
        scheduler=df.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(),
        text_encoder=text.qwen3(),
        tokenizer=text.qwen_tokenizer(),
        transformer=df.ZImageTransformer2DModel(
            in_channels=LATENT_CHANNELS,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=HIDDEN,
            axes_dims=[4, 6, 6],
            axes_lens=[256, 64, 64],
        ),
    )


def _qwen_image() -> df.QwenImagePipeline:
    return df.QwenImagePipeline(
        scheduler=df.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=1.0),
        vae=df.AutoencoderKLQwenImage(
            base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1
        ),
        text_encoder=text.qwen25_vl(),
        tokenizer=text.qwen_tokenizer(),
        transformer=df.QwenImageTransformer2DModel(
            in_channels=64,
            out_channels=16,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=HIDDEN,
            axes_dims_rope=(4, 6, 6),
        ),
    )


def _wan_transformer() -> df.WanTransformer3DModel:
    return df.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        text_dim=HIDDEN,
        freq_dim=32,
        ffn_dim=48,
        num_layers=2,
        rope_max_seq_len=64,
    )


def _wan(*, two_stages: bool = False) -> df.WanPipeline:
    return df.WanPipeline(
        tokenizer=text.t5_tokenizer(),
        text_encoder=text.umt5_encoder(),
        vae=df.AutoencoderKLWan(base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1),
        scheduler=df.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=_wan_transformer(),
        transformer_2=_wan_transformer() if two_stages else None,
        # Timesteps of four steps at shift 3: 999, 900, 750, 500; two on each side.
        boundary_ratio=0.8 if two_stages else None,
    )


def _sdxl() -> df.StableDiffusionXLPipeline:
    return df.StableDiffusionXLPipeline(
        vae=_vae(),
        text_encoder=text.clip_text(projected=False),
        tokenizer=text.clip_tokenizer(),
        text_encoder_2=text.clip_text(projected=True),
        tokenizer_2=text.clip_tokenizer(),
        unet=df.UNet2DConditionModel(
            sample_size=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(16, 32),
            layers_per_block=1,
            norm_num_groups=8,
            attention_head_dim=(2, 4),
            transformer_layers_per_block=(1, 2),
            use_linear_projection=True,
            cross_attention_dim=2 * HIDDEN,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + HIDDEN,
        ),
        scheduler=df.EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            timestep_spacing="leading",
            steps_offset=1,
        ),
        add_watermarker=False,
    )


def _sd3() -> df.StableDiffusion3Pipeline:
    return df.StableDiffusion3Pipeline(
        transformer=df.SD3Transformer2DModel(
            sample_size=16,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=2 * HIDDEN,
            caption_projection_dim=32,
            pooled_projection_dim=2 * HIDDEN,
            pos_embed_max_size=16,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        ),
        scheduler=df.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(),
        text_encoder=text.clip_text(projected=True),
        tokenizer=text.clip_tokenizer(),
        text_encoder_2=text.clip_text(projected=True),
        tokenizer_2=text.clip_tokenizer(),
        # The two CLIP states stand side by side and are padded to the width of this one.
        text_encoder_3=text.t5_encoder(2 * HIDDEN),
        tokenizer_3=text.t5_tokenizer(),
    )


_BUILDERS: dict[str, Callable[[], df.DiffusionPipeline]] = {
    "flux": _flux,
    "flux2-klein": _flux2_klein,
    "z-image": _z_image,
    "qwen-image": _qwen_image,
    "wan": _wan,
    "wan22": lambda: _wan(two_stages=True),
    "sdxl": _sdxl,
    "sd3": _sd3,
}
NAMES: tuple[str, ...] = tuple(_BUILDERS)
WITH_NEGATIVE_PROMPT = {"z-image", "qwen-image", "wan", "wan22", "sdxl", "sd3"}
_EXTRA: dict[str, dict[str, object]] = {
    "flux": {"guidance_scale": 3.5, "max_sequence_length": 32},
    "flux2-klein": {
        "guidance_scale": 3.0,
        "max_sequence_length": 64,
        "text_encoder_out_layers": (1, 2, 3),
    },
    "z-image": {"guidance_scale": 2.0, "max_sequence_length": 64},
    "qwen-image": {"true_cfg_scale": 3.0},
    "wan": {"guidance_scale": 4.0, "num_frames": 5, "max_sequence_length": 32},
    "wan22": {
        "guidance_scale": 4.0,
        "guidance_scale_2": 3.0,
        "num_frames": 5,
        "max_sequence_length": 32,
    },
    "sdxl": {"guidance_scale": 5.0},
    "sd3": {"guidance_scale": 5.0, "max_sequence_length": 32},
}
