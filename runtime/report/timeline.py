"""The section of the timeline: what each mesh does when."""

from __future__ import annotations

from alpa.passes.cost.device import seconds_text
from alpa.runtime.report.content import Content
from alpa.runtime.report.figures import drawn
from alpa.runtime.report.markup import Html, element, number, section
from alpa.runtime.report.time_rows import HELP, sums, time_rows


def timeline(content: Content) -> Html:
    """The section."""
    seconds = content.timeline.seconds
    names = [mesh.name for mesh in content.numbers.meshes]
    step = number("predicted_step_seconds", seconds, seconds_text(seconds))
    return section(
        "timeline",
        "The step in time",
        element(
            "p",
            "The simulated step ends after ",
            step,
            ". Each row is a mesh. The red strip at the foot of a run is the share of its "
            "collectives. A transfer occupies the mesh that receives it.",
        ),
        drawn(
            "timeline-figure",
            time_rows(content.timeline, names),
            f"Timeline of the step, {seconds_text(seconds)}, with a row for each of "
            f"{len(names)} meshes; the table below has its sums",
            HELP,
        ),
        sums(content.timeline, names, "Seconds of each mesh, and shares of the step"),
    )
