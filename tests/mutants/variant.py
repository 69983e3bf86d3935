"""What a broken variant of the package is: one mistake, and the tests that must notice it.

Owns the list. The surprising fact: most variants leave every single call plausible, and only
changed inputs and poisoned outputs show them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

__all__ = ["CONTRACT", "FOOTGUNS", "PIPELINES", "VARIANTS", "Variant", "variant"]

Patch = Callable[[pytest.MonkeyPatch], None]
CONTRACT, FOOTGUNS, PIPELINES = "tests/contract", "tests/footguns", "tests/pipelines"


@dataclass(frozen=True, slots=True)
class Variant:
    """How to make the mistake, and the tests of which at least one must fail under it."""

    apply: Patch
    noticed_by: tuple[str, ...]


VARIANTS: dict[str, Variant] = {}


def variant(name: str, *noticed_by: str) -> Callable[[Patch], Patch]:
    """Puts the decorated patch on the list under `name`."""

    def keep(apply: Patch) -> Patch:
        VARIANTS[name] = Variant(apply, noticed_by)
        return apply

    return keep
