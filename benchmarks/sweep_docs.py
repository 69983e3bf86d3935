"""docs/models.md, written from the sweep's results: python -m benchmarks.sweep --write-docs

Owns the page's words and the target it is measured against (P11: at least 90 % of the denoiser
classes with 80 % of their kernel launches captured, every output equal, no exception). Knows
nothing of models. The surprising fact: a class that has no result is on the page too, as "not
measured" or with the reason it cannot be built; a page of successes alone would prove nothing.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import cast

from benchmarks import results
from dit_graphs.pipelines.families import FAMILIES

__all__ = ["CPU", "GPU", "PAGE", "Column", "page", "rank", "write"]

Tree = dict[str, object]
PAGE = results.ROOT / "docs" / "models.md"
CPU, GPU = "sweep-cpu.json", "sweep-h200.json"
ENOUGH = 0.80
KINDS = (
    ("dit", "Diffusion transformers"),
    ("unet", "UNets"),
    ("controlnet", "ControlNets"),
    ("vae", "Autoencoders and vocoders, per method"),
)
_RANKS = ("failed", "eager", "breakable", "full")

HEAD = """\
# Models

<!-- Written by `python -m benchmarks.sweep --write-docs`; do not edit. -->

Every transformer, UNet, ControlNet and autoencoder class of diffusers {version} that can be built
from a tiny configuration without a network, as one small model with random weights. Each is called
in two sizes and with sequential and batched guidance, and every call is compared with an unwrapped
model bit for bit, on inputs that differ from call to call. What this page says is how the *Python*
of a class gets along with graphs; it says nothing of speed (see the README) or of pictures.

- **full**: one graph per signature.
- **breakable**: graph segments with parts between them that run eagerly on every call. "Captured"
  is the share of the forward's kernel launches that lies in graphs.
- **eager**: no graph, with a named reason; the result is the plain model's.

The CPU column comes from the recorder (`backend="recorded"`): it replays recorded calls without any
CUDA graph and shows what can be captured, not that CUDA captures it.
"""


FAMILY_HEAD = """\
## Families

What the classes below are told beyond what is found out of any module (`pipelines/families`). Each
keeps eager's bits. A fact of an argument joins the key, so there is one graph per fact.
"""


LENGTHS = """\
## Prompt lengths

- Z-Image: one graph for all prompts within one multiple of 32 tokens, which the model pads to by
  itself. Eager's bits.
- Qwen-Image, CogView4, Kandinsky 5 and others whose prompts are not padded: one graph per length,
  eager's bits. A length is captured where that pays, and `max_graphs` are kept.
- `prompt_buckets=(64, 128, 256)` pads the prompts of Qwen-Image and Nucleus to that ladder, behind
  the mask that both take: fewer graphs, other bits. The first call of each bucket is made exact as
  well; the difference is logged, and `stats()` keeps it under `padding`. It is refused for Z-Image,
  where padded tokens mean something, and has no effect where a class takes no mask (Kandinsky 5) or
  adds it to the scores instead of hiding anything (CogView4).
"""


@dataclass(frozen=True, slots=True)
class Column:
    """One result file: its rows by key, in their order, and what they were measured with."""

    rows: dict[str, Tree]
    machine: str
    diffusers: str = ""  # the version

    @classmethod
    def read(cls, name: str) -> Column:
        """The file under benchmarks/results; without rows where there is none."""
        path = results.FOLDER / name
        runs = json.loads(path.read_text())["runs"] if path.exists() else []
        machines: dict[str, list[str]] = {}
        for run in runs:
            found = run["machine"]
            place = f"{found.get('gpu', 'CPU')}, torch {found['versions']['torch']}"
            number = len(run["rows"])
            rows = f" ({number} row{'s' * (number > 1)})" if len(runs) > 1 else ""
            machines.setdefault(place, []).append(f"{run['commit'][:12]}{rows}")
        machine = "; ".join(f"{place}, commit {', '.join(c)}" for place, c in machines.items())
        rows_by_key = {row["key"]: row for run in runs for row in run["rows"]}
        used = runs[-1]["machine"]["versions"].get("diffusers", "") if runs else ""
        return cls(rows_by_key, machine, used)


def rank(row: Tree) -> tuple[int, float]:
    """How good an outcome is; a later one must not be smaller."""
    fraction = row.get("captured_fraction", 0.0)
    assert isinstance(fraction, float | int)
    return _RANKS.index(str(row["outcome"])), float(fraction)


def page(cpu: Column, gpu: Column, skipped: list[tuple[str, str]], version: str) -> str:
    """The text of docs/models.md. `skipped`: (class, why it cannot be run)."""
    parts = [HEAD.format(version=version)]
    parts.append("\n".join(["## Summary\n", *_summary(cpu, gpu)]))
    for kind, title in KINDS:
        parts.append("\n".join([f"## {title}\n", *_table(kind, cpu, gpu)]))
    parts.append("\n".join(["## Why not one graph\n", *_reasons(cpu, gpu)]))
    parts.append("\n".join([FAMILY_HEAD, *_families()]))
    parts.append(LENGTHS)
    parts.append("\n".join(["## Not run\n", *(f"- `{name}`: {why}." for name, why in skipped)]))
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _summary(cpu: Column, gpu: Column) -> Iterator[str]:
    yield "| | CPU recorder | GPU |"
    yield "|---|---|---|"
    for kinds, title in (
        (("dit", "unet"), "denoiser classes and variants"),
        (("controlnet",), "ControlNets"),
        (("vae",), "autoencoder methods"),
    ):
        cells = [_share(column, kinds) for column in (cpu, gpu)]
        yield f"| {title} with at least 80 % captured | {' | '.join(cells)} |"
    yield f"| full, breakable, eager, failed | {_counts(cpu)} | {_counts(gpu)} |"
    yield f"| bit-equal | {_equal(cpu)} | {_equal(gpu)} |"
    yield f"| measured on | {cpu.machine or 'not measured'} | {gpu.machine or 'not measured'} |"
    yield f"| raw results | {_link(CPU, cpu)} | {_link(GPU, gpu)} |"


def _link(name: str, column: Column) -> str:
    return f"[{name}](../benchmarks/results/{name})" if column.rows else "none"


def _share(column: Column, kinds: tuple[str, ...]) -> str:
    rows = [row for row in column.rows.values() if row.get("kind") in kinds]
    good = [row for row in rows if cast(float, row.get("captured_fraction", 0.0)) >= ENOUGH]
    return f"{len(good)} of {len(rows)} ({len(good) / len(rows):.0%})" if rows else "not measured"


def _equal(column: Column) -> str:
    rows = list(column.rows.values())
    return (
        f"{sum(bool(row['is_equal']) for row in rows)} of {len(rows)}" if rows else "not measured"
    )


def _counts(column: Column) -> str:
    found = Counter(str(row["outcome"]) for row in column.rows.values())
    return ", ".join(str(found[name]) for name in reversed(_RANKS)) if found else "not measured"


def _table(kind: str, cpu: Column, gpu: Column) -> Iterator[str]:
    yield f"<!-- results: {' '.join(name for name, c in ((CPU, cpu), (GPU, gpu)) if c.rows)} -->"
    yield "| class | CPU recorder | equal | GPU | equal |"
    yield "|---|---|---|---|---|"
    for key, row in {**gpu.rows, **cpu.rows}.items():
        if row.get("kind") == kind:
            cells = [cell for column in (cpu, gpu) for cell in _cells(column.rows.get(key))]
            yield f"| `{key}` | {' | '.join(cells)} |"


def _cells(row: Tree | None) -> tuple[str, str]:
    if row is None:
        return "not measured", "–"
    equal = "yes" if row["is_equal"] else "**no**"
    if row["outcome"] == "breakable":
        breaks, fraction = row["breaks"], cast(float, row["captured_fraction"])
        return f"breakable: breaks {breaks}, captured {fraction:.0%}", equal
    if row["outcome"] == "eager":
        return f"eager ({row['reason']})", equal
    return str(row["outcome"]), equal


def _reasons(cpu: Column, gpu: Column) -> Iterator[str]:
    """One line per class and column that is not full, where columns differ; one for both else."""
    for key in {**cpu.rows, **gpu.rows}:
        said: dict[str, list[str]] = {}
        for name, column in (("CPU", cpu), ("GPU", gpu)):
            text = _reason(column.rows.get(key))
            if text:
                said.setdefault(text, []).append(name)
        for text, names in said.items():
            yield f"- `{key}` ({', '.join(names)}): {text}"


def _reason(row: Tree | None) -> str:
    if row is None or row["outcome"] == "full":
        return ""
    if row["outcome"] == "breakable":
        where, why = cast(list[str], row["where"]), cast(list[str], row["why"])
        return f"breaks at {_few(where)}" + (f", because of {_few(why)}" if why else "")
    if row["outcome"] == "eager":
        detail = str(row["detail"]).split(".Hint")[0].rstrip(".")
        return f"{row['reason']}: {detail}" if detail else str(row["reason"])
    return "; ".join(cast(list[str], row["problems"]))


def _families() -> Iterator[str]:
    for name, (home, kind) in sorted(FAMILIES.items()):
        made = getattr(import_module(f"dit_graphs.pipelines.families.{home}"), kind)
        told = " ".join(str(inspect.getdoc(made)).split())
        facts = ", ".join(f"`{argument}`" for argument in made.known)
        yield f"- `{name}`: {told}" + (f" Facts of {facts}." if facts else "")


def _few(items: list[str], limit: int = 2) -> str:
    shown = ", ".join(f"`{item}`" for item in items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"


def write(path: Path = PAGE) -> Path:
    """Writes the page from the files that exist and returns its path."""
    path.write_text(current())
    return path


def current() -> str:
    """The page as the result files now have it."""
    from benchmarks.sweep import SKIPPED

    skipped = [(one.name, one.why) for one in SKIPPED]
    cpu = Column.read(CPU)
    return page(cpu, Column.read(GPU), skipped, cpu.diffusers)
