"""The bundled text-to-image model: a small trained `ZImagePipeline` folder.

Owns where its weights lie. Knows nothing of how they are run. Surprise: the stock pipeline's own
defaults (1024 x 1024) do not fit this model; `dit_graphs.json` in the folder holds those that do.
"""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """Returns the folder that `DiffusionPipeline.from_pretrained` loads."""
    return Path(__file__).parent / "weights"
