"""Writes an untrained model folder of the final layout, to develop against before training is done.

python -m dit_graphs.app.demo_model.training.init_random --out DIR [--tiny]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import AutoTokenizer

from dit_graphs.app.demo_model.training import models
from dit_graphs.app.demo_model.training.export import TOKENIZER, export
from dit_graphs.app.demo_model.training.models import Sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    sizes = models.TINY if args.tiny else Sizes()
    models.seed_everything(0)
    vae = models.build_vae(sizes)
    transformer = models.build_transformer(sizes)
    text_encoder = models.build_text_encoder(sizes, len(AutoTokenizer.from_pretrained(TOKENIZER)))
    for name, model in (("vae", vae), ("transformer", transformer), ("text", text_encoder)):
        print(f"{name}: {models.num_parameters(model):,} parameters")
    print(f"{args.out}: {export(vae, transformer, text_encoder, args.out) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
