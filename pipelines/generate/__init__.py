"""Scripted generation: load a pipeline, ask it for pictures or videos, get files that say how.

    loaded = load_pipeline(ModelSpec(model="path/or/id"))
    items = generate(loaded, "a red heart", seed=7, num_images=4, output="outputs")

Must never know a command line. The surprising fact: names are looked up when first used, so reading
the fields of a request (for a flag's help) loads neither torch nor diffusers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .errors import InputError, listed
from .model import Adapter, ModelSpec
from .request import GenerateRequest, Json

if TYPE_CHECKING:
    from .arguments import accepted_names, check_names, check_reference, guidance_note
    from .batch import BatchReport, Failure, generate_batch, read_lines
    from .inputs import open_images
    from .load import LoadedPipeline, load_pipeline, resolve_class, resolve_device
    from .partners import partner_class, serving_class
    from .record import BUNDLED, changes, read_record, read_source
    from .rehearsal import check_sizes
    from .run import Item, Naming, complete, generate, generate_items
    from .save import check_output
    from .serving import serving
    from .usage import GraphUse

__all__ = [
    "BUNDLED",
    "Adapter",
    "BatchReport",
    "Failure",
    "GenerateRequest",
    "GraphUse",
    "InputError",
    "Item",
    "Json",
    "LoadedPipeline",
    "ModelSpec",
    "Naming",
    "accepted_names",
    "changes",
    "check_names",
    "check_output",
    "check_reference",
    "check_sizes",
    "complete",
    "generate",
    "generate_batch",
    "generate_items",
    "guidance_note",
    "listed",
    "load_pipeline",
    "open_images",
    "partner_class",
    "read_lines",
    "read_record",
    "read_source",
    "resolve_class",
    "resolve_device",
    "serving",
    "serving_class",
]

_MODULES = {
    "arguments": ("accepted_names", "check_names", "check_reference", "guidance_note"),
    "batch": ("BatchReport", "Failure", "generate_batch", "read_lines"),
    "inputs": ("open_images",),
    "load": ("LoadedPipeline", "load_pipeline", "resolve_class", "resolve_device"),
    "partners": ("partner_class", "serving_class"),
    "record": ("BUNDLED", "changes", "read_record", "read_source"),
    "rehearsal": ("check_sizes",),
    "run": ("Item", "Naming", "complete", "generate", "generate_items"),
    "save": ("check_output",),
    "serving": ("serving",),
    "usage": ("GraphUse",),
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
