"""Starting the demo says nothing about other libraries' plans."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_loading_the_page_prints_no_warning() -> None:
    pytest.importorskip("gradio")
    code = "from dit_graphs.app.demo import Studio, launch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert done.stderr == ""
