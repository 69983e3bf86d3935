"""The four networks of the bundled model: their shapes and first weights.

Owns the sizes. Knows nothing of training. Surprise: `hidden_states[-2]` of the language model is
the output of its last layer but one, so the last layer serves text only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImageTransformer2DModel
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

HEIGHT = WIDTH = 128
LATENT_CHANNELS = 16
LATENT_SIZE = HEIGHT // 8
CALL_DEFAULTS: dict[str, int | float] = {
    "height": HEIGHT,
    "width": WIDTH,
    "num_inference_steps": 8,
    "guidance_scale": 2.0,
    "max_sequence_length": 64,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Widths and depths; the defaults are the shipped model, `TINY` is for tests on a CPU."""

    dim: int = 192
    num_layers: int = 6
    num_heads: int = 6
    axes: tuple[int, int, int] = (8, 12, 12)
    text_dim: int = 128
    text_layers: int = 4
    text_ffn: int = 384
    vae_widths: tuple[int, int, int, int] = (32, 48, 64, 80)
    vae_groups: int = 8
    vae_layers: int = 1


TINY = Sizes(
    dim=32, num_layers=2, num_heads=2, axes=(4, 6, 6), text_dim=32, text_layers=3, text_ffn=64,
    vae_widths=(8, 8, 16, 16), vae_groups=4,
)  # fmt: skip


def build_vae(sizes: Sizes) -> AutoencoderKL:
    """Returns an untrained 8x autoencoder with LATENT_CHANNELS channels."""
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=sizes.vae_widths,
        layers_per_block=sizes.vae_layers,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=sizes.vae_groups,
        sample_size=HEIGHT,
        scaling_factor=1.0,
        shift_factor=0.0,
        force_upcast=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def build_transformer(sizes: Sizes) -> ZImageTransformer2DModel:
    """Returns a transformer whose gates are open a little, so that every layer learns at once."""
    model = ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=LATENT_CHANNELS,
        dim=sizes.dim,
        n_layers=sizes.num_layers,
        n_refiner_layers=1,
        n_heads=sizes.num_heads,
        n_kv_heads=sizes.num_heads,
        norm_eps=1e-5,
        qk_norm=True,
        cap_feat_dim=sizes.text_dim,
        rope_theta=256.0,
        t_scale=1000.0,
        axes_dims=list(sizes.axes),
        axes_lens=[1024, 512, 512],
    )
    for block in (*model.noise_refiner, *model.layers):
        linear = block.adaLN_modulation[0]
        nn.init.normal_(linear.weight, std=0.02)
        nn.init.zeros_(linear.bias)
        gates = linear.bias.detach().view(4, -1)
        gates[1], gates[3] = 0.3, 0.3  # order of the chunks: scale, gate, scale, gate
    fix_time_embedding(model)
    nn.init.normal_(model.cap_pad_token, std=0.02)
    nn.init.normal_(model.x_pad_token, std=0.02)
    final = model.all_final_layer["2-1"].linear
    nn.init.normal_(final.weight, std=0.02)
    return model


@torch.no_grad()
def fix_time_embedding(model: ZImageTransformer2DModel, fastest: float = 0.03) -> None:
    """Makes the time embedding smooth random features of mean 0 and deviation 1, and freezes it.

    Learned, it has nothing to bound it: it grew from 0.1 to 2,000 within 5,000 steps, after which
    a single update of the final modulation moved every output, and higher rates diverged. Each
    block still learns its own linear map of these features. `fastest` is in radians per
    thousandth of the schedule: the stock table goes up to 1, which is noise from step to step.
    """
    first, second = model.t_embedder.mlp[0], model.t_embedder.mlp[2]
    half = first.in_features // 2
    rates = torch.exp(-math.log(10_000) * torch.arange(half) / half)
    slow = (rates <= fastest).repeat(2)
    nn.init.normal_(first.weight, std=1.5 / math.sqrt(int(slow.sum())))
    first.weight.mul_(slow)
    nn.init.normal_(first.bias, std=0.5)
    nn.init.normal_(second.weight, std=1 / math.sqrt(second.in_features))
    nn.init.zeros_(second.bias)
    made = model.t_embedder(torch.linspace(0, model.t_scale, 1001))
    deviation = made.std(0)
    second.weight.div_(deviation[:, None])
    second.bias.copy_(-made.mean(0) / deviation)
    model.t_embedder.requires_grad_(False)


def build_text_encoder(sizes: Sizes, vocabulary: int) -> Qwen3ForCausalLM:
    """Returns a causal language model with tied embeddings; token 0 pads, token 1 ends."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=sizes.text_dim,
        intermediate_size=sizes.text_ffn,
        num_hidden_layers=sizes.text_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        attention_dropout=0.0,
        initializer_range=0.04,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return Qwen3ForCausalLM(config)


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Returns the stock flow-matching Euler scheduler."""
    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=2.0)


def num_parameters(model: nn.Module) -> int:
    """Returns how many numbers the model holds."""
    return sum(p.numel() for p in model.parameters())


def seed_everything(seed: int) -> None:
    """Makes weights and sampling repeat."""
    torch.manual_seed(seed)
