"""The backends a contract test runs on: those of this machine, the CUDA ones under marker `gpu`.

Owns the fixtures `where` (every backend), `breaking` (those that allow eager breaks), `graphing`
(those that record, so that a replay runs no Python of the model), `segmenting` (both of these) and
`pooled` (those with a memory pool of their own).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from twin import Where

_CPU, _CUDA = torch.device("cpu"), torch.device("cuda", 0)


def _params(*names: str) -> list[object]:
    known = {
        "recorded": pytest.param(Where("recorded", _CPU), id="recorded"),
        "debug": pytest.param(Where("debug", _CPU), id="debug"),
        "full": pytest.param(Where("full", _CUDA), id="full", marks=pytest.mark.gpu),
        "breakable": pytest.param(Where("breakable", _CUDA), id="breakable", marks=pytest.mark.gpu),
        "debug-cuda": pytest.param(Where("debug", _CUDA), id="debug-cuda", marks=pytest.mark.gpu),
    }
    return [known[name] for name in names]


def _no_grad(request: pytest.FixtureRequest) -> Iterator[Where]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield request.param


where = pytest.fixture(params=_params("recorded", "debug", "full", "breakable", "debug-cuda"))(
    _no_grad
)
breaking = pytest.fixture(params=_params("recorded", "debug", "breakable", "debug-cuda"))(_no_grad)
graphing = pytest.fixture(params=_params("recorded", "full", "breakable"))(_no_grad)
pooled = pytest.fixture(params=_params("full", "breakable"))(_no_grad)
segmenting = pytest.fixture(params=_params("recorded", "breakable"))(_no_grad)
