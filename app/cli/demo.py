"""Owns `dit-graphs demo`: a page in the browser that draws and shows what the graphs do.

Must never import Gradio before it is known to be there. The surprising fact: the page serves one
model, loaded and accelerated exactly as `generate` does it; only its size, prompt and steps change.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import time
from pathlib import Path
from typing import cast

from dit_graphs.pipelines.generate import InputError

from .flags import Flag, Given, graph_flags, model_flags

__all__ = ["ARGUMENTS", "flags", "run"]

ARGUMENTS: list[inspect.Parameter] = []
MISSING = "dit-graphs: the demo needs gradio: pip install 'dit-graphs[app]'"
_MAX_PORT = 65535


def flags() -> list[Flag]:
    """The flags of this command."""
    page = [
        Flag("host", "host", str | None, "address to serve at (default: 127.0.0.1)", "Page"),
        Flag("port", "port", int | None, "port to serve at (default: the first free one)", "Page"),
        Flag("browser", "browser", bool | None, "open the page in a browser", "Page"),
        Flag(
            "output", "output", str | None, "folder that keeps every picture made", "Page", "DIR"
        ),
    ]
    return [*page, *model_flags(), *graph_flags()]


def run(given: Given) -> int:
    """Open a page to make pictures and see what the graphs do.

    Shows every step's call (graph or eager, and why), memory, signatures, and plain eager beside
    graphs. Needs the extra "app".
    """
    if importlib.util.find_spec("gradio") is None:
        print(MISSING, file=sys.stderr)
        return 2
    port, output = cast("int | None", given.value("port")), given.value("output")
    if port is not None and not 1 <= port <= _MAX_PORT:
        raise InputError("port", f"expected a number from 1 to {_MAX_PORT}, got {port}")
    since = time.perf_counter()
    from dit_graphs.pipelines.generate import check_output

    folder = Path(str(output)) if output is not None else None
    if folder is not None:
        check_output(folder)
    from dit_graphs.app.demo import Studio, launch

    from .session import open_session

    session = open_session(given, [], since=since)
    studio = Studio(session.loaded, session.graphs, name=session.name, output=folder)
    host = str(given.value("host") or "127.0.0.1")
    try:
        launch(studio, host=host, port=port, opens_browser=bool(given.value("browser")))
    except OSError as error:
        raise InputError("port", f"cannot serve at {host}: {error}") from error
    return 0
