"""Fetches the pictures and packs them as one sprite sheet.

Owns the download (`npm pack`) and `sprites.webp`. Knows nothing of training. Surprise: every sprite
is cropped to its visible part first, so that a size in a caption ("big", "small") means the same
for every concept.

    python -m dit_graphs.app.demo_model.training.fetch_sprites --out DIR
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

from PIL import Image

from dit_graphs.app.demo_model.training.concepts import Concept, load_concepts

PICTURES = "@lobehub/fluent-emoji-3d@1.1.0"
NAMES = "emojibase-data@17.0.0"
SPRITE = 128
CONTENT = 116  # the rest is margin, so that rotation and the blurred shadow are not cut off
COLUMNS = 22


def download(package: str, folder: Path) -> tarfile.TarFile:
    """Fetches one npm package and returns its open archive."""
    done = subprocess.run(
        ["npm", "pack", "--silent", package], cwd=folder, check=True, capture_output=True, text=True
    )
    return tarfile.open(folder / done.stdout.strip().splitlines()[-1])


def read(archive: tarfile.TarFile, name: str) -> bytes:
    """Returns the bytes of one file of the archive."""
    file = archive.extractfile(f"package/{name}")
    if file is None:
        raise FileNotFoundError(name)
    return file.read()


def sprite(data: bytes) -> Image.Image:
    """Returns the picture cropped to its visible part, centred in a SPRITE x SPRITE square."""
    picture = Image.open(io.BytesIO(data)).convert("RGBA")
    picture = picture.crop(picture.getchannel("A").point(lambda a: 255 * (a > 8)).getbbox())
    scale = CONTENT / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    # Pillow resizes RGBA with premultiplied alpha, so no dark fringe appears at the edges.
    picture = picture.resize(size, Image.Resampling.LANCZOS)
    square = Image.new("RGBA", (SPRITE, SPRITE))
    square.paste(picture, ((SPRITE - size[0]) // 2, (SPRITE - size[1]) // 2))
    return square


def pack(pictures: tarfile.TarFile, concepts: tuple[Concept, ...]) -> Image.Image:
    """Returns the sprite sheet: concept i at column i % COLUMNS, row i // COLUMNS."""
    rows = -(-len(concepts) // COLUMNS)
    sheet = Image.new("RGBA", (COLUMNS * SPRITE, rows * SPRITE))
    for index, concept in enumerate(concepts):
        place = (index % COLUMNS * SPRITE, index // COLUMNS * SPRITE)
        sheet.paste(sprite(read(pictures, f"assets/{concept.file}.webp")), place)
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    concepts = load_concepts()
    with tempfile.TemporaryDirectory() as folder:
        names = json.loads(read(download(NAMES, Path(folder)), "en/data.json"))
        known = {entry["hexcode"].lower().replace("-fe0f", "") for entry in names}
        unknown = [c.name for c in concepts if c.file.replace("-fe0f", "") not in known]
        if unknown:
            raise SystemExit(f"not in {NAMES}: {', '.join(unknown)}")
        sheet = pack(download(PICTURES, Path(folder)), concepts)
    sheet.save(out / "sprites.webp", quality=92, alpha_quality=100, method=4)
    print(f"{len(concepts)} concepts, {(out / 'sprites.webp').stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
