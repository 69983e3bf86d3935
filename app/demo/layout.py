"""Owns which parts the page has and where they stand; builds a Gradio `Blocks` around a `Studio`.

Must never do work: every event goes to `Handlers`. The surprising fact: all modes share one set of
fields. A tab only says which of them the pipeline takes, so nothing typed is lost by switching.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import gradio as gr

from . import history
from .compare_view import empty_comparison_html
from .graphs_panel import panel_html
from .markup import text
from .modes import Mode
from .stage import idle_html
from .starting import start_form
from .studio import Studio

__all__ = ["FIELDS", "Parts", "build_parts"]

FIELDS = (
    "prompt",
    "negative_prompt",
    "width",
    "height",
    "num_frames",
    "fps",
    "steps",
    "guidance",
    "seed",
    "count",
    "image",
    "image_2",
    "mask",
    "strength",
    "lora",
    "extra",
)


@dataclass(slots=True)
class Parts:
    """Every component an event reads or writes."""

    fields: dict[str, gr.components.Component] = field(default_factory=dict)
    named: dict[str, gr.blocks.Block] = field(default_factory=dict)

    def __getitem__(self, name: str) -> gr.blocks.Block:
        return self.fields.get(name) or self.named[name]


def build_parts(studio: Studio) -> Parts:
    """The whole page, inside an open `gr.Blocks`."""
    parts = Parts()
    parts.named["mode"] = gr.State(studio.plans[0].mode.value)
    parts.named["history"] = gr.State([], time_to_live=history.SECONDS)
    gr.HTML(_header(studio), elem_id="dg-header")
    with gr.Row(elem_id="dg-main", equal_height=False):
        with gr.Column(scale=0, min_width=340, elem_id="dg-controls"):
            _controls(parts, studio)
        with gr.Column(scale=1, min_width=420, elem_id="dg-work"):
            with gr.Tabs(elem_id="dg-views"):
                with gr.Tab("Videos" if studio.is_video else "Pictures", id="pictures"):
                    _pictures(parts, studio)
                with gr.Tab("Compare", id="compare"):
                    _compare(parts)
                with gr.Tab("Warm up", id="warm"):
                    _warm(parts, studio)
            # A function: what the graphs hold when a page is opened, not when the server started.
            parts.named["graphs"] = gr.HTML(
                lambda: panel_html(studio.snapshot, None), elem_id="dg-graphs-panel"
            )
    return parts


def _header(studio: Studio) -> str:
    device = str(studio.device)
    kind = "CPU recorder: no speed-up" if studio.device.type == "cpu" else "CUDA graphs"
    if studio.backend in ("none", "off"):
        kind = "plain eager"
    return (
        '<header class="dg-top"><h1>dit-graphs</h1>'
        f'<span class="dg-chip">{text(studio.model_words)}</span>'
        f'<span class="dg-chip">{text(device)}</span>'
        f'<span class="dg-chip dg-chip-kind">{text(kind)}</span>'
        '<button type="button" id="dg-theme" class="dg-ghost">Dark or light</button></header>'
    )


def _controls(parts: Parts, studio: Studio) -> None:
    start = start_form(studio)
    fields = parts.fields
    takes = studio.plans[0].takes
    with gr.Tabs(elem_id="dg-modes", selected=studio.plans[0].mode.value) as modes:
        for plan in studio.plans:
            tab = gr.Tab(plan.mode.title, id=plan.mode.value)
            parts.named[f"tab_{plan.mode.value}"] = tab
            with tab:
                gr.HTML(f'<p class="dg-hint">{text(_HINTS.get(plan.mode, ""))}</p>')
    parts.named["modes"] = modes
    _image_fields(parts, studio)
    fields["prompt"] = gr.Textbox(
        label="Prompt", lines=3, max_lines=6, placeholder="a red heart", elem_id="dg-prompt"
    )
    if studio.can_rewrite:
        parts.named["rewrite"] = gr.Button(
            "Expand the prompt", size="sm", elem_id="dg-rewrite", min_width=120
        )
    with gr.Row(elem_id="dg-actions"):
        parts.named["run"] = gr.Button("Generate", variant="primary", elem_id="dg-run", scale=2)
        parts.named["stop"] = gr.Button("Stop", variant="secondary", elem_id="dg-stop", scale=1)
    fields["negative_prompt"] = gr.Textbox(
        label="Negative prompt", lines=1, max_lines=3, visible="negative_prompt" in takes,
        elem_id="dg-negative",
    )  # fmt: skip
    with gr.Row(elem_classes="dg-pair"):
        fields["width"] = _number("Width", start.width, "dg-width")
        fields["height"] = _number("Height", start.height, "dg-height")
    with gr.Row(elem_classes="dg-pair", visible="num_frames" in takes):
        fields["num_frames"] = _number("Frames", start.num_frames, "dg-frames")
        fields["fps"] = _number("Frames per second", start.fps, "dg-fps")
    has_guidance = bool(takes & {"guidance_scale", "true_cfg_scale"})
    with gr.Row(elem_classes="dg-pair"):
        fields["steps"] = _number("Steps", start.steps, "dg-steps")
        fields["guidance"] = gr.Number(
            label="Guidance", value=start.guidance, elem_id="dg-guidance", step=0.5, min_width=80,
            visible=has_guidance,
        )  # fmt: skip
    with gr.Row(elem_classes="dg-pair"):
        # Text, because an empty number field is shown as 0, which is a seed too.
        fields["seed"] = gr.Textbox(
            label="Seed", value="", placeholder="random", max_lines=1, elem_id="dg-seed",
            min_width=80,
        )  # fmt: skip
        fields["count"] = _number("Videos" if studio.is_video else "Images", 1, "dg-count")
    with gr.Accordion(
        "LoRA", open=bool(start.lora), visible=studio.takes_lora, elem_id="dg-lora-box"
    ):
        fields["lora"] = gr.Textbox(
            label="Weights and strength", value=start.lora, lines=2, elem_id="dg-lora",
            placeholder="NAME:SCALE", info=studio.loras.words(),
        )  # fmt: skip
    with gr.Accordion("Other arguments", open=False, elem_id="dg-extra-box"):
        fields["extra"] = gr.Textbox(
            label="JSON", value=start.extra, lines=2, elem_id="dg-extra",
            info="Anything else the pipeline takes.",
        )  # fmt: skip
    kind = "an MP4" if studio.is_video else "a PNG"
    parts.named["restore"] = gr.File(
        label=f"Restore the settings of {kind} or JSON made here",
        type="filepath", file_types=[".png", ".mp4", ".json"], elem_id="dg-restore", height=96,
    )  # fmt: skip
    parts.named["restored"] = gr.HTML("", elem_id="dg-restored")


_HINTS = {
    Mode.IMAGE: "Start from a picture, cropped to width × height; the strength says how far it "
    "may change.",
    Mode.EDIT: "Say what should change in the picture.",
    Mode.VIDEO: "A short film of the prompt.",
}


def _number(label: str, value: float | None, elem_id: str) -> gr.Number:
    return gr.Number(label=label, value=value, elem_id=elem_id, min_width=80)


def _image_fields(parts: Parts, studio: Studio) -> None:
    first = studio.plans[0]
    takes_image = any(plan.takes_image for plan in studio.plans)
    with gr.Column(visible=takes_image and first.takes_image, elem_id="dg-inputs") as box:
        parts.fields["image"] = gr.Image(
            label="Input picture", type="filepath", sources=["upload"],
            height=180, elem_id="dg-image", format="png", image_mode=None,
        )  # fmt: skip
        parts.fields["image_2"] = gr.Image(
            label="Second reference (optional)", type="filepath", sources=["upload"],
            height=140, visible=any(plan.mode is Mode.EDIT for plan in studio.plans),
            elem_id="dg-image-2", format="png", image_mode=None,
        )  # fmt: skip
        parts.fields["mask"] = gr.Image(
            label="Mask (white is drawn anew)", type="filepath", sources=["upload"],
            height=140, visible=first.needs_mask, elem_id="dg-mask", format="png", image_mode=None,
        )  # fmt: skip
        parts.fields["strength"] = gr.Slider(
            0, 1, value=start_form(studio).strength, step=0.05, label="Strength",
            visible=any("strength" in plan.takes for plan in studio.plans), elem_id="dg-strength",
        )  # fmt: skip
    parts.named["inputs"] = box


def _pictures(parts: Parts, studio: Studio) -> None:
    with gr.Row(elem_id="dg-result", equal_height=False):
        with gr.Column(scale=3, min_width=280):
            parts.named["stage"] = gr.HTML(idle_html(studio.model_words), elem_id="dg-stage")
            parts.named["gallery"] = gr.Gallery(
                label="Pictures", show_label=False, visible=False, preview=True, columns=6,
                height=460, object_fit="contain", elem_id="dg-gallery", format="png",
                buttons=["download", "fullscreen"], interactive=False,
            )  # fmt: skip
        with gr.Column(scale=2, min_width=240):
            parts.named["details"] = gr.HTML("", elem_id="dg-details")
            with gr.Row(elem_classes="dg-download-row"):
                parts.named["download"] = gr.DownloadButton(
                    "Download", visible=False, size="sm", elem_id="dg-download", min_width=80
                )
                parts.named["reuse"] = gr.Button(
                    "Use these settings", visible=False, size="sm", elem_id="dg-reuse", min_width=80
                )


def _compare(parts: Parts) -> None:
    with gr.Row(elem_classes="dg-bar-row"):
        parts.named["compare"] = gr.Button(
            "Compare with plain eager", variant="primary", elem_id="dg-compare-run", scale=0,
            min_width=240,
        )  # fmt: skip
    parts.named["comparison"] = gr.HTML(empty_comparison_html(), elem_id="dg-comparison")


def _warm(parts: Parts, studio: Studio) -> None:
    start = start_form(studio)
    size = f"{int(start.width or 512)}x{int(start.height or 512)}"
    with gr.Row(elem_classes="dg-bar-row"):
        parts.named["sizes"] = gr.Textbox(
            label="Sizes", value=size, elem_id="dg-sizes", scale=3,
            info="Width × height, separated by commas. Captured largest first, with the prompt "
            "and settings on the left.",
        )  # fmt: skip
        parts.named["warm"] = gr.Button(
            "Warm up", variant="primary", elem_id="dg-warm-run", scale=0, min_width=140
        )
    parts.named["warmed"] = gr.HTML(
        '<p class="dg-empty">Captures graphs before the first user waits for them.</p>',
        elem_id="dg-warmed",
    )
