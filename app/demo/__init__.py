"""The Gradio demo: make pictures and see what the graphs do.

Owns the way from a loaded model to a running page. Must never be imported by the command line
before `demo` runs: Gradio is an extra. The surprising fact: the page is built around a `Studio`
whose model was accelerated already, so tests start the same page with a model of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .page import build, launch
    from .studio import Studio

__all__ = ["Studio", "build", "launch"]

_MODULES = {"build": "page", "launch": "page", "Studio": "studio"}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        import warnings
        from importlib import import_module

        with warnings.catch_warnings():
            # torchvision, which transformers loads here, scripts functions, which torch deprecates:
            # nothing that whoever starts a demo could change.
            warnings.filterwarnings(
                "ignore", message=r"`torch\.jit\.\w+` is deprecated", category=FutureWarning
            )
            return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
