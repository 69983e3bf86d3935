"""The things the bundled model can draw.

Owns `concepts.tsv`: one line per picture with its name, plural, article, group and other names.
Knows nothing of pixels or captions. Surprise: an empty article marks names that take none
("sunglasses", "bread").
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("concepts.tsv")


@dataclass(frozen=True, slots=True)
class Concept:
    """One picture of the sprite sheet; its position in the table is its number everywhere."""

    file: str
    name: str
    plural: str
    article: str
    group: str
    other_names: tuple[str, ...]


def load_concepts(table: Path = TABLE) -> tuple[Concept, ...]:
    """Returns every concept in sprite-sheet order."""
    concepts = []
    for line in table.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        file, name, plural, article, group, *rest = line.split("\t")
        other = tuple(word for word in (rest[0] if rest else "").split(",") if word)
        concepts.append(Concept(file, name, plural, article, group, other))
    return tuple(concepts)
