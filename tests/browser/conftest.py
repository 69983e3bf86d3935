"""A real page in a real Chromium: the demo's server runs here, the browser beside it.

What the tests need (Chromium and its driver, selenium, axe-core) is installed by .ci/browser-deps;
where something is missing the tests are deselected and the header says what. With
DIT_GRAPHS_BROWSER=required that is an error instead: a check that means to run them must not pass
without them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from demo_page import DemoPage
    from selenium.webdriver import Chrome

    from dit_graphs.app.demo.studio import Studio

AXE = Path(__file__).parent / "node_modules" / "axe-core" / "axe.min.js"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def _missing() -> list[str]:
    missing = [] if any(map(shutil.which, BROWSERS)) else ["chromium"]
    missing += [] if shutil.which("chromedriver") else ["chromedriver"]
    missing += [n for n in ("selenium", "gradio") if importlib.util.find_spec(n) is None]
    return missing + ([] if AXE.is_file() else ["axe-core"])


def pytest_report_header() -> list[str]:
    missing = _missing()
    return [f"browser tests: missing {', '.join(missing)}; run .ci/browser-deps"] if missing else []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = _missing()
    if not missing:
        return
    if os.environ.get("DIT_GRAPHS_BROWSER") == "required":
        raise pytest.UsageError(f"browser tests need {', '.join(missing)}: run .ci/browser-deps")
    dropped = [item for item in items if item.get_closest_marker("browser")]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


@pytest.fixture(scope="session")
def studio() -> Iterator[Studio]:
    """The bundled model, accelerated as `dit-graphs demo` does it on this machine's CPU."""
    from demo_page import load_studio

    studio = load_studio()
    yield studio
    studio.close()


@pytest.fixture(scope="session")
def address(studio: Studio) -> str:
    """Where the demo is served."""
    from dit_graphs.app.demo import launch

    return launch(studio, is_blocking=False)


@pytest.fixture(scope="session")
def chrome() -> Iterator[Chrome]:
    """One Chromium without a window, 1440 pixels wide."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--window-size=1440,1100",
        "--hide-scrollbars",
    ):
        options.add_argument(argument)
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture
def open_page(chrome: Chrome) -> Iterator[Callable[[str], DemoPage]]:
    """Opens the demo at an address; left when the test is over."""
    from demo_page import DemoPage

    def opened(address: str) -> DemoPage:
        page = DemoPage(chrome, address, AXE)
        page.open()
        return page

    yield opened
    chrome.get("about:blank")


@pytest.fixture
def page(chrome: Chrome, address: str, studio: Studio) -> Iterator[DemoPage]:
    """A fresh page; its jobs are over when the test is."""
    from demo_page import DemoPage

    page = DemoPage(chrome, address, AXE)
    page.open()
    yield page
    page.close_other_tabs()
    chrome.get("about:blank")
    page.wait(lambda: len(studio.queue) == 0)
