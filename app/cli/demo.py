"""Owns `dit-graphs demo`: the web interface on one loaded model.

Must never import Gradio before the command runs: it is an extra. The surprising fact: the demo has
no model flags of its own; what it shows is what `generate` with the same flags would draw.
"""

from __future__ import annotations

import importlib.util
import inspect
import time

from dit_graphs.pipelines.generate import InputError

from .flags import Flag, Given, graph_flags, model_flags

__all__ = ["ARGUMENTS", "flags", "run"]

ARGUMENTS: list[inspect.Parameter] = []
MAX_PORT = 65_535
_SERVER = [
    Flag("host", "host", str | None, "address to listen on (default: 127.0.0.1)", "Server"),
    Flag("port", "port", int | None, "port to listen on (default: the first free one)", "Server"),
    Flag("open_browser", "open_browser", bool | None, "open the page in a browser", "Server"),
    Flag("output", "output", str | None, "folder pictures are kept in", "Server", "DIR"),
    Flag(
        "lora_dir",
        "lora_dir",
        str | None,
        "folder whose .safetensors a page may use as LoRA by name (default: only those of --lora)",
        "Server",
        "DIR",
    ),
]


def flags() -> list[Flag]:
    """The flags of this command."""
    return [*_SERVER, *model_flags(), *graph_flags()]


def run(given: Given) -> int:
    """Serve a page that draws and shows what the graphs do (extra app)."""
    since = time.perf_counter()
    given.check()
    if importlib.util.find_spec("gradio") is None:
        raise InputError("demo", "the package gradio is missing: pip install 'dit-graphs[app]'")
    port = given.value("port")
    if isinstance(port, int) and not 1 <= port <= MAX_PORT:
        raise InputError("port", f"expected a whole number from 1 to {MAX_PORT}, got {port}")
    from dit_graphs.pipelines.generate import check_output

    from .session import open_session

    output = given.folder("output")
    if output is not None:
        check_output(output)
    lora_dir = given.folder("lora_dir")
    if lora_dir is not None and not lora_dir.is_dir():
        raise InputError("lora_dir", f"expected a folder, got {str(lora_dir)!r}")
    session = open_session(given, (), since=since)
    from dit_graphs.app.demo import Studio, launch

    session.loaded.pipe.set_progress_bar_config(disable=True)
    studio = Studio(
        session.loaded, session.graphs, name=session.name, output=output, lora_dir=lora_dir
    )
    try:
        launch(
            studio,
            host=str(given.value("host") or "127.0.0.1"),
            port=port if isinstance(port, int) else None,
            opens_browser=bool(given.value("open_browser")),
        )
    except OSError as error:
        raise InputError("port", str(error)) from error
    return 0
