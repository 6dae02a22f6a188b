"""Figures of Bokeh in the page's colours, which follow its light or dark theme.

Backgrounds, axes and words take the CSS variables that `page.css` sets. The colours of marks are
the same in both themes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bokeh.core.types import ID
from bokeh.embed import json_item
from bokeh.models import (
    AdaptiveTicker,
    CustomJSTickFormatter,
    InlineStyleSheet,
    Legend,
    LegendItem,
)
from bokeh.plotting import figure

from alpa.passes.cost.device import seconds_text
from alpa.runtime.report.markup import Html, element

GREY = "#a7b0ba"
WORDS = "#7d8794"
"""Of words that no CSS variable colours."""
STAGES = (
    "#3f73c8",
    "#b96412",
    "#2f8561",
    "#b84c6b",
    "#7f5cc0",
    "#8d7208",
    "#1f8296",
    "#96623d",
    "#687b2c",
    "#a453a0",
)
"""Of the stages, in turns. White words on them and on the colours of axes have a contrast of 4."""
AXES = ("#3f73c8", "#c2600f", "#2b8060", "#b84a72")
"""Of the axes of a mesh."""
SEVERAL_AXES = "#8e5bc0"
_SIZES = "KMGTPE"
_TOOLBAR = ".bk-divider { opacity: 0.25; } @media print { :host { visibility: hidden; } }"
"""Styles of a toolbar. Dividers have one colour in both themes."""


@dataclass(frozen=True)
class Unit:
    """The unit of an axis of seconds."""

    name: str
    size: float

    @classmethod
    def of(cls, seconds: float) -> Unit:
        """In which a number of seconds is not small."""
        for name, size in (("s", 1.0), ("ms", 1e-3)):
            if seconds >= 2 * size:
                return cls(name, size)
        return cls("us", 1e-6)


def new_figure(height: int, **options: Any) -> figure:
    """An empty figure as wide as the page."""
    made = figure(
        height=height,
        sizing_mode="stretch_width",
        min_border_right=24,
        outline_line_color=None,
        **options,
    )
    made.toolbar.logo = None
    made.toolbar.autohide = False
    made.toolbar.stylesheets = [InlineStyleSheet(css=_TOOLBAR)]
    made.axis.axis_label_text_font_style = "normal"
    made.axis.major_label_text_font_size = "12px"
    made.axis.axis_label_text_font_size = "12px"
    return made


def without_lines(made: figure) -> None:
    """Hides the grid, and the lines and ticks of the axes."""
    made.grid.visible = False
    made.axis.axis_line_alpha = 0.0
    made.axis.major_tick_line_alpha = 0.0


def count_bytes(axis: Any) -> None:
    """Lets an axis of bytes have labels such as 1.5 GiB."""
    axis.ticker = AdaptiveTicker(base=2, mantissas=[1], desired_num_ticks=5)
    axis.formatter = CustomJSTickFormatter(
        code=f"""
        let size = Math.abs(tick), unit = "B"
        for (const one of "{_SIZES}") {{
          if (size < 1000) break
          size /= 1024
          unit = one + "iB"
        }}
        return Number(size.toPrecision(3)) + " " + unit
        """
    )


def add_legend(made: figure, entries: Sequence[tuple[str, Sequence[Any]]]) -> None:
    """A legend above a figure; a click hides what an entry stands for."""
    items = [LegendItem(label=text, renderers=list(its)) for text, its in entries]
    legend = Legend(
        items=items,
        orientation="horizontal",
        click_policy="hide",
        border_line_alpha=0.0,
        background_fill_alpha=0.0,
        label_text_font_size="12px",
        label_text_color=WORDS,
        spacing=14,
        padding=0,  # pyright: ignore[reportArgumentType] - its stubs want a property
        margin=0,
    )
    made.add_layout(legend, "above")


def drawn(identifier: str, model: Any, label: str, note: str = "") -> Html:
    """A figure in the page: the place where it appears, and what Bokeh needs to draw it.

    `label` is what a screen reader says, and `note` stands below the figure.
    """
    text = json.dumps(json_item(model, ID(identifier)), separators=(",", ":"))
    script = Html(text.replace("<", "\\u003c").replace("&", "\\u0026"))
    return element(
        "figure",
        element("div", id=identifier, class_="drawing", role="group", aria_label=label),
        element("script", script, type="application/json", class_="figure"),
        *([element("figcaption", note)] if note else []),
    )


def in_unit(seconds: float) -> str:
    """Seconds as a hover shows them; 0 is `0 s`."""
    return seconds_text(seconds) if seconds else "0 s"
