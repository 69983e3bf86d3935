"""Builds the tokenizer: byte-level BPE of 1,280 tokens with a two-role chat template.

Owns `weights/tokenizer/`. Knows captions only as text. Surprises: text is lower-cased, and each
piece gets a leading space, so that a word is the same token at the start of a prompt and inside it.

    python -m dit_graphs.app.demo_model.training.tokenizer --out DIR
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dit_graphs.app.demo_model.training.captions import SpecSampler, long_caption, short_caption
from dit_graphs.app.demo_model.training.concepts import load_concepts

VOCABULARY = 1280
PAD, END, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def corpus(num: int = 40_000, seed: int = 0) -> list[str]:
    """Returns captions and every name three times; the same list for the same seed."""
    concepts, rng = load_concepts(), random.Random(seed)
    torch.manual_seed(seed)
    spec = SpecSampler(len(concepts), torch.device("cpu")).sample(num)
    texts = []
    for row in zip(*(t.tolist() for t in spec.tensors()[:4]), strict=True):
        texts += [short_caption(row, concepts, rng), long_caption(row, concepts, rng)]
    for concept in concepts:
        texts += [concept.name, concept.plural, *concept.other_names] * 30
    return texts


def build(texts: list[str]) -> PreTrainedTokenizerFast:
    """Returns a tokenizer trained on `texts`."""
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        padding_side="right",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    tokenizer = build(corpus())
    tokenizer.save_pretrained(out)
    # The name every transformers 5 knows; newer ones write the name of the class behind it.
    file = out / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(settings, indent=2) + "\n")
    print(f"{len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
