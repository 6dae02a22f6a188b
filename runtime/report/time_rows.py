"""A timeline as a figure with a row for each mesh or worker, and as a table of its sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bokeh.layouts import column
from bokeh.models import ColumnDataSource, CustomJS, HoverTool, Range1d, RangeTool
from bokeh.plotting import figure

from alpa.passes.cost.device import size_text
from alpa.passes.plan.text import percent
from alpa.passes.plan.timeline import Activity, StepSpan, Timeline
from alpa.runtime.report.figures import Unit, add_legend, in_unit, new_figure
from alpa.runtime.report.markup import Cell, Html, table

COLORS: Mapping[Activity, str] = {
    "forward": "#4777dd",
    "backward": "#2a8768",
    "update": "#8a60c8",
    "transfer": "#c57f12",
    "bubble": "#8b95a33b",
    "call": "#7d8794",
}
COLLECTIVES = "#d9485f"
HELP = (
    "Drag to move, drag the ends of the strip below to zoom, hover for numbers, click the legend "
    "to hide an activity. The tools above it zoom by the wheel or a box."
)
_NUMBERED = 160
"""The most runs in view that show the number of their micro-batch."""


def time_rows(timeline: Timeline, names: Sequence[str]) -> Any:
    """The figure: bars in time, and below them a strip that selects what is shown."""
    unit, end = Unit.of(timeline.seconds), timeline.seconds
    made = new_figure(
        140 + max(22, 54 - len(names)) * len(names),
        x_range=Range1d(start=0.0, end=end / unit.size, bounds=(0.0, end / unit.size)),
        y_range=(len(names) - 0.4, -0.6),
        tools="xpan,xwheel_zoom,xbox_zoom,xzoom_in,xzoom_out,reset,save",
        toolbar_location="below",
        active_scroll=None,
        active_drag="xpan",
        x_axis_label=f"time ({unit.name})",
    )
    made.ygrid.visible = False
    _label_rows(made, names)
    small = new_figure(
        44,
        x_range=(0.0, end / unit.size),
        y_range=made.y_range,
        tools="",
        toolbar_location=None,
    )
    small.axis.visible = False
    small.grid.visible = False
    entries: list[tuple[str, list[Any]]] = []
    runs = list[ColumnDataSource]()
    for activity, color in COLORS.items():
        spans = [span for span in timeline.spans if span.activity == activity]
        if not spans:
            continue
        source = _source(spans, names, unit)
        style: dict[str, Any] = {"fill_color": color, "line_color": None, "source": source}
        bars = made.hbar(y="row", left="left", right="right", height=0.76, **style)
        small.hbar(y="row", left="left", right="right", height=0.8, **style)
        made.add_tools(HoverTool(renderers=[bars], tooltips=_tips(activity), visible=False))
        entries.append((_words(activity), [bars]))
        if activity in ("forward", "backward", "update"):
            runs.append(source)
    strips = [
        made.hbar(
            y="foot",
            left="left",
            right="sent",
            height=0.16,
            fill_color=COLLECTIVES,
            line_color=None,
            source=source,
        )
        for source in runs
        if any(source.data["collectives"])
    ]
    if strips:
        entries.append(("collectives of a run", strips))
    _number_runs(made, runs, timeline.seconds / unit.size)
    add_legend(made, entries)
    window = RangeTool(x_range=made.x_range)
    window.overlay.fill_alpha = 0.12
    small.add_tools(window)
    return column(made, small, sizing_mode="stretch_width")


def _label_rows(made: figure, names: Sequence[str]) -> None:
    made.yaxis.ticker = list(range(len(names)))
    made.yaxis.major_label_overrides = dict(enumerate(names))


def _words(activity: Activity) -> str:
    return {"bubble": "bubble (waits)", "call": "call of the step"}.get(activity, activity)


def _source(spans: Iterable[StepSpan], names: Sequence[str], unit: Unit) -> ColumnDataSource:
    rows = {name: row for row, name in enumerate(names)}
    columns: dict[str, Any] = {
        name: []
        for name in ("row", "foot", "left", "right", "sent", "collectives", "mesh", "what", "took")
    }
    columns |= {"micro_batch": [], "share": [], "size": []}
    for span in spans:
        sent = min(span.collective_seconds, span.seconds)
        number = "" if span.micro_batch is None else str(span.micro_batch)
        columns["row"].append(rows[span.mesh])
        columns["foot"].append(rows[span.mesh] + 0.3)
        columns["left"].append(span.start / unit.size)
        columns["right"].append(span.end / unit.size)
        columns["sent"].append((span.start + sent) / unit.size)
        columns["collectives"].append(sent > 0)
        columns["mesh"].append(span.mesh)
        columns["what"].append(span.name)
        columns["took"].append(in_unit(span.seconds))
        columns["micro_batch"].append(number)
        columns["share"].append(percent(sent / span.seconds) if sent else "none")
        columns["size"].append(size_text(span.bytes))
    return ColumnDataSource(columns)


def _tips(activity: Activity) -> list[tuple[str, str]]:
    tips = [("mesh", "@mesh"), (activity, "@took")]
    if activity == "transfer":
        return [*tips, ("from", "@what"), ("micro-batch", "@micro_batch"), ("tensor", "@size")]
    if activity in ("forward", "backward", "update"):
        tips += [("fragment", "@what"), ("micro-batch", "@micro_batch")]
        tips.append(("collectives", "@share"))
    return tips


def _number_runs(made: figure, runs: Sequence[ColumnDataSource], end: float) -> None:
    """Writes the micro-batches on the runs while few of them are in view."""
    texts = [
        made.text(
            x="left",
            y="row",
            text="micro_batch",
            source=source,
            x_offset=3,
            text_baseline="middle",
            text_font_size="11px",
            text_color="white",
        )
        for source in runs
    ]
    total = sum(len(source.data["row"]) for source in runs)
    for one in texts:
        one.visible = total <= _NUMBERED
    arguments = {"texts": texts, "total": total, "end": end, "most": _NUMBERED}
    code = """
    const shown = total * (cb_obj.end - cb_obj.start) / end
    for (const text of texts) text.visible = shown <= most
    """
    made.x_range.js_on_change("start", CustomJS(args=arguments, code=code))
    made.x_range.js_on_change("end", CustomJS(args=arguments, code=code))


def sums(timeline: Timeline, names: Sequence[str], caption: str) -> Html:
    """What each row does, in seconds of the step and shares of it."""
    there = {span.activity for span in timeline.spans}
    activities: list[Activity] = [activity for activity in COLORS if activity in there]
    sends = any(span.collective_seconds for span in timeline.spans)
    header = ["", *map(_words, activities), *(["collectives of the runs"] if sends else [])]
    rows: list[list[Cell]] = []
    for name in names:
        spans = list(timeline.on(name))
        found = [sum(s.seconds for s in spans if s.activity == one) for one in activities]
        if sends:
            found.append(sum(min(s.collective_seconds, s.seconds) for s in spans))
        cells = (f"{in_unit(it)} ({percent(it / timeline.seconds)})" for it in found)
        rows.append([name, *cells])
    return table(header, rows, caption=caption)
