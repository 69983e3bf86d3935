"""Owns the page: layout and events put together, and the server that shows it.

Must never know how the model was loaded. The surprising fact: the events have no concurrency limit.
The line in front of the pipeline is ours; Gradio's own would hide how many people wait.
"""

from __future__ import annotations

import signal

import gradio as gr

from .filling import Filler
from .handlers import Handlers
from .layout import FIELDS, Parts, build_parts
from .studio import KEPT_SECONDS, Studio
from .theme import head_html, make_theme, style_sheet
from .uploads import GuardedBlocks

__all__ = ["build", "launch"]


def build(studio: Studio) -> gr.Blocks:
    """The page of one studio, not yet shown."""
    with GuardedBlocks(
        studio.limits,
        title="dit-graphs",
        analytics_enabled=False,
        fill_width=True,
        delete_cache=(3600, KEPT_SECONDS),
    ) as page:
        parts = build_parts(studio)
        _connect_work(parts, Handlers(studio), page)
        _connect_fields(parts, Filler(studio, parts), studio)
    return page


def _connect_work(parts: Parts, handlers: Handlers, page: gr.Blocks) -> None:
    fields = [parts["mode"], *(parts.fields[name] for name in FIELDS)]
    pictures = ("stage", "gallery", "details", "download", "reuse", "graphs", "history")
    shared = {"concurrency_limit": None, "show_progress": "hidden"}
    gr.on(
        [parts["run"].click, parts["prompt"].submit],
        handlers.generate,
        [parts["history"], *fields],
        [parts[name] for name in pictures],
        **shared,
    )
    parts["stop"].click(handlers.stop, None, None, queue=False, show_progress="hidden")
    parts["gallery"].select(
        handlers.select,
        [parts["history"]],
        [parts[name] for name in ("details", "download", "reuse")],
        queue=False,
        show_progress="hidden",
    )
    parts["compare"].click(
        handlers.compare, fields, [parts["comparison"], parts["graphs"]], **shared
    )
    parts["warm"].click(
        handlers.warm_up,
        [parts["history"], parts["sizes"], *fields],
        [parts["warmed"], parts["graphs"]],
        **shared,
    )
    if "rewrite" in parts.named:
        parts["rewrite"].click(
            handlers.rewrite,
            [parts["prompt"], parts["seed"]],
            [parts["prompt"], parts["restored"]],
            **shared,
        )
    page.unload(handlers.leave)


def _connect_fields(parts: Parts, filler: Filler, studio: Studio) -> None:
    quick = {"queue": False, "show_progress": "hidden"}
    parts["restore"].upload(filler.restore, [parts["restore"]], filler.outputs, **quick)
    parts["reuse"].click(filler.restore, [parts["download"]], filler.outputs, **quick)
    for plan in studio.plans:
        outputs = [parts["mode"], *filler.mode_outputs]
        parts[f"tab_{plan.mode.value}"].select(filler.switch(plan.mode), None, outputs, **quick)


def launch(
    studio: Studio,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    is_blocking: bool = True,
    opens_browser: bool = False,
) -> str:
    """The page is served; its address is returned, or, if blocking, once the server has stopped.

    Blocking, from the main thread: `studio` is closed however it ends.
    """
    if not is_blocking:
        return _serve(studio, host, port, opens_browser)[1]
    try:
        page, address = _serve(studio, host, port, opens_browser)
        print(f"the demo is at {address}  (Ctrl-C ends it)", flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
        page.block_thread()
    finally:
        studio.close()  # also where the port is taken: its folder would stay
    return address


def _serve(
    studio: Studio, host: str, port: int | None, opens_browser: bool
) -> tuple[gr.Blocks, str]:
    page = build(studio)
    page.queue(default_concurrency_limit=None, api_open=False)
    _, address, _ = page.launch(
        server_name=host,
        server_port=port,
        prevent_thread_lock=True,
        inbrowser=opens_browser,
        share=False,
        quiet=True,
        show_error=False,  # its messages name places on this machine; ours are on the page
        max_file_size=studio.limits.upload_bytes,
        footer_links=[],
        theme=make_theme(),
        css=style_sheet(),
        head=head_html(),
        ssr_mode=False,
        enable_monitoring=False,
    )
    return page, str(address)
