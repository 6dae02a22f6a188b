"""The section of the stages: where they are on the cluster, and their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from bokeh.models import ColumnDataSource, HoverTool

from alpa.passes.cost.device import seconds_text, size_text
from alpa.passes.plan.attribute import cluster_here
from alpa.passes.plan.report import PlanReport
from alpa.passes.plan.row_names import row_name
from alpa.passes.plan.table import layers_text
from alpa.passes.plan.text import ranges_text
from alpa.runtime.report.content import Content
from alpa.runtime.report.figures import GREY, STAGES, drawn, new_figure, without_lines
from alpa.runtime.report.markup import Cell, Html, element, number, section, table

_LABELLED = 256
"""The most devices with words on them."""
_NAMED_HOSTS = 64
"""The most hosts with a label each."""


def stages(content: Content) -> Html:
    """The section."""
    it = content.numbers
    words = element("ul", *_strategies(it), class_="limits")
    return section("stages", "Stages on the cluster", _map(it), _numbers(it), words)


def _map(it: PlanReport) -> Html:
    """The devices of each host, coloured by stage."""
    sizes, source = _host_sizes(it), _devices(it)
    hosts = len(sizes)
    made = new_figure(
        86 + max(24, 44 - hosts // 2) * min(hosts, _NAMED_HOSTS),
        x_range=(-0.5, max(sizes) - 0.5),
        y_range=(hosts - 0.5, -0.5),
        tools="",
        toolbar_location=None,
        x_axis_label="device of the host",
    )
    cells = made.rect(
        x="number",
        y="host",
        width=0.94,
        height=0.86,
        source=source,
        fill_color="color",
        line_color=None,
        border_radius=4,  # pyright: ignore[reportArgumentType] - its stubs want a property
    )
    if sum(sizes) <= _LABELLED:
        made.text(
            x="number",
            y="host",
            text="stage",
            source=source,
            text_align="center",
            text_baseline="middle",
            text_color="white",
            text_font_size="12px",
        )
    shown = ["device", "stage", "mesh", "layers", "peak"]
    tips = [(name, f"@{name}") for name in shown]
    made.add_tools(HoverTool(renderers=[cells], tooltips=tips))
    made.xaxis.ticker = list(range(max(sizes)))
    made.yaxis.ticker = list(range(0, hosts, ceil(hosts / _NAMED_HOSTS)))
    made.yaxis.major_label_overrides = {host: f"host {host}" for host in range(hosts)}
    without_lines(made)
    spoken = "; ".join(
        f"{row_name(it, [n])} on hosts {ranges_text(mesh.hosts)}, "
        f"devices {ranges_text(mesh.devices)}"
        for n, mesh in enumerate(it.meshes)
    )
    return drawn("stage-map", made, f"The cluster's devices by stage: {spoken}")


def _host_sizes(it: PlanReport) -> tuple[int, ...]:
    """The devices of each host; as the meshes need them if the cluster is not known here."""
    cluster = cluster_here(it.cluster)
    if cluster is not None:
        return cluster.host_sizes
    hosts = 1 + max(host for mesh in it.meshes for host in mesh.hosts)
    devices = 1 + max(device for mesh in it.meshes for device in mesh.devices)
    return (ceil(devices / hosts),) * hosts


def _devices(it: PlanReport) -> ColumnDataSource:
    """A row for each device of the cluster."""
    stage_of = {device: n for n, mesh in enumerate(it.meshes) for device in mesh.devices}
    rows: list[tuple[object, ...]] = []
    for host, size in enumerate(_host_sizes(it)):
        for place in range(size):
            device = len(rows)
            stage = stage_of.get(device)
            if stage is None:
                rows.append((device, host, place, GREY, "idle", "-", "-", "-"))
                continue
            report = it.stages[stage]
            peak = "-" if report.peak_bytes is None else size_text(report.peak_bytes)
            color, name = STAGES[stage % len(STAGES)], row_name(it, [stage])
            layers = layers_text(report.layers)
            rows.append((device, host, place, color, name, report.mesh, layers, peak))
    names = ("device", "host", "number", "color", "stage", "mesh", "layers", "peak")
    columns = zip(*rows, strict=True)
    return ColumnDataSource(dict(zip(names, map(list, columns), strict=True)))


def _numbers(it: PlanReport) -> Html:
    header = ["stage", "mesh", "hosts", "devices", "shape", "layers", "forward", "backward"]
    header += ["update", "parameters and optimizer state", "activations", "peak"]
    rows: list[list[Cell]] = []
    for n, (mesh, stage) in enumerate(zip(it.meshes, it.stages, strict=True)):
        entry = f"stages.{n}"
        swatch = element("span", class_="swatch", style=f"background:{STAGES[n % len(STAGES)]}")
        row: list[Cell] = [
            Html(f"{swatch} {ranges_text(sorted(stage.numbers or (n,)))}"),
            mesh.name,
            ranges_text(mesh.hosts),
            ranges_text(mesh.devices),
            "x".join(map(str, mesh.logical_shape)),
            layers_text(stage.layers),
        ]
        for name in ("forward_seconds", "backward_seconds", "update_seconds"):
            value = getattr(stage, name)
            row.append(number(f"{entry}.{name}", value, seconds_text(value)))
        for name in ("state_bytes", "activation_bytes", "peak_bytes"):
            value = getattr(stage, name)
            text = "-" if value is None else size_text(value)
            row.append(number(f"{entry}.{name}", value, text))
        rows.append(row)
    caption = "Seconds per micro-batch, of the update per step; bytes per device"
    return table(header, rows, caption=caption, left=range(6))


def _strategies(it: PlanReport) -> Iterator[Html]:
    """What is split in which stages, in words."""
    alike: dict[str, list[int]] = {}
    for n, stage in enumerate(it.stages):
        if stage.strategy:
            alike.setdefault(stage.strategy, []).append(n)
    for text, numbers in alike.items():
        yield element("li", f"{row_name(it, numbers)}: {text}")
    for n, stage in enumerate(it.stages):
        if stage.remat:
            text = f"{row_name(it, [n])} computes activations again in the backward of layers "
            yield element("li", text + layers_text(stage.remat))
