"""The full-size denoisers that the numbers are about, with random weights: a fair test of speed.

Owns their configurations and how they are built as a checkpoint loader would build them. Knows
nothing of timing. The surprising fact: `module.to(bfloat16)` after building gives a *different*
model from loading in bfloat16 — it rounds the rotary tables and the layers that a class keeps in
float32 — so dtype is chosen while building, parameter by parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import diffusers
import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from benchmarks import shapes
from benchmarks.shapes import DTYPE, Draw, InputsFunction, Size
from benchmarks.weights import randomise


@dataclass(frozen=True, slots=True)
class Spec:
    """A model as its checkpoint configures it, and the sizes the table of targets names."""

    class_name: str
    config: Mapping[str, object]
    inputs: InputsFunction
    sizes: tuple[str, ...]
    # Depth and width at which a CPU can run it; what it takes as input stays as it is.
    small: Mapping[str, object]


_SDXL: dict[str, object] = {
    "sample_size": 128,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (320, 640, 1280),
    "attention_head_dim": (5, 10, 20),
    "transformer_layers_per_block": (1, 2, 10),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
_SDXL_SMALL: dict[str, object] = {
    "transformer_layers_per_block": (1, 1, 1),
    "layers_per_block": 1,
    "block_out_channels": (32, 64, 64),
    "attention_head_dim": (2, 4, 4),
}

MODELS: dict[str, Spec] = {
    "z-image": Spec(
        "ZImageTransformer2DModel",
        {"axes_lens": [1536, 512, 512]},
        shapes.z_image,
        ("256", "512", "1024"),
        {"n_layers": 2, "n_refiner_layers": 1, "dim": 256, "n_heads": 2, "n_kv_heads": 2},
    ),
    "flux2-klein": Spec(
        "Flux2Transformer2DModel",
        {
            "num_layers": 5,
            "num_single_layers": 20,
            "num_attention_heads": 24,
            "joint_attention_dim": 7680,
            "guidance_embeds": False,
        },
        shapes.flux2_klein,
        ("256", "512"),
        {"num_layers": 1, "num_single_layers": 2, "num_attention_heads": 2},
    ),
    "sd3.5-medium": Spec(
        "SD3Transformer2DModel",
        {
            "num_layers": 24,
            "num_attention_heads": 24,
            "caption_projection_dim": 1536,
            "pos_embed_max_size": 384,
            "dual_attention_layers": tuple(range(13)),
            "qk_norm": "rms_norm",
        },
        shapes.sd3,
        ("256", "512"),
        {
            "num_layers": 2,
            "dual_attention_layers": (0,),
            "num_attention_heads": 2,
            "caption_projection_dim": 128,
        },
    ),
    "wan-1.3b": Spec(
        "WanTransformer3DModel",
        {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
        shapes.wan,
        ("256", "512", "256x448x17"),
        {"num_layers": 2, "num_attention_heads": 2, "ffn_dim": 512},
    ),
    "qwen-image": Spec(
        "QwenImageTransformer2DModel",
        {},
        shapes.qwen_image,
        ("256", "512", "1024"),
        {"num_layers": 2, "num_attention_heads": 2},
    ),
    "sdxl-unet": Spec(
        "UNet2DConditionModel", _SDXL, shapes.sdxl, ("256", "512", "1024"), _SDXL_SMALL
    ),
    "sdxl-unet-b1": Spec(
        "UNet2DConditionModel", _SDXL, partial(shapes.sdxl, batch=1), ("512",), _SDXL_SMALL
    ),
    "flux1": Spec(
        "FluxTransformer2DModel",
        {"guidance_embeds": True},
        shapes.flux1,
        ("256", "512"),
        {"num_layers": 1, "num_single_layers": 2, "num_attention_heads": 2},
    ),
    "pixart-sigma": Spec(
        "PixArtTransformer2DModel",
        {
            "caption_channels": 4096,
            "interpolation_scale": 2,
            "use_additional_conditions": False,
        },
        shapes.pixart,
        ("256", "512"),
        {"num_layers": 2, "num_attention_heads": 2, "cross_attention_dim": 144},
    ),
    "sana": Spec(
        "SanaTransformer2DModel",
        {},
        shapes.sana,
        ("512", "1024"),
        {
            "num_layers": 2,
            "num_attention_heads": 4,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 64,
            "cross_attention_dim": 128,
        },
    ),
    "ltx": Spec(
        "LTXVideoTransformer3DModel",
        {},
        shapes.ltx,
        ("256x384x25",),
        {"num_layers": 2, "num_attention_heads": 2, "cross_attention_dim": 128},
    ),
    "lumina2": Spec(
        "Lumina2Transformer2DModel",
        {"cap_feat_dim": 2304},
        shapes.lumina2,
        ("256", "512", "1024"),
        {
            "num_layers": 2,
            "num_refiner_layers": 1,
            "hidden_size": 192,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
        },
    ),
    "hidream": Spec(
        "HiDreamImageTransformer2DModel",
        {
            "patch_size": 2,
            "in_channels": 16,
            "caption_channels": [4096, 4096],
            "axes_dims_rope": (64, 32, 32),
            # Each block reads the next layer of Llama; the blocks beyond its 32 read the last.
            "llama_layers": [*range(32), *[31] * 16],
        },
        shapes.hidream,
        ("256", "512", "1024"),
        {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "llama_layers": [0, 1]},
    ),
    "hunyuan-video-1.5": Spec(
        "HunyuanVideo15Transformer3DModel",
        {},
        shapes.hunyuan_video_15,
        ("256x448x17", "480x832x17"),
        {"num_layers": 2, "num_refiner_layers": 1, "num_attention_heads": 2},
    ),
}


def build(
    name: str, device: str | torch.device = "cuda", *, seed: int = 0, small: bool = False
) -> nn.Module:
    """The named model on `device` in eval mode: bfloat16, seeded random weights, real tables.

    `small` builds few and narrow layers of the same inputs. On the meta device the weights stay
    empty. Raises KeyError for an unknown name.
    """
    spec = MODELS[name]
    config = {**spec.config, **(spec.small if small else {})}
    # Parameters are born on the meta device (nothing is initialised twice); buffers and tables that
    # a constructor computes are real, and those kept as plain attributes stay on the CPU until the
    # first forward moves them, exactly as in a loaded model.
    with init_empty_weights(include_buffers=False), _default_dtype(DTYPE):
        module: nn.Module = getattr(diffusers, spec.class_name)(**config)
    materialise(module, torch.device(device))
    if torch.device(device).type != "meta":
        randomise(module, seed=seed)
    return module.eval().requires_grad_(False)


def inputs(
    name: str, size: Size, seed: int = 0, device: str | torch.device = "cuda"
) -> dict[str, object]:
    """Keyword arguments of one forward at that size, on `device`, as the pipeline passes them."""
    given = moved(MODELS[name].inputs(size, Draw(seed)), device)
    assert isinstance(given, dict)
    return given


def moved(tree: object, device: str | torch.device) -> object:
    """A copy of nested containers with every tensor on `device`, views of one element kept so."""
    result: object = tree_map_only(Tensor, partial(_moved, device=torch.device(device)), tree)
    return result


def _moved(tensor: Tensor, *, device: torch.device) -> Tensor:
    """`to` would make an expanded timestep dense; pipelines pass the view."""
    if tensor.dim() and tensor.stride(0) == 0:
        return tensor[:1].to(device).expand(tensor.shape)
    return tensor.to(device)


change = shapes.changed


def materialise(module: nn.Module, device: torch.device) -> None:
    """Every parameter and registered buffer of the module lives on `device` with its loaded dtype.

    Parameters become empty tensors of DTYPE, or float32 in the layers that the class keeps so
    (`_keep_in_fp32_modules`, matched by name part as the loader does). Buffers keep their values.
    """
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())

    def dtype_of(name: str) -> torch.dtype:
        return torch.float32 if kept.intersection(name.split(".")) else DTYPE

    for prefix, child in module.named_modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            full_name = f"{prefix}.{name}" if prefix else name
            empty = torch.empty(parameter.shape, dtype=dtype_of(full_name), device=device)
            setattr(child, name, nn.Parameter(empty, requires_grad=False))
        for name, buffer in list(child.named_buffers(recurse=False)):
            full_name = f"{prefix}.{name}" if prefix else name
            # A checkpoint holds the persistent ones, and loading casts them.
            is_loaded = name not in child._non_persistent_buffers_set and buffer.is_floating_point()
            dtype = dtype_of(full_name) if is_loaded else buffer.dtype
            child.register_buffer(name, buffer.to(device, dtype), persistent=is_loaded)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
