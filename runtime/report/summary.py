"""The first section: the step in numbers, and what limits it."""

from __future__ import annotations

from collections.abc import Iterator

from alpa.passes.cost.device import seconds_text, size_text
from alpa.passes.plan.limits import limits
from alpa.passes.plan.row_names import noun_of, pipeline_text
from alpa.passes.plan.text import count_text, percent
from alpa.passes.plan.timeline import Timeline
from alpa.runtime.report.content import Content
from alpa.runtime.report.markup import Cell, Html, element, number, section

_SHARES = (
    ("compute", "compute of forward and backward parts"),
    ("collectives", "collectives of forward and backward parts"),
    ("transfer", "transfers between meshes"),
    ("update", "update, with its collectives"),
    ("bubble", "bubbles: waiting for other stages"),
    ("call", "the call of the step"),
)


def summary(content: Content) -> Html:
    """The section."""
    _, *lines = limits(content.numbers)
    return section(
        "limits",
        "What limits the plan",
        element("div", *_cards(content), class_="cards"),
        _bar(content),
        element("ul", *(element("li", line.strip()) for line in lines), class_="limits"),
    )


def _cards(content: Content) -> Iterator[Html]:
    it = content.numbers
    step = number(
        "predicted_step_seconds", it.predicted_step_seconds, seconds_text(it.predicted_step_seconds)
    )
    yield _card("predicted step", step)
    devices = sum(len(mesh.devices) for mesh in it.meshes)
    yield _card("runs on", count_text(devices, "device"), f"in {pipeline_text(it)}")
    batches = number("num_micro_batches", it.num_micro_batches, str(it.num_micro_batches))
    yield _card("micro-batches", batches, number("schedule", it.schedule, it.schedule))
    shares = activity_shares(content.timeline, content)
    busy = shares["compute"]
    yield _card("computing", percent(busy), "of the devices' time")
    peaks = [(bytes_, n) for n, bytes_ in enumerate(it.predicted_peak_bytes)]
    if peaks:
        peak, fullest = max(peaks)
        text = number(f"predicted_peak_bytes.{fullest}", peak, size_text(peak))
        beside = f"per device of {noun_of(it)}\N{NO-BREAK SPACE}{fullest}"
        if it.memory_bytes:
            beside = f"of {size_text(it.memory_bytes)} {beside}"
        yield _card("largest memory", text, beside)
    yield _card(
        "search", number("search_seconds", it.search_seconds, seconds_text(it.search_seconds))
    )


def _card(title: str, value: Cell, beside: Cell = "") -> Html:
    return element(
        "div",
        element("span", title, class_="title"),
        element("strong", value),
        *([element("span", beside, class_="beside")] if beside else []),
        class_="card",
    )


def activity_shares(timeline: Timeline, content: Content) -> dict[str, float]:
    """The share of all devices' time until the end of the step, by `_SHARES`."""
    devices = {mesh.name: len(mesh.devices) for mesh in content.numbers.meshes}
    total = timeline.seconds * sum(devices.values())
    sums = dict.fromkeys((name for name, _ in _SHARES), 0.0)
    for span in timeline.spans:
        weight = devices[span.mesh] / total if total else 0.0
        if span.activity in ("forward", "backward"):
            sent = min(span.collective_seconds, span.seconds)
            sums["collectives"] += weight * sent
            sums["compute"] += weight * (span.seconds - sent)
        else:
            sums[span.activity] += weight * span.seconds
    return sums


def _bar(content: Content) -> Html:
    """The shares as one bar, with a list of them."""
    shares = activity_shares(content.timeline, content)
    shown = [(name, text, shares[name]) for name, text in _SHARES if shares[name] > 0]
    parts = (
        element("span", class_=f"part {name}", style=f"flex-grow:{share:.6f}", title=text)
        for name, text, share in shown
    )
    entries = (
        element(
            "li",
            element("span", class_=f"swatch {name}"),
            f"{percent(share)} {text}",
            data_share=f"{name} {share!r}",
        )
        for name, text, share in shown
    )
    return element(
        "div",
        element("h3", "Where the devices' time goes"),
        element("div", *parts, class_="bar", aria_hidden="true"),
        element("ul", *entries, class_="key"),
    )
