"""Compares a plan's predicted collectives and memory with XLA's, module by module.

    python -m alpa.tools.check_plan planned.mlir

Every fragment is exported and compiled for the devices of the plan's cluster: a `cpu` cluster's are
as many virtual devices as the mesh has; GPUs need not be there, but the extra `gpu-aot` does.

* On CPU, collectives are read directly after XLA's SPMD partitioner, before the backend merges and
  rewrites them; on GPUs, from the final program.
  The tool compares payload bytes by kind and in total. The payload of a collective is a device's
  part of the full array: the result of an all-gather, the operand of any other. An all-reduce whose
  result each device only slices to its own part counts as a reduce-scatter, as accelerators run it.
  `sent` is what a device sends on a ring, where an all-reduce is a reduce-scatter and an
  all-gather.
* Memory is arguments + results - aliased + temporaries per device, predicted for the scheduler of
  these devices. On CPU, XLA schedules to save memory, and all-reduces are not merged;
  `--default-schedule` compiles as the local executor does.

Loops count once per trip. Totals count each module once. Differences of up to 1 KiB in collectives
or 4 KiB in memory are ignored: scalars, padding and tables of pointers.

The exit status is 0 if every module, and each kind in it, is within the tolerances.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from alpa.dialects import ir, main_function, separate
from alpa.dialects.checks import CheckError, check_planned
from alpa.passes import PassError
from alpa.passes.plan.attribute import plan_and_any_cluster
from alpa.passes.plan.predicted_collectives import Collective
from alpa.passes.plan.reader import read_planned
from alpa.runtime.ahead_of_time.compilation import CompilationError, compile_ahead, gpu_of
from alpa.runtime.ahead_of_time.module_check import ModuleCheck, checks, ratio, total
from alpa.runtime.exported import exported, module_name
from alpa.runtime.hlo_text import HloError
from alpa.runtime.pjrt import Device
from alpa.runtime.truth import FAST, SAVING_MEMORY, truth
from alpa.tools.arguments import share
from alpa.tools.errors import fail
from alpa.tools.guard import guard, parse_within
from alpa.tools.interrupts import until_interrupted

COLLECTIVES_SLACK = 1024
MEMORY_SLACK = 4096
_EXAMPLE = """\
example:
  alpa-opt step.mlir --pipeline='alpa{cluster=cpu:2x4 num-micro-batches=4}' -o planned.mlir
  python -m alpa.tools.check_plan planned.mlir --memory-tolerance 0.3
"""


@dataclass(frozen=True, kw_only=True)
class Tolerances:
    """The shares of the real number by which the predicted one may differ."""

    collectives: float = 0.10
    memory: float = 0.20

    def exceeded(self, check: ModuleCheck) -> list[str]:
        """Names what differs by more; kinds are measured by the real total."""
        sums = total(check.payloads.values())
        allowed = self.collectives * sums[1] + COLLECTIVES_SLACK
        pairs = {**check.payloads, "collectives": sums}
        found = [name for name, (a, b) in pairs.items() if abs(a - b) > allowed]
        peak, real = check.memory.peak, check.real.peak
        if abs(peak - real) > self.memory * real + MEMORY_SLACK:
            found.append("memory")
        return found


def check(
    module: ir.Module, devices: Sequence[Device], *, default_schedule: bool = False
) -> list[ModuleCheck]:
    """Predicts and compiles every fragment of a planned module for CPU, without changing it.

    Raises:
        CheckError, PassError: the module is not planned, or cannot be exported.
        ValueError: there are fewer devices than a mesh has.
        HloError: XLA's text cannot be read.
        jax.errors.JaxRuntimeError: XLA refuses a module.
    """
    stages = exported(module)
    sizes = {mesh.name: len(mesh.devices) for mesh in stages.program.meshes}
    if max(sizes.values()) > len(devices):
        raise ValueError(f"a mesh has {max(sizes.values())} devices, only {len(devices)} are here")
    options = FAST if default_schedule else SAVING_MEMORY
    real = {
        name: truth(
            separate(stages.nested[name]),
            devices[: sizes[fragment.mesh]],
            name=name,
            compiler_options=options,
        )
        for fragment in stages.program.fragments
        for name in [module_name(fragment)]
    }
    return checks(stages, real)


def check_for_gpus(module: ir.Module) -> list[ModuleCheck]:
    """As `check`, for GPUs that need not be there.

    Raises:
        CheckError, PassError: the module is not planned, or cannot be exported.
        CompilationError: XLA refuses a module.
    """
    stages = exported(module)
    results = compile_ahead(stages)
    return checks(stages, {name: result.truth for name, result in results.items()})


def table(found: Sequence[ModuleCheck], tolerances: Tolerances, *, for_gpus: bool = False) -> str:
    """Formats predicted and real numbers and their ratio, per module and in total."""
    width = max([len("module"), *(len(c.name) for c in found)])
    lines = [f"{'module':{width}}  {'':18} {'predicted':>12} {'real':>12} {'ratio':>6}"]
    for c in found:
        differing, name = tolerances.exceeded(c), c.name
        for what, (predicted, real) in _rows(c):
            mark = "  DIFFERS" if what in differing else ""
            lines.append(f"{name:{width}}  {_row(what, predicted, real)}{mark}")
            name = ""
    lines.append("")
    kinds = sorted({kind for c in found for kind in c.payloads})
    totals = [
        *((kind, total(c.payloads.get(kind, (0, 0)) for c in found)) for kind in kinds),
        ("collectives", total(pair for c in found for pair in c.payloads.values())),
        ("sent", total((_sent(c.collectives), _sent(c.real.collectives)) for c in found)),
        ("memory", total((c.memory.peak, c.real.peak) for c in found)),
    ]
    name = "total"
    for what, (predicted, real) in totals:
        lines.append(f"{name:{width}}  {_row(what, predicted, real)}")
        name = ""
    if not for_gpus and any(c.real.has_16_bit_floats for c in found):
        lines.append(
            "16-bit floats: on CPU, XLA computes many of them in 32 bits, so memory is that of 32 "
            "bits; collectives are read before that"
        )
    return "\n".join(lines)


def _rows(c: ModuleCheck) -> Iterator[tuple[str, tuple[int, int]]]:
    yield from c.payloads.items()
    if len(c.payloads) > 1:
        yield "collectives", total(c.payloads.values())
    yield "memory", (c.memory.peak, c.real.peak)


def _row(what: str, predicted: int, real: int) -> str:
    return f"{what:18} {predicted:12} {real:12} {ratio(predicted, real):6.3f}"


def _sent(collectives: Sequence[Collective]) -> int:
    return round(sum(c.sent for c in collectives))


def as_json(found: Sequence[ModuleCheck], tolerances: Tolerances) -> dict[str, Any]:
    """The numbers of the table, and each collective."""
    return {
        "ok": not any(tolerances.exceeded(c) for c in found),
        "tolerances": asdict(tolerances),
        "modules": [{**c.to_json(), "differs": tolerances.exceeded(c)} for c in found],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m alpa.tools.check_plan",
        description="Compares a plan's predicted collectives and memory with XLA's.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="PLANNED", type=Path, help="a planned program")
    for name in ("collectives", "memory"):
        parser.add_argument(
            f"--{name}-tolerance",
            type=share,
            metavar="PART",
            default=getattr(Tolerances(), name),
            help="share by which predicted and real numbers may differ; default: %(default)s",
        )
    parser.add_argument(
        "--default-schedule", action="store_true", help="compile with XLA's own CPU options"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; the exit status is 0 if every module is within the tolerances."""
    options = _parser().parse_args(arguments)
    tolerances = Tolerances(
        collectives=options.collectives_tolerance, memory=options.memory_tolerance
    )
    try:
        module = parse_within(options.file)
        check_planned(module)
        _, cluster = plan_and_any_cluster(main_function(module))
        gpus = [gpu_of(kind.device.name) for kind in cluster.kinds]
        if not any(gpus):
            devices = max((len(mesh.devices) for mesh in read_planned(module).meshes), default=1)
            # Both must be set before JAX touches a device.
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", devices)
            found = check(module, jax.devices(), default_schedule=options.default_schedule)
        elif options.default_schedule:
            raise CompilationError(
                "--default-schedule is for CPU, and the plan is for "
                f"{', '.join(gpu.name for gpu in gpus if gpu)}; leave it out"
            )
        else:
            found = check_for_gpus(module)
    except (
        CompilationError,
        ir.MLIRError,
        CheckError,
        PassError,
        OSError,
        HloError,
        jax.errors.JaxRuntimeError,
    ) as error:
        return fail(error, options.file)
    if options.json:
        print(json.dumps(as_json(found, tolerances), indent=2))
    else:
        print(table(found, tolerances, for_gpus=any(gpus)))
    differing = {c.name: names for c in found if (names := tolerances.exceeded(c))}
    for name, whats in differing.items():
        print(f"@{name} differs in {', '.join(whats)}", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    guard("check_plan")
    sys.exit(until_interrupted("check_plan", main))
