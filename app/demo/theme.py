"""Owns how the page looks: Gradio's theme, the style sheet and the small script.

Must never load anything from a network: fonts are Gradio's own files. The surprising fact: light
and dark are one set of names; the style sheet gives each name two values.
"""

from __future__ import annotations

from importlib import resources

import gradio as gr

__all__ = ["head_html", "make_theme", "style_sheet"]


def make_theme() -> gr.themes.Base:
    """Quiet neutrals, one accent; the style sheet does the rest."""
    theme = gr.themes.Base(
        primary_hue=gr.themes.colors.teal,
        secondary_hue=gr.themes.colors.teal,
        neutral_hue=gr.themes.colors.zinc,
        radius_size=gr.themes.sizes.radius_md,
        spacing_size=gr.themes.sizes.spacing_md,
        text_size=gr.themes.sizes.text_md,
        # 700, not Gradio's 600: the semi-bold file it ships holds a few letters only.
        font=(gr.themes.LocalFont("IBM Plex Sans", weights=(400, 700)), "system-ui", "sans-serif"),
        font_mono=(gr.themes.LocalFont("IBM Plex Mono", weights=(400, 700)), "monospace"),
    )
    return theme.set(
        body_background_fill="#f5f5f3",
        body_background_fill_dark="#0e1013",
        body_text_color="#1b1d21",
        body_text_color_dark="#e8e9eb",
        body_text_color_subdued="#5b606a",
        body_text_color_subdued_dark="#a2a8b3",
        background_fill_primary="#ffffff",
        background_fill_primary_dark="#16191e",
        background_fill_secondary="#fafaf9",
        background_fill_secondary_dark="#1b1f25",
        block_background_fill="transparent",
        block_background_fill_dark="transparent",
        block_border_width="0px",
        block_border_width_dark="0px",
        block_padding="0px",
        block_shadow="none",
        block_shadow_dark="none",
        block_label_background_fill="transparent",
        block_label_background_fill_dark="transparent",
        block_label_text_color="#3d424b",
        block_label_text_color_dark="#c3c8d0",
        block_title_text_color="#3d424b",
        block_title_text_color_dark="#c3c8d0",
        block_title_text_size="13px",
        block_title_text_weight="600",
        block_info_text_color="#5b606a",
        block_info_text_color_dark="#a2a8b3",
        input_background_fill="#ffffff",
        input_background_fill_dark="#101318",
        input_border_width="1px",
        input_border_color="#c9c9c4",
        input_border_color_dark="#343a44",
        input_placeholder_color="#6a6f79",
        input_placeholder_color_dark="#8e95a1",
        input_border_color_focus="#0f766e",
        input_border_color_focus_dark="#2dd4bf",
        border_color_primary="#deded9",
        border_color_primary_dark="#282d35",
        button_primary_background_fill="#0f766e",
        button_primary_background_fill_hover="#0b5f59",
        button_primary_background_fill_dark="#2dd4bf",
        button_primary_background_fill_hover_dark="#5eead4",
        button_primary_text_color="#ffffff",
        button_primary_text_color_dark="#06201d",
        button_secondary_background_fill="#ecece8",
        button_secondary_background_fill_dark="#242932",
        button_secondary_background_fill_hover="#e0e0db",
        button_secondary_background_fill_hover_dark="#2e3540",
        button_secondary_text_color="#1b1d21",
        button_secondary_text_color_dark="#e8e9eb",
        button_cancel_background_fill="#b42318",
        button_cancel_background_fill_dark="#b42318",
        button_cancel_text_color="#ffffff",
        button_cancel_text_color_dark="#ffffff",
        slider_color="#0f766e",
        slider_color_dark="#2dd4bf",
        link_text_color="#0f766e",
        link_text_color_dark="#5eead4",
    )


def style_sheet() -> str:
    """The page's CSS."""
    return _read("style.css")


def head_html() -> str:
    """The page's script, for the document's head."""
    return f"<script>{_read('page.js')}</script>"


def _read(name: str) -> str:
    return resources.files(__package__ or __name__).joinpath(name).read_text(encoding="utf-8")
