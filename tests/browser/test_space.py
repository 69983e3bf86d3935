"""`app/space/app.py` starts the demo as a Hugging Face Space would: a process with its settings."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.browser
SPACE = Path(__file__).resolve().parents[2] / "app" / "space"


@pytest.fixture
def space() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address of a running Space and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"GRADIO_SERVER_NAME": "127.0.0.1", "GRADIO_SERVER_PORT": str(port)}
    other = os.environ.get("DIT_GRAPHS_TEST_MODEL")
    if other:
        settings["DIT_GRAPHS_SPACE_MODEL"] = other
    process = subprocess.Popen(
        [sys.executable, str(SPACE / "app.py")], env={**os.environ, **settings}
    )
    yield f"http://127.0.0.1:{port}/", process
    if process.poll() is None:
        process.kill()
        process.wait()


def test_the_space_serves_the_page_and_ends_when_it_is_told(
    space: tuple[str, subprocess.Popen[bytes]], chrome: Chrome
) -> None:
    from demo_page import DemoPage

    address, process = space
    for _ in range(600):
        assert process.poll() is None, "the Space ended by itself"
        try:
            with urllib.request.urlopen(address) as answer:
                assert answer.status == 200
            break
        except urllib.error.URLError:
            time.sleep(0.2)
    page = DemoPage(chrome, address, Path())
    page.open()
    details = page.generate(prompt="a red heart", seed=7, steps=2, width=64, height=64)
    assert "size\n64×64" in details
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0


def test_its_requirements_name_the_extras_the_page_needs() -> None:
    lines = (SPACE / "requirements.txt").read_text(encoding="utf-8").split()
    assert lines[0].startswith("dit-graphs[app")
    readme = (SPACE / "README.md").read_text(encoding="utf-8")
    assert readme.startswith("---\n")
    assert "sdk: gradio" in readme
    assert "app_file: app.py" in readme
    stated = readme.partition("sdk_version: ")[2].split()[0]
    # the version these tests ran with, up to its patch number
    assert stated.split(".")[:2] == version("gradio").split(".")[:2]
