"""The demo's page as a stranger's program handles it: requests no browser would send.

Owns Gradio's protocol for the tests. The surprising fact: an event is called by a number that
anybody can read from the page's own configuration; nothing has to be clicked first.
"""

from __future__ import annotations

import io
import json
import uuid
from typing import Any

import httpx
from demo_studio import EXTRA
from PIL import Image
from PIL.PngImagePlugin import PngInfo

META = {"_type": "gradio.FileData"}
SMALL = {"width": 64, "height": 64, "steps": 2, "guidance": 2.0, "extra": EXTRA, "seed": "7"}


class Stranger:
    """One session that sends what it likes to the events of a served page."""

    def __init__(self, address: str) -> None:
        self.session = uuid.uuid4().hex
        self._http = httpx.Client(base_url=address, timeout=60)
        config = self._http.get("config").json()
        self._names = {
            part["id"]: part["props"].get("elem_id") or part["type"]
            for part in config["components"]
        }
        self._values = {
            self._names[part["id"]]: part["props"].get("value") for part in config["components"]
        }
        self._events = {event["api_name"]: event for event in config["dependencies"]}

    def upload(self, data: bytes, name: str = "a.png") -> dict[str, object]:
        """The value a file field has after `data` was uploaded."""
        answer = self._http.post("gradio_api/upload", files={"files": (name, data)})
        answer.raise_for_status()
        return {"path": answer.json()[0], "orig_name": name, "meta": META}

    def send(self, event: str, **fields: object) -> tuple[bool, dict[str, Any], str]:
        """(success, last value of each output by its id, everything that was sent back).

        Fields that are not named are as on a fresh page.
        """
        called = self._events[event]
        names = [self._names[number] for number in called["inputs"]]
        assert {f"dg-{name}" for name in fields} <= set(names), names
        values = {**self._values, **{f"dg-{name}": value for name, value in fields.items()}}
        message = {
            "data": [values.get(name) for name in names],
            "fn_index": called["id"],
            "session_hash": self.session,
        }
        body = json.dumps(message)  # unlike httpx's own: NaN and Infinity go through
        headers = {"content-type": "application/json"}
        self._http.post("gradio_api/queue/join", content=body, headers=headers).raise_for_status()
        seen, outputs, success = [], [], False
        query = {"session_hash": self.session}
        with self._http.stream("GET", "gradio_api/queue/data", params=query) as lines:
            for line in lines.iter_lines():
                if not line.startswith("data:"):
                    continue
                seen.append(line)
                note = json.loads(line[5:])
                if note["msg"] == "process_completed":
                    success = note["success"]
                    outputs = note["output"].get("data") or []
                    break
        given = {
            self._names[number]: value
            for number, value in zip(called["outputs"], outputs, strict=False)
        }
        return success, given, "\n".join(seen)

    def fetch(self, path: str) -> httpx.Response:
        """The answer to a request for a file of the server."""
        return self._http.get(f"gradio_api/file={path}")


def record_of(request: dict[str, object], **more: object) -> dict[str, object]:
    """What a file made by the tiny model holds about `request`."""
    model = {"model": "unsaved/ZImagePipeline"}
    return {
        "format": 1,
        "pipeline": "ZImagePipeline",
        "model": model,
        "request": request,
        **more,
    }


def png_of(text: str | None = None, size: tuple[int, int] = (16, 16)) -> bytes:
    """A picture that holds `text` where records are looked for."""
    info, data = PngInfo(), io.BytesIO()
    if text is not None:
        info.add_itxt("dit-graphs", text)
    Image.new("RGB", size, "teal").save(data, "PNG", pnginfo=info)
    return data.getvalue()


def restored(stranger: Stranger, request: dict[str, object], **more: object) -> dict[str, object]:
    """The page's fields after a forged picture was dropped on *Restore*."""
    text = json.dumps(record_of(request, **more))
    success, fields, _ = stranger.send("restore", restore=stranger.upload(png_of(text)))
    assert success
    return fields
