"""Turns trained weights into a folder that `DiffusionPipeline.from_pretrained` loads.

Owns the layout of `weights/`. Knows nothing of how the weights came about. Surprise: weights are
stored as fp16, but the text encoder's config names float32, because transformers takes the stored
dtype otherwise.

    python -m dit_graphs.app.demo_model.training.export --checkpoint DIR --out DIR
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from diffusers import AutoencoderKL, ZImagePipeline, ZImageTransformer2DModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoTokenizer, Qwen3ForCausalLM

from dit_graphs.app.demo_model.training import models
from dit_graphs.app.demo_model.training.models import Sizes

TOKENIZER = Path(__file__).parent.parent / "weights" / "tokenizer"


def load_weights(model: nn.Module, file: Path, prefix: str = "") -> dict[str, float]:
    """Loads the tensors of `file` whose names start with `prefix`; returns its single numbers."""
    tensors = load_file(file)
    own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix) and v.ndim}
    missing, unexpected = model.load_state_dict(own, strict=False)
    missing = [name for name in missing if name != "lm_head.weight"]  # tied to the embedding
    if missing or unexpected:
        raise ValueError(f"{file}: missing {missing}, unexpected {unexpected}")
    return {k: v.item() for k, v in tensors.items() if not v.ndim}


def export(
    vae: AutoencoderKL,
    transformer: ZImageTransformer2DModel,
    text_encoder: Qwen3ForCausalLM,
    out: Path,
) -> int:
    """Writes the pipeline folder and returns its size in bytes."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    pipe = ZImagePipeline(
        scheduler=models.build_scheduler(),
        vae=vae.to(torch.float16),
        text_encoder=text_encoder.to(torch.float16),
        tokenizer=tokenizer,
        transformer=transformer.to(torch.float16),
    )
    kept = out / "tokenizer"
    if kept.resolve() != TOKENIZER.resolve():
        shutil.rmtree(kept, ignore_errors=True)
    pipe.save_pretrained(out, safe_serialization=True)
    _rewrite(out / "text_encoder" / "config.json", dtype="float32")
    _rewrite(out / "tokenizer" / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    index = json.loads((out / "model_index.json").read_text())
    index["tokenizer"] = ["transformers", "PreTrainedTokenizerFast"]
    index.pop("_name_or_path", None)
    (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    (out / "dit_graphs.json").write_text(json.dumps(models.CALL_DEFAULTS, indent=2) + "\n")
    return sum(f.stat().st_size for f in out.rglob("*") if f.is_file())


def _rewrite(file: Path, **changes: str) -> None:
    """Sets keys of a JSON file."""
    content = json.loads(file.read_text())
    content.update(changes)
    content.pop("_name_or_path", None)
    file.write_text(json.dumps(content, indent=2) + "\n")


def from_checkpoint(
    folder: Path, sizes: Sizes
) -> tuple[AutoencoderKL, ZImageTransformer2DModel, Qwen3ForCausalLM]:
    """Rebuilds the networks from `vae.safetensors` and `flow.safetensors` of a training run."""
    vae = models.build_vae(sizes)
    numbers = load_weights(vae, folder / "vae.safetensors")
    vae.register_to_config(
        scaling_factor=numbers["scaling_factor"], shift_factor=numbers["shift_factor"]
    )
    transformer = models.build_transformer(sizes)
    text_encoder = models.build_text_encoder(sizes, len(AutoTokenizer.from_pretrained(TOKENIZER)))
    load_weights(transformer, folder / "flow.safetensors", "transformer.")
    load_weights(text_encoder, folder / "flow.safetensors", "text_encoder.")
    return vae, transformer, text_encoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    size = export(
        *from_checkpoint(args.checkpoint, models.TINY if args.tiny else Sizes()), args.out
    )
    print(f"{args.out}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
