"""A small transformer for the GPU tests: real attention, real norms, bf16, no zero gates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dit_graphs import eager_on_graph


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: list[int] | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        b, n, d = x.shape
        h = self.norm(x) * (1 + shift[:, None]) + shift[:, None]
        q, k, v = self.qkv(h).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.proj(self.attend(q, k, v, None).transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(x)


class Denoiser(nn.Module):
    """`forward(x [B, N, D], t [B], text [B, L, D])` → 1-tuple of [B, N, D]."""

    def __init__(self, dim: int = 256, heads: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.time = nn.Linear(1, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, t: Tensor, text: Tensor | None = None) -> tuple[Tensor]:
        shift = self.time(t[:, None].to(x.dtype))
        if text is not None:
            x = x + text.mean(1, keepdim=True)
        for block in self.blocks:
            x = block(x, shift)
        return (self.out(x),)


@eager_on_graph
def attend_by_length(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Reads the lengths on the host and attends over the valid tokens only, padded with zeros."""
    out = torch.zeros_like(q)
    for row, n in enumerate(lengths.tolist()):
        part = slice(0, n)
        out[row, :, part] = F.scaled_dot_product_attention(
            q[row : row + 1, :, part], k[row : row + 1, :, part], v[row : row + 1, :, part]
        )[0]
    return out


class DynamicDenoiser(Denoiser):
    """As `Denoiser`, with attention over `lengths` [B] valid tokens: truly dynamic."""

    def forward(self, x: Tensor, t: Tensor, lengths: Tensor) -> tuple[Tensor]:  # type: ignore[override]
        shift = self.time(t[:, None].to(x.dtype))
        for block in self.blocks:
            b, n, d = x.shape
            h = block.norm(x) * (1 + shift[:, None]) + shift[:, None]
            q, k, v = (
                block.qkv(h).view(b, n, 3, block.heads, d // block.heads).permute(2, 0, 3, 1, 4)
            )
            mixed = attend_by_length(q, k, v, lengths)
            x = x + block.proj(mixed.transpose(1, 2).reshape(b, n, d))
            x = x + block.mlp(x)
        return (self.out(x),)


def build(kind: type[Denoiser] = Denoiser, seed: int = 0, **options: int) -> Denoiser:
    torch.manual_seed(seed)
    with torch.device("cuda"):
        return kind(**options).to(torch.bfloat16).eval()


def inputs(
    seed: int, batch: int = 2, tokens: int = 64, dim: int = 256, text: int = 32
) -> dict[str, Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)
    kw = {"device": "cuda", "generator": g, "dtype": torch.bfloat16}
    return {
        "x": torch.randn(batch, tokens, dim, **kw),
        "t": torch.rand(batch, device="cuda", generator=g),
        "text": torch.randn(batch, text, dim, **kw),
    }
