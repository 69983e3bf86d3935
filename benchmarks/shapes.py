"""What a pipeline hands to its denoiser at a picture size: names, shapes and dtypes.

Owns the shapes of one step of each full-size model, as the stock pipeline of diffusers passes them
(MODELS in benchmarks/models.py says which). Knows nothing of weights. The surprising fact: dtypes
differ from what the model's weights suggest — timesteps are float32, bfloat16 or int64 depending on
the scheduler a family ships with — and each difference is a different signature.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers import ZImageTransformer2DModel
from torch import Tensor, nn

from benchmarks.equality import leaves, replaced

DTYPE = torch.bfloat16
_LATENTS = re.compile(r"^\['(hidden_states|sample|x)'\]")
_STEPS = re.compile(r"^\['(timesteps?|t)'\]")
_STRUCTURE = re.compile(r"ids'\]|mask(_2)?'\]")


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """Height and width in pixels, and frames."""

    height: int
    width: int
    frames: int = 1

    @classmethod
    def parse(cls, text: str) -> Size:
        """`512`, `512x768` or `256x448x17` (height x width x frames). Raises ValueError."""
        match [int(part) for part in text.split("x")]:
            case [side]:
                return cls(side, side)
            case [height, width]:
                return cls(height, width)
            case [height, width, frames]:
                return cls(height, width, frames)
        raise ValueError(f"expected SIDE, HxW or HxWxFRAMES, got {text!r}")

    def __str__(self) -> str:
        plane = f"{self.height}" if self.height == self.width else f"{self.height}x{self.width}"
        if self.frames == 1:
            return plane
        return f"{self.height}x{self.width}x{self.frames}"


class Draw:
    """Seeded normal tensors: the same values on every device, because they are drawn on the CPU."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(dtype)


InputsFunction = Callable[[Size, Draw], dict[str, object]]


def _joint_attention_kwargs(kind: type[nn.Module]) -> dict[str, object]:
    """The pipeline hands on what it was not given, where this diffusers has that argument."""
    name = "joint_attention_kwargs"
    return {name: None} if name in inspect.signature(kind.forward).parameters else {}


def z_image(size: Size, draw: Draw) -> dict[str, object]:
    """Turbo: no guidance, one sample; a prompt of 64 tokens (its median is shorter)."""
    return {
        "x": [draw(16, 1, size.height // 8, size.width // 8)],
        "t": torch.tensor([0.4375]),
        "cap_feats": [draw(64, 2560)],
        **_joint_attention_kwargs(ZImageTransformer2DModel),
        "return_dict": False,
    }


def flux2_klein(size: Size, draw: Draw) -> dict[str, object]:
    """Distilled: no guidance; 512 padded prompt tokens of three stacked layers."""
    rows, columns = size.height // 16, size.width // 16
    zero = torch.zeros(1, dtype=torch.int64)
    image = torch.cartesian_prod(zero, torch.arange(rows), torch.arange(columns), zero)
    return {
        "hidden_states": draw(1, rows * columns, 128),
        "timestep": torch.tensor([0.4375], dtype=DTYPE),
        "guidance": None,
        "encoder_hidden_states": draw(1, 512, 3 * 2560),
        "txt_ids": torch.cartesian_prod(zero, zero, zero, torch.arange(512))[None],
        "img_ids": image[None],
        "joint_attention_kwargs": None,
        "return_dict": False,
    }


def flux1(size: Size, draw: Draw) -> dict[str, object]:
    """Dev: guidance is an embedded number, so one forward a step."""
    rows, columns = size.height // 16, size.width // 16
    image = torch.zeros(rows, columns, 3, dtype=DTYPE)
    image[..., 1] = torch.arange(rows)[:, None]
    image[..., 2] = torch.arange(columns)[None]
    return {
        "hidden_states": draw(1, rows * columns, 64),
        "timestep": torch.tensor([0.4375], dtype=DTYPE),
        "guidance": torch.tensor([3.5]),
        "pooled_projections": draw(1, 768),
        "encoder_hidden_states": draw(1, 512, 4096),
        "txt_ids": torch.zeros(512, 3, dtype=DTYPE),
        "img_ids": image.reshape(-1, 3),
        "joint_attention_kwargs": None,
        "return_dict": False,
    }


def qwen_image(size: Size, draw: Draw) -> dict[str, object]:
    """One of the two guidance branches; a prompt of 64 tokens, its all-ones mask dropped."""
    rows, columns = size.height // 16, size.width // 16
    return {
        "hidden_states": draw(1, rows * columns, 64),
        "timestep": torch.tensor([0.4375], dtype=DTYPE),
        "guidance": None,
        "encoder_hidden_states_mask": None,
        "encoder_hidden_states": draw(1, 64, 3584),
        "img_shapes": [[(1, rows, columns)]],
        "attention_kwargs": {},
        "return_dict": False,
    }


def sd3(size: Size, draw: Draw) -> dict[str, object]:
    """Guidance as one batch of two; 77 + 256 prompt tokens."""
    return {
        "hidden_states": draw(2, 16, size.height // 8, size.width // 8),
        "timestep": torch.tensor([437.5]).expand(2),
        "encoder_hidden_states": draw(2, 333, 4096),
        "pooled_projections": draw(2, 2048),
        "joint_attention_kwargs": None,
        "return_dict": False,
    }


def wan(size: Size, draw: Draw) -> dict[str, object]:
    """One of the two guidance branches; 4x fewer frames and 8x fewer pixels a side as latents."""
    frames = (size.frames - 1) // 4 + 1
    return {
        "hidden_states": draw(1, 16, frames, size.height // 8, size.width // 8),
        "timestep": torch.tensor([437]),
        "encoder_hidden_states": draw(1, 512, 4096),
        "attention_kwargs": None,
        "return_dict": False,
    }


def sdxl(size: Size, draw: Draw, batch: int = 2) -> dict[str, object]:
    """The UNet with guidance as one batch of two; the timestep has no dimension."""
    numbers = [size.height, size.width, 0, 0, size.height, size.width]
    return {
        "sample": draw(batch, 4, size.height // 8, size.width // 8),
        "timestep": torch.tensor(437.5),
        "encoder_hidden_states": draw(batch, 77, 2048),
        "timestep_cond": None,
        "cross_attention_kwargs": None,
        "added_cond_kwargs": {
            "text_embeds": draw(batch, 1280),
            "time_ids": torch.tensor([numbers] * batch, dtype=DTYPE),
        },
        "return_dict": False,
    }


def _prompt_mask(length: int, num_valid: int) -> Tensor:
    """[2, length]: a prompt beside an empty one of two tokens."""
    positions = torch.arange(length)
    return torch.stack([positions < num_valid, positions < 2]).to(torch.int64)


def pixart(size: Size, draw: Draw) -> dict[str, object]:
    """Guidance as one batch of two; 300 prompt tokens and their mask."""
    return {
        "hidden_states": draw(2, 4, size.height // 8, size.width // 8),
        "encoder_hidden_states": draw(2, 300, 4096),
        "encoder_attention_mask": _prompt_mask(300, 40),
        "timestep": torch.tensor([437]).expand(2),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "return_dict": False,
    }


def sana(size: Size, draw: Draw) -> dict[str, object]:
    """Guidance as one batch of two; the autoencoder shrinks 32x, so 512² is 256 tokens."""
    return {
        "hidden_states": draw(2, 32, size.height // 32, size.width // 32),
        "encoder_hidden_states": draw(2, 300, 2304),
        "encoder_attention_mask": _prompt_mask(300, 40),
        "timestep": torch.tensor([437.5]).expand(2),
        "attention_kwargs": None,
        "return_dict": False,
    }


def ltx(size: Size, draw: Draw) -> dict[str, object]:
    """Guidance as one batch of two; 8x fewer frames and 32x fewer pixels a side as tokens."""
    frames, rows, columns = (size.frames - 1) // 8 + 1, size.height // 32, size.width // 32
    return {
        "hidden_states": draw(2, math.prod((frames, rows, columns)), 128),
        "encoder_hidden_states": draw(2, 128, 4096),
        "timestep": torch.tensor([437.5]).expand(2),
        "encoder_attention_mask": _prompt_mask(128, 40),
        "num_frames": frames,
        "height": rows,
        "width": columns,
        "rope_interpolation_scale": (8 / 25, 32, 32),
        "attention_kwargs": None,
        "return_dict": False,
    }


def lumina2(size: Size, draw: Draw) -> dict[str, object]:
    """One of the two guidance branches; 256 prompt tokens, of which 40 are valid."""
    return {
        "hidden_states": draw(1, 16, size.height // 8, size.width // 8),
        "timestep": torch.tensor([0.5625]),
        "encoder_hidden_states": draw(1, 256, 2304),
        "encoder_attention_mask": _prompt_mask(256, 40)[:1],
        "return_dict": False,
        "attention_kwargs": None,
    }


def hidream(size: Size, draw: Draw) -> dict[str, object]:
    """Guidance as one batch of two; 128 tokens of T5 and of each of Llama's 32 layers."""
    return {
        "hidden_states": draw(2, 16, size.height // 8, size.width // 8),
        "timesteps": torch.tensor([437.5]).expand(2),
        "encoder_hidden_states_t5": draw(2, 128, 4096),
        "encoder_hidden_states_llama3": draw(32, 2, 128, 4096),
        "pooled_embeds": draw(2, 2048),
        "attention_kwargs": None,
        "return_dict": False,
    }


def hunyuan_video_15(size: Size, draw: Draw) -> dict[str, object]:
    """Image to video, one of the two guidance branches.

    4x fewer frames and 16x fewer pixels a side as latents; 32 channels of noise, 32 of the first
    frame and its mask. 100 of 1,000 prompt tokens and 20 of 256 glyph tokens are valid.
    """
    frames, rows, columns = (size.frames - 1) // 4 + 1, size.height // 16, size.width // 16
    return {
        "hidden_states": draw(1, 65, frames, rows, columns),
        "image_embeds": draw(1, 729, 1152),
        "timestep": torch.tensor([437.5], dtype=DTYPE),
        "attention_kwargs": None,
        "return_dict": False,
        "encoder_hidden_states": draw(1, 1000, 3584),
        "encoder_attention_mask": _prompt_mask(1000, 100)[:1].to(DTYPE),
        "encoder_hidden_states_2": draw(1, 256, 1472),
        "encoder_attention_mask_2": _prompt_mask(256, 20)[:1].to(DTYPE),
    }


def changed(inputs: dict[str, object], seed: int, *, per_step: bool = False) -> dict[str, object]:
    """Other values of the same shapes, dtypes and devices; position ids and masks stay.

    With `per_step` only latents and timestep are new, as between two steps of one picture; without,
    the prompt and every condition too, as for the next picture.
    """
    generator = torch.Generator().manual_seed(seed)
    tree: object = inputs
    for leaf in leaves(inputs):
        if _STRUCTURE.search(leaf.path) or (per_step and not _is_per_step(leaf.path)):
            continue
        tree = replaced(tree, leaf.path, _new_values(leaf.path, leaf.tensor, generator))
    assert isinstance(tree, dict)
    return tree


def is_latents(path: str) -> bool:
    """Whether the leaf at that path is the picture being denoised."""
    return _LATENTS.match(path) is not None


def _is_per_step(path: str) -> bool:
    return is_latents(path) or _STEPS.match(path) is not None


def _new_values(path: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    if _STEPS.match(path):
        # One factor for the batch: a step has one time. A view stays a view (its stride is signed).
        factor = 0.5 + 0.4 * torch.rand((), generator=generator).item()
        one = tensor[:1] if tensor.dim() else tensor
        return (one * factor).to(tensor.dtype).expand(tensor.shape)
    if path == "['guidance']":
        return tensor + 0.25
    noise = torch.randn(tensor.shape, generator=generator)
    return noise.to(tensor.device, tensor.dtype)
