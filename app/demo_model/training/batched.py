"""The language model and the transformer as pure batched functions, for training.

Owns a rewrite of two stock forwards over fixed shapes; the weights stay in the stock modules. Knows
nothing of data or loss. Surprise: the stock transformer loops over samples and pads each caption on
its own; here every caption of a batch must need the same padded length, and `check_against_stock`
proves that the numbers agree.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from diffusers import ZImageTransformer2DModel
from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock
from torch import nn
from transformers import Qwen3ForCausalLM

CAPTION_MULTIPLE = 32


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns x normalised over its last axis in float32 and scaled."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates neighbouring pairs. x: [B, T, H, D]; cos, sin: [T, 1, D / 2]."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first half against the second. x: [B, T, H, D]; cos, sin: [T, 1, D / 2]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class BlockWeights(NamedTuple):
    """Weights of one Z-Image block. Tensors only: one compiled function serves every layer."""

    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    out: torch.Tensor
    norm_q: torch.Tensor
    norm_k: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    up_gate: tuple[torch.Tensor, torch.Tensor]
    down: torch.Tensor
    modulation: tuple[torch.Tensor, torch.Tensor] | None


def block_weights(block: ZImageTransformerBlock) -> BlockWeights:
    """Returns the block's own parameters (no copies)."""
    attention, forward = block.attention, block.feed_forward
    linear = block.adaLN_modulation[0] if block.modulation else None
    return BlockWeights(
        (attention.to_q.weight, attention.to_k.weight, attention.to_v.weight),
        attention.to_out[0].weight,
        attention.norm_q.weight,
        attention.norm_k.weight,
        tuple(
            n.weight
            for n in (
                block.attention_norm1,
                block.attention_norm2,
                block.ffn_norm1,
                block.ffn_norm2,
            )
        ),
        (forward.w1.weight, forward.w3.weight),
        forward.w2.weight,
        None if linear is None else (linear.weight, linear.bias),
    )


def transformer_block(
    w: BlockWeights,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    condition: torch.Tensor | None,
) -> torch.Tensor:
    """One Z-Image block. x: [B, T, D]; condition: [B, C], or None for the context refiner."""
    dim, eps = w.norm_q.shape[0], 1e-5
    h = rms_norm(x, w.norms[0], eps)
    if w.modulation is not None and condition is not None:
        parts = F.linear(condition, *w.modulation).float().unsqueeze(1).chunk(4, 2)
        scale_a, gate_a, scale_f, gate_f = (
            1 + parts[0], parts[1].tanh(), 1 + parts[2], parts[3].tanh()
        )  # fmt: skip
        h = h * scale_a
    q, k, v = F.linear(h, torch.cat(w.qkv)).unflatten(-1, (3, -1, dim)).unbind(2)
    q = rotate_pairs(rms_norm(q, w.norm_q, eps), cos, sin).to(v.dtype)
    k = rotate_pairs(rms_norm(k, w.norm_k, eps), cos, sin).to(v.dtype)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    out = rms_norm(F.linear(out.transpose(1, 2).flatten(2), w.out), w.norms[1], eps)
    x = x + (gate_a * out if condition is not None else out)
    h = rms_norm(x, w.norms[2], eps)
    h = h * scale_f if condition is not None else h
    up, gate = F.linear(h, torch.cat(w.up_gate)).chunk(2, -1)
    out = rms_norm(F.linear(F.silu(up) * gate, w.down), w.norms[3], eps)
    return x + (gate_f * out if condition is not None else out)


class TextWeights(NamedTuple):
    """Weights of one Qwen3 layer."""

    norm_in: torch.Tensor
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    norm_q: torch.Tensor
    norm_k: torch.Tensor
    out: torch.Tensor
    norm_mlp: torch.Tensor
    gate_up: tuple[torch.Tensor, torch.Tensor]
    down: torch.Tensor


def text_weights(layer: nn.Module) -> TextWeights:
    """Returns the layer's own parameters (no copies)."""
    attention, mlp = layer.self_attn, layer.mlp
    return TextWeights(
        layer.input_layernorm.weight,
        (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
        attention.q_norm.weight,
        attention.k_norm.weight,
        attention.o_proj.weight,
        layer.post_attention_layernorm.weight,
        (mlp.gate_proj.weight, mlp.up_proj.weight),
        mlp.down_proj.weight,
    )


def text_layer(
    w: TextWeights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """One Qwen3 layer with causal attention and no padding mask. x: [B, T, D]."""
    dim = w.norm_q.shape[0]
    h = rms_norm(x, w.norm_in, eps)
    qkv = F.linear(h, torch.cat(w.qkv)).split([part.shape[0] for part in w.qkv], -1)
    q, k, v = (part.unflatten(-1, (-1, dim)) for part in qkv)
    q = rotate_halves(rms_norm(q, w.norm_q, eps), cos, sin).to(v.dtype)
    k = rotate_halves(rms_norm(k, w.norm_k, eps), cos, sin).to(v.dtype)
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    )
    x = x + F.linear(out.transpose(1, 2).flatten(2), w.out)
    gate, up = F.linear(rms_norm(x, w.norm_mlp, eps), torch.cat(w.gate_up)).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, w.down)


class BatchedModel:
    """Text encoder and transformer over whole batches; position tables are made once."""

    def __init__(
        self, transformer: ZImageTransformer2DModel, text_encoder: Qwen3ForCausalLM, compiled: bool
    ) -> None:
        self.transformer = transformer
        self.text_encoder = text_encoder
        device = next(transformer.parameters()).device
        self._tables = {
            n: self._positions(n, device) for n in (CAPTION_MULTIPLE, 2 * CAPTION_MULTIPLE)
        }
        self._text_tables = self._text_positions(160, device)
        self._block, self._text = transformer_block, text_layer
        if compiled:
            # Static shapes: a handful of short compilations, and faster kernels.
            self._block = torch.compile(transformer_block, dynamic=False)
            self._text = torch.compile(text_layer, dynamic=False)

    def _positions(self, caption: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin of [64 image tokens, caption tokens]: each [64 + caption, 1, D / 2]."""
        side = 8
        grid = torch.stack(
            torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1
        )
        image = torch.cat((torch.full((side * side, 1), caption + 1), grid.reshape(-1, 2)), 1)
        text = torch.zeros(caption, 3, dtype=torch.long)
        text[:, 0] = torch.arange(1, caption + 1)
        # Computed by the stock code on the CPU, so that both forwards share every bit of the table.
        table = self.transformer.rope_embedder(torch.cat((image, text)))
        table = table[:, None].to(device)
        return table.real.contiguous(), table.imag.contiguous()

    def _text_positions(self, num: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.text_encoder.config
        theta = float(config.rope_parameters["rope_theta"])
        rate = 1.0 / theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        angle = torch.arange(num).float()[:, None, None] * rate
        return angle.cos().to(device), angle.sin().to(device)

    def encode(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids: [B, T] -> (transformer's conditions, output head's input): [B, T, D] each."""
        model = self.text_encoder.model
        cos, sin = (t[: ids.shape[1]] for t in self._text_tables)
        eps = self.text_encoder.config.rms_norm_eps
        x = model.embed_tokens(ids)
        features = x
        for layer in model.layers:
            features = x
            x = self._text(text_weights(layer), x, cos, sin, eps)
        return features, rms_norm(x, model.norm.weight, eps)

    def velocity(
        self, x: torch.Tensor, t: torch.Tensor, features: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """What the stock forward returns.

        x: [B, 16, 16, 16]; t: [B]; features: [B, 32 or 64, D]; lengths: [B].
        """
        model, caption = self.transformer, features.shape[1]
        cos, sin = self._tables[caption]
        condition = model.t_embedder(t * model.t_scale).to(x.dtype)
        patches = x.unflatten(2, (8, 2)).unflatten(4, (8, 2)).permute(0, 2, 4, 3, 5, 1)
        image = model.all_x_embedder["2-1"](patches.flatten(3).flatten(1, 2))
        for block in model.noise_refiner:
            image = self._block(block_weights(block), image, cos[:64], sin[:64], condition)
        norm, linear = model.cap_embedder
        text = linear(rms_norm(features, norm.weight, norm.eps))
        is_pad = torch.arange(caption, device=x.device) >= lengths[:, None]
        text = torch.where(is_pad[..., None], model.cap_pad_token.to(text.dtype), text)
        for block in model.context_refiner:
            text = self._block(block_weights(block), text, cos[64:], sin[64:], None)
        joint = torch.cat((image, text), 1)
        for block in model.layers:
            joint = self._block(block_weights(block), joint, cos, sin, condition)
        final = model.all_final_layer["2-1"]
        scale = 1 + final.adaLN_modulation(condition).float().unsqueeze(1)
        out = final.linear(final.norm_final(joint[:, :64].float()) * scale)
        out = out.unflatten(1, (8, 8)).unflatten(3, (2, 2, 16)).permute(0, 5, 1, 3, 2, 4)
        return out.reshape(x.shape)


@torch.no_grad()
def check_against_stock(model: BatchedModel, tolerance: float = 2e-4) -> float:
    """Returns the largest relative error against stock; raises ValueError above `tolerance`."""
    device = next(model.transformer.parameters()).device
    errors = []
    for caption, lengths in ((32, (3, 32, 17)), (64, (33, 64, 50))):
        ids = torch.randint(4, model.text_encoder.config.vocab_size, (3, caption), device=device)
        sizes = torch.tensor(lengths, device=device)
        mask = torch.arange(caption, device=device) < sizes[:, None]
        stock = model.text_encoder(
            input_ids=ids, attention_mask=mask.long(), output_hidden_states=True
        )
        features, last = model.encode(ids)
        x, t = torch.randn(3, 16, 16, 16, device=device), torch.rand(3, device=device)
        expected = model.transformer(
            list(x.unsqueeze(2)),
            t,
            [f[m] for f, m in zip(stock.hidden_states[-2], mask, strict=True)],
        ).sample
        pairs = (
            (features[mask], stock.hidden_states[-2][mask]),
            (model.text_encoder.lm_head(last)[mask], stock.logits[mask]),
            (model.velocity(x, t, features, sizes), torch.stack(list(expected)).squeeze(2)),
        )
        for got, want in pairs:
            errors.append(((got - want).abs().max() / want.abs().max()).item())
    worst = max(errors)
    if not all(error <= tolerance for error in errors):  # so that NaN fails
        raise ValueError(
            f"batched forward differs from the stock one by {worst:.2e} > {tolerance:.0e}"
        )
    return worst
