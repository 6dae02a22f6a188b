"""A calibrated machine as a cluster file, and beside another one's figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from alpa.passes.cost.device import Cost, Curve, Link, Machine, Points, size_text
from alpa.passes.plan.text import aligned, seconds_text
from alpa.runtime.calibration.fit import Fit, predicted
from alpa.runtime.calibration.measure import Sample


def cluster_text(
    fit: Fit, *, hosts: int, devices_per_host: int, about: Mapping[str, str], comment: str
) -> str:
    """The text of a cluster file.

    `about` goes into its `[calibration]`; `comment` stands before the link between hosts.
    """
    device, fast = fit.machine.device, fit.machine.intra_host
    efficiency = device.efficiency
    lines = [
        f"hosts = {hosts}",
        f"devices_per_host = {devices_per_host}",
        "",
        "[device]",
        f'name = "{device.name}"',
        f"memory = {device.memory}",
        f"peak_flops = {_table(device.peak_flops)}  # measured, of the best size",
        f"memory_bandwidth = {device.memory_bandwidth:.4g}",
        f"launch = {device.launch:.4g}",
    ]
    if any(device.call):
        lines.append(f"call = {_table(device.call._asdict())}")
    if device.step is not None:
        lines.append(f"step = {_table(device.step._asdict())}")
    if device.alone:
        lines.append(f"alone = {_points(device.alone)}  # devices, share of seconds")
    if efficiency is not None:
        lines += ["", "[device.efficiency]"]
        points = (f"{name} = {_points(it)}" for name, it in efficiency.matrix.items())
        lines.append(f"matrix = {{ {', '.join(points)} }}")
        lines.append(f"memory = {_points(efficiency.memory)}")
        if efficiency.convolution:
            points = (f"{name} = {_points(it)}" for name, it in efficiency.convolution.items())
            lines.append(f"convolution = {{ {', '.join(points)} }}")
        if efficiency.elementwise:
            lines.append(f"elementwise = {_points(efficiency.elementwise)}")
    lines += ["", "[intra_host]", *_link(fast), f"overlap = {fast.overlap:.3g}"]
    if fast.collectives:
        lines += ["", "[intra_host.collectives]"]
    for kind, sizes in fast.collectives.items():
        for size, cost in sizes.items():
            lines.append(f"{kind}.{size} = {_cost(cost)}")
    lines += ["", f"# {comment}", "[inter_host]", *_link(fit.machine.inter_host)]
    lines += ["", "[calibration]"]
    lines += [f'{key} = "{value}"' for key, value in about.items()]
    lines.append(f"spread = {fit.spread:.3f}  # median of half the distance of the quartiles")
    if fit.programs:
        lines.append("# what programs take, over or beside chains of one op (docs/clusters.md)")
        lines.append(f"programs = {_table(fit.programs)}")
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


def _link(link: Link) -> list[str]:
    lines = [f"bandwidth = {link.bandwidth:.4g}", f"latency = {link.latency:.4g}"]
    if link.transfer is not None:
        bandwidth, latency = link.transfer
        lines.append(f"transfer = {{ bandwidth = {bandwidth:.4g}, latency = {latency:.4g} }}")
    return lines


def _table(figures: Mapping[str, float]) -> str:
    return f"{{ {', '.join(f'{name} = {figure:.4g}' for name, figure in figures.items())} }}"


def _cost(cost: Cost | Curve) -> str:
    if isinstance(cost, Curve):
        return f"{_points(cost.points)}  # bytes and seconds"
    return f"{{ alpha = {cost.start:.4g}, beta = {1 / max(cost.per_byte, 1e-15):.4g} }}"


def _points(points: Points) -> str:
    return f"[{', '.join(f'[{size:.6g}, {figure:.4g}]' for size, figure in points)}]"
