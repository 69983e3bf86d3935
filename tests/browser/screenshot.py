"""Takes the picture of the demo that the README shows: `python tests/browser/screenshot.py FILE`.

Owns nothing but the moment: the first picture of a fresh page, whose timeline shows eager calls, a
capture and replays side by side. The surprising fact: it draws what the bundled model draws now, so
it is taken again whenever the model or the page changes.
"""

from __future__ import annotations

import io
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

PROMPT = "a red heart"
SIZE = (1440, 1300)
MAX_BYTES = 300_000


def take(target: Path) -> None:
    """The screenshot is at `target`."""
    from demo_page import DemoPage, load_studio
    from PIL import Image
    from selenium import webdriver

    from dit_graphs.app.demo import launch

    studio = load_studio()
    options = webdriver.ChromeOptions()
    flags = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars")
    for argument in flags:
        options.add_argument(argument)
    options.add_argument(f"--window-size={SIZE[0]},{SIZE[1] + 200}")
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    chrome = webdriver.Chrome(options=options, service=service)
    try:
        page = DemoPage(chrome, launch(studio, is_blocking=False), Path())
        page.open()
        page.generate(prompt=PROMPT, seed=7, steps=12)
        time.sleep(1.0)  # the picture is decoded and the buttons have settled
        data = chrome.get_screenshot_as_png()
    finally:
        chrome.quit()
        studio.close()
    picture = Image.open(io.BytesIO(data)).convert("RGB").crop((0, 0, *SIZE))
    picture.save(target, optimize=True)
    assert target.stat().st_size <= MAX_BYTES


if __name__ == "__main__":
    take(Path(sys.argv[1]))
