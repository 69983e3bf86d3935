"""One small forward of every denoiser class of diffusers: from graphs, or eager with a reason.

The inputs change on every call, and what is eager is listed here with its reason: a class that
loses its graph fails this file, and so does one that gains it unnoticed.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator

import cases
import pytest
import torch
from twin import Twin, Where

CPU = Where("recorded", torch.device("cpu"))

# Reads of device values in the root forward, one op the watch modes cannot enter, and one class
# that rebinds a registered buffer on every call.
EAGER = {
    "AnyFlowFARTransformer3DModel": "capture_failed",
    "GlmImageTransformer2DModel": "host_read",
    "HiDreamImageTransformer2DModel": "host_read",
    "HunyuanVideo15Transformer3DModel": "host_read",
    "HunyuanVideoFramepackTransformer3DModel": "host_read",
    "OmniGenTransformer2DModel": "offload",
}
# Reads inside a submodule, which then runs between two segments.
BREAKABLE = {"Lumina2Transformer2DModel", "MochiTransformer3DModel"}

_ATTENTION_SAMPLE = (
    "FluxTransformer2DModel",
    "Lumina2Transformer2DModel",
    "SD3Transformer2DModel",
    "WanTransformer3DModel",
    "ZImageTransformer2DModel",
)

_report: dict[str, str] = {}


@pytest.fixture(autouse=True, scope="module")
def _reported() -> Iterator[None]:
    """After the last case, one line says what ran how."""
    yield
    kinds = Counter(text.split(" ")[0] for text in _report.values())
    print(f"\nmodel cases: {dict(kinds)} of {len(_report)}")
    for name, text in _report.items():
        if not text.startswith("full"):
            print(f"  {name}: {text}")


def _serve(name: str, calls: int, **config: object) -> Twin:
    """The forward on two sets of inputs in turns; every call is compared with the plain one."""
    case = cases.build(name)
    with torch.no_grad():
        twin = Twin(case.module, CPU, **config)
        for index in range(calls):
            twin(**copy.deepcopy(case.changed if index % 2 else case.inputs))
    return twin


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", cases.names())
def test_a_denoiser_class_replays_or_says_why_not(name: str) -> None:
    twin = _serve(name, 6)
    if name in EAGER:
        assert (twin.graphs, twin.replays) == (0, 0)
        assert EAGER[name] in twin.fallbacks, twin.details
        _report[name] = f"eager ({EAGER[name]}: {twin.details[EAGER[name]]})"
        return
    graph = twin.runner.report()["graphs"][0]
    breaks = graph["breaks"]
    assert set(twin.fallbacks) == {"warming_up"}
    assert (breaks > 0) == (name in BREAKABLE)
    # plain, observed and compared; a read in a submodule costs one more observed pass
    assert twin.replays == (2 if breaks else 3)
    assert breaks or graph["captured_fraction"] == 1.0
    _report[name] = f"breakable ({breaks} breaks)" if breaks else "full"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in _ATTENTION_SAMPLE else [pytest.mark.slow])
        for name in cases.names()
        if name not in EAGER
    ],
)
def test_a_denoiser_class_with_eager_attention(name: str) -> None:
    twin = _serve(name, 7, attention="eager")
    assert set(twin.fallbacks) == {"warming_up"}
    graph = twin.runner.report()["graphs"][0]
    assert graph["breaks"] >= 1
    assert graph["segments"] == graph["breaks"] + 1 or name in BREAKABLE
    assert twin.replays >= 3


def test_the_lists_name_known_classes() -> None:
    assert set(EAGER) | BREAKABLE <= set(cases.names())
