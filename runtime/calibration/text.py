"""A calibrated machine as a cluster file, and beside another one's figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.cluster_text import cluster_text, table_text
from alpa.passes.cost.device import Machine, seconds_text, size_text
from alpa.passes.plan.text import aligned
from alpa.runtime.calibration.fit import Fit, predicted
from alpa.runtime.calibration.measure import Sample


def calibrated_text(
    fit: Fit, *, hosts: int, devices_per_host: int, about: Mapping[str, str], comment: str
) -> str:
    """The text of a cluster file.

    `about` goes into its `[calibration]`; `comment` stands before the link between hosts.
    """
    machine = fit.machine
    cluster = Cluster(
        hosts=hosts,
        devices_per_host=devices_per_host,
        device=machine.device,
        intra_host=machine.intra_host,
        inter_host=machine.inter_host,
    )
    lines = [cluster_text(cluster, figure=_figure, comment=comment), "[calibration]"]
    lines += [f'{key} = "{value}"' for key, value in about.items()]
    lines.append(f"spread = {fit.spread:.3f}  # median of half the distance of the quartiles")
    if fit.programs:
        lines.append("# what programs take, over or beside chains of one op (docs/clusters.md)")
        lines.append(f"programs = {table_text(fit.programs, _figure)}")
    lines.append("# mean of |predicted / measured - 1|")
    lines += [f'residuals."{what}" = {error:.3f}' for what, error in fit.residuals.items()]
    return "\n".join(lines) + "\n"


def comparison_text(samples: Iterable[Sample], assumed: Machine) -> list[str]:
    """Each sample beside what a machine's figures say."""
    rows = [["what", "size", "measured", "assumed", "assumed / measured"]]
    for sample in samples:
        seconds = predicted(assumed, sample)
        share = sample.what == "overlap"
        rows.append(
            [
                sample.what,
                _size(sample),
                f"{sample.seconds:.0%}" if share else seconds_text(sample.seconds),
                "" if seconds is None else f"{seconds:.0%}" if share else seconds_text(seconds),
                "" if seconds is None or share else f"{seconds / sample.seconds:.2f}",
            ]
        )
    return aligned(rows, left=(0,))


def _size(sample: Sample) -> str:
    if sample.what.startswith(("matrix", "convolution", "elementwise", "launch")):
        return f"{sample.size:.3g} FLOPs"
    return "" if sample.what == "overlap" else size_text(sample.size)


def _figure(number: float) -> str:
    return f"{number:.4g}"
