"""Owns what is printed while files are made, and what is left to say when somebody stops it.

Must never print a number it did not get from the work itself. The surprising fact: results go to
standard output and progress to standard error, so a script can read the paths.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import typer

from dit_graphs.pipelines.generate import GenerateRequest, Item

from .codes import INTERRUPTED

__all__ = ["announce", "counted", "listing_finished", "warn"]


def warn(text: str) -> None:
    """One line on standard error."""
    print(f"warning: {text}", file=sys.stderr)


def announce(item: Item, request: GenerateRequest, device: torch.device) -> None:
    """Input pictures that were cropped, a line per stage, every file with its size, seed and
    seconds, then the graphs' line."""
    for change in item.resized:
        print(f"picture  {change}, scaled and cropped at the centre")
    for stage, seconds in item.seconds.items():
        steps = f"  {counted(item.num_steps, 'step')}" if stage == "denoise" else ""
        print(f"{stage:<8} {seconds:8.2f} s{steps}")
    for path, medium in zip(item.files, item.media, strict=True):
        size = medium.describe()
        words = f"{size['width']}x{size['height']}" if "width" in size else path.suffix
        if "num_frames" in size:
            words += f", {size['num_frames']} frames"
        print(f"{path}  {words}, seed {item.seed}, {item.total_seconds:.2f} s after loading")
        _compare_size(request, size)
    print(item.graph_use.line(device), flush=True)


def _compare_size(request: GenerateRequest, size: dict[str, int]) -> None:
    """Pipelines round what they are given; the user hears of it and the sidecar has both."""
    actual = {"num_frames": 1, **size} if "width" in size else size
    for name in ("width", "height", "num_frames"):
        asked, used = getattr(request, name), actual.get(name)
        if asked is not None and used is not None and asked != used:
            warn(f"--{name.replace('_', '-')}: asked for {asked}, the pipeline used {used}")


def counted(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@contextmanager
def listing_finished(finished: list[Path]) -> Iterator[None]:
    """An interrupt inside the block names the files that are complete, and exits with 130."""
    try:
        yield
    except KeyboardInterrupt:
        print(file=sys.stderr)
        if finished:
            print(f"interrupted; {len(finished)} finished:", file=sys.stderr)
            for path in finished:
                print(f"  {path}", file=sys.stderr)
        else:
            print("interrupted; no file was finished", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
