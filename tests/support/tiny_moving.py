"""Tiny pipelines whose Python moves between two steps, or that are made of other pipelines.

Owns sizes only. Knows nothing of graphs. The surprising fact: these pipelines are old and rare, and
each does something to its modules that none of the newer ones does.
"""

from __future__ import annotations

import diffusers as df
import tiny_text as text
import transformers as tf
from torch import nn

from benchmarks.weights import randomise

__all__ = ["adapter", "combined", "gligen", "wuerstchen"]

HIDDEN = text.HIDDEN
FIRST_CROSS = {  # an adapter's first feature has the size before the first halving
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}


def _ready(pipe: df.DiffusionPipeline) -> df.DiffusionPipeline:
    parts = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    for number, part in enumerate(parts):
        randomise(part.eval(), seed=number)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _stable_diffusion(**unet: object) -> dict[str, object]:
    sizes = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    }
    return {
        "vae": df.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(8,) * 4,
            norm_num_groups=4,
        ),
        "text_encoder": text.clip_text(projected=False),
        "tokenizer": text.clip_tokenizer(),
        "unet": df.UNet2DConditionModel(
            **{
                "sample_size": 8,
                "block_out_channels": (8, 16),
                "layers_per_block": 1,
                "norm_num_groups": 4,
                "attention_head_dim": 4,
                "cross_attention_dim": HIDDEN,
                **sizes,
                **unet,
            }
        ),
        "scheduler": df.DDIMScheduler(),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }


def gligen() -> df.DiffusionPipeline:
    """GLIGEN, which turns its grounding layers off in the middle of a picture."""
    return _ready(df.StableDiffusionGLIGENPipeline(**_stable_diffusion(attention_type="gated")))


def adapter() -> df.DiffusionPipeline:
    """T2I-Adapter, whose UNet pops every feature from the list that it is given."""
    features = df.T2IAdapter(
        in_channels=3,
        channels=[8, 16],
        num_res_blocks=2,
        downscale_factor=8,
        adapter_type="full_adapter",
    )
    parts = _stable_diffusion(**FIRST_CROSS)
    return _ready(df.StableDiffusionAdapterPipeline(adapter=features, **parts))


def _prior() -> dict[str, object]:
    vision = tf.CLIPVisionConfig(
        hidden_size=HIDDEN,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        projection_dim=HIDDEN,
    )
    return {
        "prior_prior": df.PriorTransformer(
            num_attention_heads=2, attention_head_dim=12, embedding_dim=HIDDEN, num_layers=1
        ),
        "prior_image_encoder": tf.CLIPVisionModelWithProjection(vision).eval(),
        "prior_text_encoder": text.clip_text(projected=True),
        "prior_tokenizer": text.clip_tokenizer(),
        "prior_scheduler": df.UnCLIPScheduler(
            variance_type="fixed_small_log", prediction_type="sample", clip_sample_range=10.0
        ),
        "prior_image_processor": tf.CLIPImageProcessor(crop_size=32, size=32),
    }


def combined() -> df.DiffusionPipeline:
    """Kandinsky 2.2: a prior's pipeline and a decoder's, each with a bar of its own."""
    unet = df.UNet2DConditionModel(
        in_channels=4,
        out_channels=8,
        addition_embed_type="image",
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        block_out_channels=(32, 64),
        layers_per_block=1,
        encoder_hid_dim=HIDDEN,
        encoder_hid_dim_type="image_proj",
        cross_attention_dim=HIDDEN,
        attention_head_dim=4,
        resnet_time_scale_shift="scale_shift",
    )
    movq = df.VQModel(
        block_out_channels=[32] * 4,
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        latent_channels=4,
        vq_embed_dim=4,
        norm_type="spatial",
        norm_num_groups=8,
        num_vq_embeddings=12,
    )
    scheduler = df.DDIMScheduler(clip_sample=False, set_alpha_to_one=False)
    return _ready(
        df.KandinskyV22CombinedPipeline(unet=unet, scheduler=scheduler, movq=movq, **_prior())
    )


def wuerstchen() -> df.DiffusionPipeline:
    """The decoder of Stable Cascade's older sister: its autoencoder is called `vqgan`."""
    from diffusers.pipelines.deprecated import wuerstchen as parts

    return _ready(
        df.WuerstchenDecoderPipeline(
            tokenizer=text.clip_tokenizer(),
            text_encoder=text.clip_text(projected=False),
            decoder=parts.WuerstchenDiffNeXt(
                c_cond=HIDDEN,
                c_hidden=[32],
                nhead=[-1],
                blocks=[2],
                level_config=["CT"],
                clip_embd=HIDDEN,
                inject_effnet=[False],
            ),
            vqgan=parts.PaellaVQModel(bottleneck_blocks=1, embed_dim=16, num_vq_embeddings=8),
            scheduler=df.DDPMWuerstchenScheduler(),
            latent_dim_scale=4.0,
        )
    )
