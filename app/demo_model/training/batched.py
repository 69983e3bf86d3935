"""The language model and the transformer as pure batched functions, for training.

Owns a rewrite of two stock forwards over fixed shapes; the weights stay in the stock modules. Knows nothing of data or
loss. Surprise: the stock transformer loops over samples and pads each caption on its own; here every caption of a
batch must need the same padded length, and `check_against_stock` proves that the numbers agree.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import ZImageTransformer2DModel
from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock
from torch import nn
from transformers import Qwen3ForCausalLM

CAPTION_MULTIPLE = 32


def rms_norm(x: torch.Tensor, norm: nn.Module, eps: float) -> torch.Tensor:
    """Returns x normalised over its last axis in float32 and scaled."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * norm.weight


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates neighbouring pairs. x: [B, T, H, D]; cos, sin: [T, 1, D / 2]."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first half against the second. x: [B, T, H, D]; cos, sin: [T, 1, D / 2]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def transformer_block(
    block: ZImageTransformerBlock,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    condition: torch.Tensor | None,
) -> torch.Tensor:
    """One Z-Image block. x: [B, T, D]; condition: [B, C] or None for the context refiner."""
    attention, forward = block.attention, block.feed_forward
    if condition is not None:
        parts = block.adaLN_modulation(condition).float().unsqueeze(1).chunk(4, 2)
        scale_a, gate_a, scale_f, gate_f = (
            1 + parts[0], parts[1].tanh(), 1 + parts[2], parts[3].tanh()
        )  # fmt: skip
    h = rms_norm(x, block.attention_norm1, block.attention_norm1.eps)
    h = h * scale_a if condition is not None else h
    qkv = F.linear(
        h, torch.cat((attention.to_q.weight, attention.to_k.weight, attention.to_v.weight))
    )
    q, k, v = qkv.unflatten(-1, (3, attention.heads, -1)).unbind(2)
    q = rotate_pairs(rms_norm(q, attention.norm_q, attention.norm_q.eps), cos, sin).to(v.dtype)
    k = rotate_pairs(rms_norm(k, attention.norm_k, attention.norm_k.eps), cos, sin).to(v.dtype)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    out = attention.to_out[0](out.transpose(1, 2).flatten(2))
    out = rms_norm(out, block.attention_norm2, block.attention_norm2.eps)
    x = x + (gate_a * out if condition is not None else out)
    h = rms_norm(x, block.ffn_norm1, block.ffn_norm1.eps)
    h = h * scale_f if condition is not None else h
    up, gate = F.linear(h, torch.cat((forward.w1.weight, forward.w3.weight))).chunk(2, -1)
    out = rms_norm(forward.w2(F.silu(up) * gate), block.ffn_norm2, block.ffn_norm2.eps)
    return x + (gate_f * out if condition is not None else out)


def text_layer(
    layer: nn.Module, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """One Qwen3 layer with causal attention and no padding mask. x: [B, T, D]."""
    attention, mlp = layer.self_attn, layer.mlp
    dim = attention.head_dim
    h = rms_norm(x, layer.input_layernorm, eps)
    q = attention.q_proj(h).unflatten(-1, (-1, dim))
    k = attention.k_proj(h).unflatten(-1, (-1, dim))
    v = attention.v_proj(h).unflatten(-1, (-1, dim))
    q = rotate_halves(rms_norm(q, attention.q_norm, eps), cos, sin).to(v.dtype)
    k = rotate_halves(rms_norm(k, attention.k_norm, eps), cos, sin).to(v.dtype)
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    )
    x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
    h = rms_norm(x, layer.post_attention_layernorm, eps)
    return x + mlp.down_proj(F.silu(mlp.gate_proj(h)) * mlp.up_proj(h))


class BatchedModel:
    """Text encoder and transformer over whole batches; tables of positions are made once per caption length."""

    def __init__(
        self, transformer: ZImageTransformer2DModel, text_encoder: Qwen3ForCausalLM, compiled: bool
    ) -> None:
        self.transformer = transformer
        self.text_encoder = text_encoder
        device = next(transformer.parameters()).device
        self._tables = {n: self._positions(n, device) for n in (CAPTION_MULTIPLE, 2 * CAPTION_MULTIPLE)}
        self._text_tables = self._text_positions(160, device)
        wrap = torch.compile if compiled else (lambda f: f)
        self._modulated, self._plain, self._text = (
            wrap(transformer_block), wrap(transformer_block), wrap(text_layer)
        )  # fmt: skip

    def _positions(self, caption: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin of [64 image tokens, caption tokens]: each [64 + caption, 1, D / 2]."""
        side = 8
        grid = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1)
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
        """ids: [B, T] -> (what conditions the transformer: [B, T, D], input of the output head: [B, T, D])."""
        model = self.text_encoder.model
        cos, sin = (t[: ids.shape[1]] for t in self._text_tables)
        eps = self.text_encoder.config.rms_norm_eps
        x = model.embed_tokens(ids)
        features = x
        for layer in model.layers:
            features = x
            x = self._text(layer, x, cos, sin, eps)
        return features, rms_norm(x, model.norm, eps)

    def velocity(
        self, x: torch.Tensor, t: torch.Tensor, features: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """What the stock forward returns. x: [B, 16, 16, 16]; t: [B]; features: [B, 32 or 64, D]; lengths: [B]."""
        model, caption = self.transformer, features.shape[1]
        cos, sin = self._tables[caption]
        condition = model.t_embedder(t * model.t_scale).to(x.dtype)
        patches = x.unflatten(2, (8, 2)).unflatten(4, (8, 2)).permute(0, 2, 4, 3, 5, 1)
        image = model.all_x_embedder["2-1"](patches.flatten(3).flatten(1, 2))
        for block in model.noise_refiner:
            image = self._modulated(block, image, cos[:64], sin[:64], condition)
        norm, linear = model.cap_embedder
        text = linear(rms_norm(features, norm, norm.eps))
        is_pad = torch.arange(caption, device=x.device) >= lengths[:, None]
        text = torch.where(is_pad[..., None], model.cap_pad_token.to(text.dtype), text)
        for block in model.context_refiner:
            text = self._plain(block, text, cos[64:], sin[64:], None)
        joint = torch.cat((image, text), 1)
        for block in model.layers:
            joint = self._modulated(block, joint, cos, sin, condition)
        final = model.all_final_layer["2-1"]
        scale = 1 + final.adaLN_modulation(condition).float().unsqueeze(1)
        out = final.linear(final.norm_final(joint[:, :64].float()) * scale)
        out = out.unflatten(1, (8, 8)).unflatten(3, (2, 2, 16)).permute(0, 5, 1, 3, 2, 4)
        return out.reshape(x.shape)


@torch.no_grad()
def check_against_stock(model: BatchedModel, tolerance: float = 2e-4) -> float:
    """Returns the largest relative error against the stock forwards; raises ValueError above `tolerance`."""
    device = next(model.transformer.parameters()).device
    worst = 0.0
    for caption, lengths in ((32, (3, 32, 17)), (64, (33, 64, 50))):
        ids = torch.randint(4, model.text_encoder.config.vocab_size, (3, caption), device=device)
        sizes = torch.tensor(lengths, device=device)
        mask = torch.arange(caption, device=device) < sizes[:, None]
        stock = model.text_encoder(input_ids=ids, attention_mask=mask.long(), output_hidden_states=True)
        features, last = model.encode(ids)
        x, t = torch.randn(3, 16, 16, 16, device=device), torch.rand(3, device=device)
        expected = model.transformer(
            list(x.unsqueeze(2)), t, [f[m] for f, m in zip(stock.hidden_states[-2], mask, strict=True)]
        ).sample
        pairs = (
            (features[mask], stock.hidden_states[-2][mask]),
            (model.text_encoder.lm_head(last)[mask], stock.logits[mask]),
            (model.velocity(x, t, features, sizes), torch.stack(list(expected)).squeeze(2)),
        )
        for got, want in pairs:
            worst = max(worst, ((got - want).abs().max() / want.abs().max()).item())
    if not worst <= tolerance:
        raise ValueError(f"batched forward differs from the stock one by {worst:.2e} > {tolerance:.0e}")
    return worst
