"""A served page around a tiny model, and a stranger who sends it what no browser would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from demo_studio import make_studio

import dit_graphs
from dit_graphs.app.demo.studio import Studio

if TYPE_CHECKING:
    from demo_http import Stranger


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Studio]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(tmp_path_factory.mktemp("uploads")))
        studio = make_studio()
        yield studio
        studio.close()
        dit_graphs.restore(studio.pipe)


@pytest.fixture(scope="module")
def address(studio: Studio) -> str:
    pytest.importorskip("gradio")
    from dit_graphs.app.demo import launch

    return launch(studio, is_blocking=False)


@pytest.fixture
def stranger(address: str) -> Stranger:
    from demo_http import Stranger

    return Stranger(address)
