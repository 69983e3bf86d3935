"""The demo's page as a user handles it: fields by name, buttons by what they say, results as text.

Owns the only selectors of the browser tests. The surprising fact: Gradio's fields live inside
blocks, so a field is the first input or text area of the block with its id.
"""

from __future__ import annotations

import base64
import mimetypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

import dit_graphs
from dit_graphs import GraphConfig
from dit_graphs.app import demo_model
from dit_graphs.app.demo.studio import Studio
from dit_graphs.pipelines.generate import BUNDLED, ModelSpec, load_pipeline

PATIENCE_SECONDS = 60.0


def load_studio() -> Studio:
    """The bundled model (or the one DIT_GRAPHS_TEST_MODEL names), as `dit-graphs demo` loads it."""
    place = os.environ.get("DIT_GRAPHS_TEST_MODEL") or str(demo_model.path())
    return studio_of_model(Path(place), name=BUNDLED)


def studio_of_model(place: Path, *, name: str | None = None) -> Studio:
    """The model in a folder, replayed by the CPU recorder."""
    loaded = load_pipeline(ModelSpec(model=str(place), device="cpu"))
    dit_graphs.accelerate(loaded.pipe, GraphConfig(backend="recorded"))
    return Studio(loaded, GraphConfig(), name=name)


class DemoPage:
    """One tab of the browser that shows the demo."""

    def __init__(self, chrome: Chrome, address: str, axe: Path) -> None:
        self.chrome = chrome
        self.address = address
        self.tab = chrome.current_window_handle
        self._axe = axe

    def open(self, query: str = "") -> None:
        """The page is loaded and its buttons work."""
        self.chrome.get(self.address + query)
        self.wait(lambda: self.find("#dg-run"))
        # Until Gradio is connected, a click would be lost.
        self.wait(lambda: self.script("return document.querySelector('#dg-prompt textarea')"))
        time.sleep(0.5)

    def open_tab(self) -> DemoPage:
        """A second tab with a page of its own; `show` goes back and forth."""
        self.chrome.switch_to.new_window("tab")
        other = DemoPage(self.chrome, self.address, self._axe)
        other.open()
        return other

    def show(self) -> None:
        """This tab is the one in front."""
        self.chrome.switch_to.window(self.tab)

    def close_other_tabs(self) -> None:
        """Only this tab is left."""
        for handle in self.chrome.window_handles:
            if handle != self.tab:
                self.chrome.switch_to.window(handle)
                self.chrome.close()
        self.show()

    def find(self, css: str) -> WebElement | None:
        """The first visible element, or None."""
        for element in self.chrome.find_elements(By.CSS_SELECTOR, css):
            if element.is_displayed():
                return element
        return None

    def script(self, code: str, *arguments: object) -> Any:
        return self.chrome.execute_script(code, *arguments)

    def wait(self, condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> Any:
        """The first truthy value of `condition`; fails with its last value after `seconds`."""
        end, value = time.monotonic() + seconds, None
        while time.monotonic() < end:
            try:
                value = condition()
            except StaleElementReferenceException:
                value = None
            if value:
                return value
            time.sleep(0.02)
        raise AssertionError(f"still {value!r} after {seconds:.0f} s; the page says:\n{self.text}")

    @property
    def text(self) -> str:
        """Everything that can be read on the page."""
        return str(self.script("return document.body.innerText"))

    def fill(self, **fields: object) -> None:
        """Types into fields: `prompt="a cat", steps=4`."""
        for name, value in fields.items():
            field = self.field(name)
            field.send_keys(Keys.CONTROL, "a")
            field.send_keys(Keys.DELETE)
            field.send_keys(str(value))
            # what was typed is in before anything else happens
            self.wait(lambda field=field, value=value: field.get_attribute("value") == str(value))
        self.script("document.activeElement.blur()")

    def field(self, name: str) -> WebElement:
        """The input of the block `dg-<name>`."""
        css = f"#dg-{name} textarea, #dg-{name} input"
        found: WebElement = self.wait(lambda: self.find(css))
        return found

    def value(self, name: str) -> str:
        """What a field holds."""
        return str(self.field(name).get_attribute("value"))

    def press(self, name: str) -> None:
        """Clicks the button `dg-<name>`."""
        button: WebElement = self.wait(lambda: self.find(f"#dg-{name}"))
        button.click()

    def go_to(self, title: str) -> None:
        """Opens the tab of the page that is called `title`."""
        for tab in self.chrome.find_elements(By.CSS_SELECTOR, "[role=tab]"):
            if tab.text.strip() == title and tab.is_displayed():
                tab.click()
                self.wait(lambda tab=tab: tab.get_attribute("aria-selected") == "true")
                return
        raise AssertionError(f"no tab {title!r}")

    def generate(self, **fields: object) -> str:
        """A finished picture's parameters, as the page shows them."""
        self.fill(**fields)
        self.press("run")
        return self.finished()

    def finished(self) -> str:
        """Waits for the run's end and gives the parameters of the picture in front."""
        self.wait(lambda: "Done: " in self.stage)
        self.wait(lambda: self.find("#dg-gallery img"))
        return str(self.wait(lambda: self.find(".dg-details-card")).text)

    @property
    def stage(self) -> str:
        """What the place of the picture says now."""
        element = self.find("#dg-stage")
        return element.text if element is not None else ""

    @property
    def step(self) -> int:
        """The step that is shown while a picture is made; 0 before the first."""
        words = str(self.script("return document.querySelector('#dg-step')?.innerText || ''"))
        return int(words.split()[1]) if words.startswith("step ") else 0

    @property
    def alert(self) -> str:
        """The error that is shown, or nothing."""
        element = self.find("[role=alert]")
        return element.text if element is not None else ""

    def download(self) -> bytes:
        """The bytes that the download button writes into the browser's folder."""
        with TemporaryDirectory() as folder:
            where = {"behavior": "allow", "downloadPath": folder}
            self.chrome.execute_cdp_cmd("Browser.setDownloadBehavior", where)
            self.press("download")

            def finished() -> list[Path]:
                names = [path for path in Path(folder).iterdir() if not path.name.startswith(".")]
                return [path for path in names if path.suffix in (".png", ".mp4")]

            (path,) = self.wait(finished)
            return bytes(path.read_bytes())

    def drop(self, css: str, path: Path) -> None:
        """Drags a file from the desktop onto an element."""
        data = base64.b64encode(path.read_bytes()).decode()
        self.script(
            """
            const [target, name, data, type] = arguments;
            const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
            const transfer = new DataTransfer();
            transfer.items.add(new File([bytes], name, {type}));
            for (const kind of ["dragenter", "dragover", "drop"]) {
              const options = {dataTransfer: transfer, bubbles: true, cancelable: true};
              target.dispatchEvent(new DragEvent(kind, options));
            }
            """,
            self.wait(lambda: self.find(css)),
            path.name,
            data,
            mimetypes.guess_type(path.name)[0] or "",
        )

    def serious_violations(self) -> list[str]:
        """What axe finds on the page as it is, serious or critical: `rule: where`."""
        # A colour half-way between light and dark is nobody's choice.
        self.wait(
            lambda: self.script(
                "return !document.getAnimations().some((one) => one instanceof CSSTransition)"
            )
        )
        self.script(self._axe.read_text(encoding="utf-8"))
        found = self.chrome.execute_async_script(
            "const done = arguments[arguments.length - 1];"
            "axe.run(document).then((result) => done(result.violations));"
        )
        return [
            f"{rule['id']}: {node['target']}: {node['failureSummary']}"
            for rule in found
            if rule["impact"] in ("serious", "critical")
            for node in rule["nodes"]
        ]
