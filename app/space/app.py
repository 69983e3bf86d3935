"""The demo as a Hugging Face Space: this file, `requirements.txt` and `README.md` are the Space.

Owns the settings a Space gives by environment variables. Must never hold a page of its own. The
surprising fact: it is `dit-graphs demo`, on the address the Space expects.
"""

from __future__ import annotations

import os
import sys

from dit_graphs.app.cli import main

PORT = "7860"


def arguments() -> list[str]:
    """The Space's command line; DIT_GRAPHS_SPACE_MODEL names a model other than the bundled one."""
    host = os.environ.get("GRADIO_SERVER_NAME", "0.0.0.0")
    port = os.environ.get("GRADIO_SERVER_PORT", PORT)
    model = os.environ.get("DIT_GRAPHS_SPACE_MODEL")
    chosen = ["--model", model] if model else []
    return ["demo", "--host", host, "--port", port, *chosen]


if __name__ == "__main__":
    sys.exit(main(arguments()))
