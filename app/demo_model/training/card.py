"""Writes the model card `README.md` from the training log, and the picture grid beside it.

Owns the card's words. Knows the training only by `log.jsonl`, one JSON line an event, in which a
`start` opens each process. Surprise: no measured number is typed here; whether a target is met is
computed as well, so a better training changes the verdict by itself.

    python -m dit_graphs.app.demo_model.training.card [--log FILE] [--grid]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TypeAlias

import torch
from diffusers import DiffusionPipeline
from PIL import Image

from dit_graphs.app import demo_model
from dit_graphs.app.demo_model.training.concepts import load_concepts
from dit_graphs.app.demo_model.training.evaluate import GRID_PROMPTS
from dit_graphs.app.demo_model.training.models import CALL_DEFAULTS

Event: TypeAlias = dict[str, str | float]

LOG = Path(__file__).parent / "log.jsonl"
FOLDER = demo_model.path().parent
NAMED = (
    Path(__file__).parent / "named.tsv"
)  # of the grid as it is: ask again when it is drawn again
TARGET_PSNR, TARGET_TOP1, TARGET_NAMED = 31.0, 0.98, 20
GRID_SEED = 7

CARD = """\
# The bundled text-to-image model

<!-- Written by `python -m dit_graphs.app.demo_model.training.card`; edit the script, not this. -->

A stock `ZImagePipeline` of {megabytes:.1f} MB that draws small 3D icons at 128 × 128. It is here
so that every demo, test and benchmark has a real, trained pipeline to run on without a hub or a
GPU. It is no general image model: it knows {concepts} things and a handful of places.

**{state}**

![Twenty-four prompts at 8 steps](grid.png)

Seed {seed}, {steps} steps, guidance {guidance}, drawn by the stock pipeline on a CPU, shown at
twice its size; prompts, row by row: {prompts}.

```python
from diffusers import DiffusionPipeline
from dit_graphs.app import demo_model

pipe = DiffusionPipeline.from_pretrained(demo_model.path())
picture = pipe(
    "a red heart", height=128, width=128, num_inference_steps=8,
    guidance_scale=2.0, max_sequence_length=64,
).images[0]
```

The pipeline's own defaults (1024 × 1024, 512 tokens) do not fit; `weights/dit_graphs.json` holds
those that do.

## What it is made of

| Part | Class | Parameters |
|---|---|---:|
| transformer | `ZImageTransformer2DModel` | {transformer:,} |
| text encoder, also expands prompts | `Qwen3ForCausalLM` | {text:,} |
| autoencoder | `AutoencoderKL`, 8×, 16 channels | {vae:,} |

Weights are stored as fp16. Scheduler: `FlowMatchEulerDiscreteScheduler`, shift 2. Tokenizer:
byte-level BPE.

## Data and licences

Pictures are composed during training from sprites of Fluent Emoji (Microsoft, MIT, npm package
`@lobehub/fluent-emoji-3d`), named by `emojibase-data` (Miles Johnson, MIT): one to four sprites
over a plain colour or a drawn scene. Captions come from the same specification as the picture, so
they are exact. Both licences are in [NOTICE](NOTICE). No photographs, no people by name, no text
from the web.

## How it was trained

{device}, torch {torch}. Transformer and text encoder were trained together on {pool:,} composed
pictures, by flow matching plus 0.1 × the language loss of "short prompt → long caption".

| Process | What | Steps | Result |
|---:|---|---:|---|
{processes}

The weights here are those of the autoencoder at the end of the first process and the moving average
of the rest at the end of the last, which went on where the one before it stopped. Their whole log
is [training/log.jsonl](training/log.jsonl).

## What was measured

Autoencoder: {psnr:.1f} dB PSNR, mean over composed pictures that were not trained on
({psnr_verdict} the target of {target_psnr:.0f} dB).

Retrieval: is the picture of "a NAME" nearer to that thing's own sprite than to every other one of
the {evaluated} (pixels averaged 8 × 8, guidance 2)? Chance is {chance:.1%}.

| Steps | Top-1 | Top-5 |
|---:|---:|---:|
{retrieval}

The best top-1 {top1_verdict} the target of {target_top1:.0%}.

Two things at once ("A and B on a white
background", {num_pairs:.0f} pairs, 8 steps): one half is right in {pair_each:.1%}, both in
{pair_both:.1%}.

The score asks for the right colours in the right places, which is less than what a person asks
for. So the sheet above was shown, without its prompts, to a vision-language model, which named
{named} of {shown} pictures rightly (target: {target_named}). Not recognised: {unnamed}. All answers
are in [training/named.tsv](training/named.tsv).
"""


def read(file: Path) -> list[list[Event]]:
    """Returns the events of a log, one list per process."""
    processes: list[list[Event]] = []
    for line in file.read_text().splitlines():
        event: Event = json.loads(line)
        if event["phase"] == "start":
            processes.append([])
        processes[-1].append(event)
    return processes


def last(processes: list[list[Event]], phase: str, key: str) -> Event:
    """Returns the newest event of a phase that holds `key`; raises LookupError where none does."""
    for events in reversed(processes):
        for event in reversed(events):
            if event["phase"] == phase and key in event:
                return event
    raise LookupError(f"the log has no {phase!r} event with {key!r}")


def _process_row(index: int, events: list[Event]) -> str:
    """Returns one row of the table of processes: what was trained, how far, with what result."""
    trained = [e for e in events if "step" in e and e["phase"] in ("vae", "flow")]
    phase = trained[-1]["phase"]
    what = "autoencoder" if phase == "vae" else "transformer and text encoder"
    key = "train_psnr" if phase == "vae" else "flow"
    values = [float(e[key]) for e in trained if key in e]
    unit = "training PSNR, dB" if phase == "vae" else "flow loss"
    result = f"{unit}: {values[0]:.3g} → {values[-1]:.3g}"
    steps = f"{trained[-1]['step']:,}"
    if any(e.get("event") == "rewound" for e in events):
        result += ", rewound on the way"
    if any(e.get("event") == "failed" for e in events):
        result += ", then failed"
    elif "batch" in trained[-1]:
        steps += f" × {trained[-1]['batch']}"
    return f"| {index} | {what} | {steps} | {result} |"


def _retrieval_rows(processes: list[list[Event]]) -> tuple[str, float]:
    """Returns the rows of the last process and its best top-1."""
    scores = {int(e["steps"]): e for e in processes[-1] if "top1" in e}
    if not scores:
        raise LookupError("the last process measured no retrieval")
    rows = [f"| {n} | {e['top1']:.3f} | {e['top5']:.3f} |" for n, e in sorted(scores.items())]
    return "\n".join(rows), max(float(e["top1"]) for e in scores.values())


def _state(has_psnr: bool, has_top1: bool) -> str:
    """Returns the card's first judgement."""
    met = "meets" if has_psnr else "misses"
    also = "meets" if has_top1 else "misses"
    return (
        f"It {met} its target for the autoencoder and {also} the one for retrieval (below). Edges "
        "and small features stay soft."
    )


def _unnamed() -> list[str]:
    """Returns the prompts nobody could guess; raises ValueError where the grid has others."""
    lines = [line.split("\t") for line in NAMED.read_text().splitlines()[1:]]
    if tuple(prompt for prompt, _, _ in lines) != tuple(GRID_PROMPTS):
        raise ValueError(f"{NAMED.name} answers for other prompts than those of the grid")
    return [prompt for prompt, _, right in lines if right != "yes"]


def render(file: Path = LOG) -> str:
    """Returns the card of a log."""
    processes = read(file)
    start, sizes = processes[-1][0], last(processes, "flow", "transformer")
    psnr = float(last(processes, "vae", "psnr")["psnr"])
    retrieval, top1 = _retrieval_rows(processes)
    pairs = last(processes, "evaluate", "pair_both")
    evaluated = int(last(processes, "evaluate", "concepts")["concepts"])
    verdict = {True: "meets", False: "misses"}
    weights = [f for f in demo_model.path().rglob("*") if f.is_file()]
    return CARD.format(
        megabytes=sum(f.stat().st_size for f in weights) / 1e6,
        concepts=len(load_concepts()),
        state=_state(psnr >= TARGET_PSNR, top1 >= TARGET_TOP1),
        seed=GRID_SEED,
        steps=CALL_DEFAULTS["num_inference_steps"],
        guidance=CALL_DEFAULTS["guidance_scale"],
        prompts=", ".join(GRID_PROMPTS),
        transformer=sizes["transformer"],
        text=sizes["text"],
        vae=last(processes, "vae", "parameters")["parameters"],
        device=start["device"],
        torch=start["torch"],
        pool=start["pool"],
        processes="\n".join(_process_row(i, e) for i, e in enumerate(processes, 1)),
        psnr=psnr,
        psnr_verdict=verdict[psnr >= TARGET_PSNR],
        target_psnr=TARGET_PSNR,
        evaluated=evaluated,
        chance=1 / evaluated,
        retrieval=retrieval,
        top1_verdict=verdict[top1 >= TARGET_TOP1],
        target_top1=TARGET_TOP1,
        num_pairs=pairs["pairs"],
        pair_each=pairs["pair_each"],
        pair_both=pairs["pair_both"],
        named=len(GRID_PROMPTS) - len(_unnamed()),
        shown=len(GRID_PROMPTS),
        target_named=TARGET_NAMED,
        unnamed=", ".join(_unnamed()),
    )


def draw_grid(file: Path, columns: int = 6, zoom: int = 2) -> None:
    """Writes GRID_PROMPTS as the shipped stock pipeline draws them on a CPU."""
    pipe = DiffusionPipeline.from_pretrained(demo_model.path())
    pipe.set_progress_bar_config(disable=True)
    side = 128 * zoom
    sheet = Image.new("RGB", (columns * side, -(-len(GRID_PROMPTS) // columns) * side))
    for index, prompt in enumerate(GRID_PROMPTS):
        generator = torch.Generator().manual_seed(GRID_SEED)
        picture = pipe(prompt, generator=generator, **CALL_DEFAULTS).images[0]
        at = (index % columns * side, index // columns * side)
        sheet.paste(picture.resize((side, side), Image.Resampling.NEAREST), at)
        print(prompt, flush=True)
    sheet.save(file, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--grid", action="store_true", help="also draw grid.png (minutes)")
    args = parser.parse_args()
    (FOLDER / "README.md").write_text(render(args.log))
    if args.grid:
        draw_grid(FOLDER / "grid.png")


if __name__ == "__main__":
    main()
