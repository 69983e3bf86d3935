"""Owns `dit-graphs doctor`: whether graphs work on this machine, found by making some.

Must never conclude from a version number. The surprising fact: a check draws new inputs for every
replay and compares with the plain module bit for bit, so a graph that does nothing is a failure.
"""

from __future__ import annotations

import inspect
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING

from .codes import FAILED
from .flags import Flag, Given

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["ARGUMENTS", "flags", "run"]

ARGUMENTS: list[inspect.Parameter] = []
_LIBRARIES = ("dit-graphs", "torch", "diffusers", "transformers", "accelerate")
_EXTRAS = ("peft", "gradio", "imageio-ffmpeg", "matplotlib", "prometheus-client", "fastapi")
_ROUNDS = 4


def flags() -> list[Flag]:
    """The flags of this command."""
    return []


def run(given: Given) -> int:
    """Capture, replay and compare a small module with every backend this machine can run.

    Exit code 1 where a backend that should work does not.
    """
    import torch

    for line in _machine():
        print(line)
    has_cuda = torch.cuda.is_available()
    if not has_cuda:
        print("capture unsupported: torch sees no CUDA device; the CPU recorder is checked instead")
    device = torch.device("cuda" if has_cuda else "cpu")
    backends = ("full", "breakable", "debug") if has_cuda else ("recorded",)
    results = {backend: _check(device, backend, _attention()) for backend in backends}
    results["rng"] = _check(device, backends[0], _noise())
    print(", ".join(f"{name} {problem or 'ok'}" for name, problem in results.items()))
    return FAILED if any(results.values()) else 0


def _machine() -> Iterator[str]:
    import torch

    versions = [f"{name} {version}" for name, version in _versions(_LIBRARIES)]
    yield f"python {platform.python_version()}, {', '.join(versions)}"
    extras = [f"{name} {version}" for name, version in _versions(_EXTRAS)]
    yield f"extras: {', '.join(extras) or 'none'}"
    yield f"torch was built {_built_for()}"
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(index)
        gib = gpu.total_memory / (1 << 30)
        yield f"gpu {index}: {gpu.name}, sm_{gpu.major}{gpu.minor}, {gib:.1f} GiB"
    for name in ("DIT_GRAPHS", "DIT_GRAPHS_BACKEND", "PYTORCH_CUDA_ALLOC_CONF"):
        if name in os.environ:
            yield f"{name}={os.environ[name]}"


def _built_for() -> str:
    import torch

    cuda = torch.version.cuda
    return f"for CUDA {cuda}" if cuda else "without CUDA"


def _versions(names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name in names:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _attention() -> nn.Module:
    """A block with two products and an attention between them."""
    from torch import Tensor, nn
    from torch.nn.functional import scaled_dot_product_attention

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 192)
            self.outer = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.inner(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            mixed = scaled_dot_product_attention(q, k, v)
            result: Tensor = self.outer(mixed.transpose(1, 2).flatten(2))
            return result

    return Attention()


def _noise() -> nn.Module:
    """A block that draws random numbers in its forward."""
    import torch
    from torch import Tensor, nn

    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.inner(x) + torch.rand_like(x)
            return result

    return Noise()


def _check(device: torch.device, backend: str, module: nn.Module) -> str | None:
    """None where graphs of `module` replay with the plain module's bits, else what went wrong."""
    import torch

    import dit_graphs
    from dit_graphs import GraphConfig

    module = module.to(device).eval()
    inputs = [torch.randn(2, 32, 64, device=device) for _ in range(_ROUNDS)]
    try:
        with torch.no_grad():
            plain = [_seeded(module, x, seed) for seed, x in enumerate(inputs)]
            attention = "eager" if backend == "breakable" else "auto"
            config = GraphConfig(capture="first_use").with_overrides(
                backend=backend, attention=attention
            )
            dit_graphs.wrap(module, config)
            ours = [_seeded(module, x, seed) for seed, x in enumerate(inputs)]
            ours += [_seeded(module, inputs[0], 0)]
        component = _only(dit_graphs.stats(module))
    except Exception as error:
        return f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    finally:
        dit_graphs.unwrap(module)
    if not all(torch.equal(a, b) for a, b in zip([*plain, plain[0]], ours, strict=True)):
        return "failed: a replay differs from the plain module"
    if not component["replays"]:
        return f"failed: nothing replayed ({component['fallbacks']})"
    return None


def _seeded(module: nn.Module, x: torch.Tensor, seed: int) -> torch.Tensor:
    import torch

    torch.manual_seed(seed)
    result: torch.Tensor = module(x)
    return result.clone()


def _only(stats: object) -> dict[str, object]:
    """The numbers of the one wrapped module."""
    assert isinstance(stats, dict)
    (component,) = stats["components"].values()
    assert isinstance(component, dict)
    return component
