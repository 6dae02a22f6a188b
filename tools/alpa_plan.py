"""`alpa-plan`: plans a program for a cluster and prints the plan.

    alpa-plan step.mlir --cluster h100:1x8 -o planned.mlir
    alpa-plan zoo:gpt-2.6b --cluster v100-16gb:8x8 --json plan.json

Runs the passes of `alpa`; on a terminal, standard error shows the current pass and its seconds.
Then prints the plan's table (`alpa.tools.plan_table`). A file must have the size of one
micro-batch. A zoo program is lowered at that size, for the given number of micro-batches, or for
each number that the search tries.

With `--verify`, XLA compiles every stage for the cluster's devices, which need not be here, and a
table shows its collectives, FLOPs and memory beside the plan's, and whether each mesh fits. With
`--verify=repair`, the program is planned again with less memory until all meshes fit, or until no
plan is found for so little memory, which is an error.

With `--export`, each stage's module for XLA is written to a folder, and its executable to
`executables` inside it, if this machine can compile for the cluster's devices.
`alpa.runtime.load(..., executables=...)` reads the executables there.

With `--compare-with-jax`, one step of the plan runs on virtual CPU devices and is compared with
plain JAX by the rules of `alpa.runtime.comparison`.

The exit status is 0, 1 after an error, or 130 after Ctrl-C. Errors go to standard error as
`file:line:column: error: message`, and no table is printed then. The exit status is also 1 if a
verified mesh does not fit, or if the plan's results differ from plain JAX by more than noise.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from alpa import passes
from alpa.dialects import ir
from alpa.passes.analysis.roles_file import RolesError, RolesFile
from alpa.passes.cost.cluster import Cluster, ClusterError, parse_cluster
from alpa.passes.cost.device import seconds_text, size_text
from alpa.passes.import_hlo import without_tuples
from alpa.passes.pipelines.clock import Clock
from alpa.passes.pipelines.diagnostics import Diagnostic, place_of
from alpa.passes.plan.table import plan_table
from alpa.runtime.choices import ChoiceError
from alpa.runtime.compile_options import compile_options
from alpa.runtime.micro_batches import Attempt, best_number, divisors, indivisible
from alpa.runtime.option_checks import schedule_text
from alpa.runtime.planning import Capabilities, Planned, PlanningError, Settings, plan
from alpa.runtime.progress import progress
from alpa.runtime.questions.compare import ComparisonError
from alpa.runtime.questions.explain import QuestionError
from alpa.runtime.report import ReportError
from alpa.runtime.report.comparison import comparison_page
from alpa.tools.alpa_plan_arguments import parse
from alpa.tools.alpa_plan_outputs import (
    CommandError,
    check_files,
    export_form,
    exports_executables,
    say,
    verify,
    write_outputs,
    write_texts,
)
from alpa.tools.alpa_plan_questions import (
    answers,
    are_asked,
    compared,
    given_hints,
    hints_of,
    price,
)
from alpa.tools.arguments import check_sizes
from alpa.tools.guard import guard
from alpa.tools.interrupts import until_interrupted
from alpa.tools.output import until_the_reader_goes
from alpa.tools.programs import ZOO, lowered, placed, read
from alpa.tools.reporting import check_report, report_page

# Planning a file needs no jax, which takes a second to import, so what needs it is imported by the
# functions that use it.
if TYPE_CHECKING:
    from alpa.runtime.comparison import Comparison


@dataclass(frozen=True, kw_only=True)
class _Result:
    """A plan, and the other attempts. `compare` runs the plan."""

    planned: Planned
    compare: Callable[[Clock], Comparison]
    attempts: tuple[Attempt, ...] = ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status."""
    return _run(parse(arguments))


def command(arguments: Sequence[str] | None = None) -> NoReturn:
    """The command `alpa-plan`."""
    guard("alpa-plan")
    options = parse(arguments)
    if _uses_jax(options):
        from alpa.tools.devices import stay_on_cpu  # noqa: PLC0415 - it needs jax

        stay_on_cpu()
    sys.exit(until_interrupted("alpa-plan", lambda: _run(options)))


def _uses_jax(options: argparse.Namespace) -> bool:
    """Whether anything is lowered, compiled or run."""
    if options.compare is not None:
        return False
    compiles = options.verify is not None or exports_executables(options)
    return options.program.startswith(ZOO) or compiles or options.compare_with_jax


def _run(options: argparse.Namespace) -> int:
    try:
        if options.compare is not None:
            comparison = compared(*options.compare)
            if options.report is not None:
                first, second = options.compare
                plans = {"the first plan": first, "the second plan": second}
                check_files({"--report": options.report}, plans)
                write_texts({options.report: comparison_page(comparison)})
            with until_the_reader_goes():
                print(comparison, end="")
            return 0
        return 0 if _process(options) else 1
    except (CommandError, ReportError) as error:
        say(f"alpa-plan: error: {error}")
    except (QuestionError, ChoiceError, ComparisonError) as error:
        say(f"alpa-plan: error: {error}")
    except ClusterError as error:
        say(f"{error.place or 'alpa-plan'}: error: {error.message}")
    except RolesError as error:
        say(str(error))
    except PlanningError as error:
        for diagnostic in error.diagnostics:
            say(str(placed(diagnostic, options.program)))
    return 1


def _process(options: argparse.Namespace) -> bool:
    """Plans and prints. Returns whether what was asked to be checked is right.

    Raises CommandError, ReportError, ClusterError, RolesError, PlanningError.
    """
    cluster = parse_cluster(options.cluster)
    if options.shrink and not options.compare_with_jax:
        raise CommandError("--shrink is for --compare-with-jax; add it, or remove --shrink")
    try:
        check_sizes("--shrink", options.shrink)
    except ValueError as error:
        raise CommandError(str(error)) from error
    if options.compare_with_jax:
        from alpa.tools.devices import DevicesError, make_devices  # noqa: PLC0415 - it needs jax

        try:
            make_devices(cluster.num_devices)
        except DevicesError as error:
            raise CommandError(str(error)) from error
    files = {
        "-o": options.output,
        "--json": options.json,
        "--report": options.report,
        "--save-hints": options.save_hints,
    }
    check_files(files, {"the program": options.program})
    if options.export is not None and options.export.exists() and not options.export.is_dir():
        raise CommandError(f"cannot write into {options.export}: it is not a folder")
    check_report(options)
    export_form(options)
    if options.no_executables and options.export is None:
        raise CommandError("--no-executables is for --export; add it, or remove --no-executables")
    if options.compiler_option and options.verify is None and not exports_executables(options):
        raise CommandError(
            "--compiler-option is for stages that --verify or --export compiles; add one of them, "
            "or remove --compiler-option"
        )
    try:
        platform = "cpu" if cluster.kinds[0].device.name == "CPU" else "gpu"
        compile_options(platform, dict(options.compiler_option))
    except ValueError as error:
        raise CommandError(str(error)) from error
    roles = None if options.roles is None else RolesFile.read(options.roles)
    try:
        settings = _settings(options)
    except ValueError as error:
        raise CommandError(str(error)) from error
    with _progress() as clock:
        find = _finder(options, roles, clock)
        free = None
        if options.force:  # Its price is that against the plan without it.
            free = find(replace(settings, force=given_hints(options)))
        result = find(settings)
        verification = None
        if options.verify is not None:
            verification = verify(options, result.planned, clock)
        if options.verify == "repair":
            machine = options.cluster.partition(",memory=")[0]
            if len(cluster.kinds) > 1 and verification is not None and not verification.fits:
                raise CommandError(
                    f"{verification.problem}; --verify repair is for hosts of one kind: give the "
                    "kinds less memory, such as v100-16gb:2x8,memory=13GiB+a100-40gb:2x8"
                )
            while verification is not None and not verification.fits:
                memory = verification.memory_to_plan_with(Cluster.parse(settings.cluster))
                settings = replace(settings, cluster=f"{machine},memory={memory}B")
                say(f"{verification.problem}; planning again with {size_text(memory)} per device")
                result = find(settings)
                usable = verification.meshes[0].usable
                verification = verify(options, result.planned, clock, usable)
        report = result.planned.numbers(clock)
        table = plan_table(result.planned.module, report)
        numbers = report.to_json()
        if verification is not None:
            both = json.loads(numbers) | {"verification": verification.to_json()}
            numbers = json.dumps(both, indent=2)
        cost = None if free is None else price(free.planned, report)
        answered = list(answers(options, result.planned, clock))
        texts = {
            options.json: numbers,
            options.report: report_page(
                options, result.planned, report, result.attempts, cost, clock
            ),
            options.save_hints: hints_of(result.planned) if options.save_hints else None,
        }
        executables = write_outputs(options, result.planned, texts, clock)
    for remark in result.planned.remarks:
        say(str(placed(remark, options.program)))
    with until_the_reader_goes():
        print(table)
        if len(result.attempts) > 1:
            print("\n".join(_tried(result.attempts, report.num_micro_batches)), end="\n\n")
        for answer in answered:
            print(answer)
        if cost is not None:
            print(cost)
        print(f"search: {report.search_seconds:.2f} s ({_phases(report.phases)})")
        if verification is not None:
            print(f"\n{verification}")
        if executables is not None:
            print(executables)
    fits = verification is None or verification.fits
    return (not options.compare_with_jax or _is_equal(result)) and fits


def _settings(options: argparse.Namespace) -> Settings:
    """Raises ValueError where options conflict, or the schedule is none."""
    return Settings(
        cluster=options.cluster,
        micro_batches=options.micro_batches,
        schedule=schedule_text(options.schedule),
        intra=options.intra,
        inter=options.inter,
        num_stages=options.num_stages,
        num_layers=options.num_layers,
        remat=options.remat,
        mesh_shape=options.mesh_shape,
        objective=options.objective,
        accumulate_dtype=options.accumulate_dtype,
        donate_states=options.donate_states,
        costs_folder=options.costs_folder,
        force=(*given_hints(options), *options.force),
        capabilities=Capabilities(meshes_over_hosts=not options.no_meshes_over_hosts),
    )


def _is_equal(result: _Result) -> bool:
    """Runs the plan and prints the comparison with plain JAX.

    Raises CommandError, PlanningError.
    """
    from jax.errors import JaxRuntimeError  # noqa: PLC0415 - it is jax

    from alpa.runtime.loading import LoadError  # noqa: PLC0415 - it needs jax

    try:
        with _progress() as clock:
            comparison = result.compare(clock)
    except JaxRuntimeError as error:
        said = "; ".join([str(error), *getattr(error, "__notes__", [])])
        raise CommandError(
            "the plan cannot be compared: XLA cannot compile or run it on virtual CPU devices: "
            f"{said}"
        ) from error
    except (LoadError, ValueError, ir.MLIRError, passes.PassError) as error:
        message = error.message if isinstance(error, passes.PassError) else str(error)
        raise CommandError(f"the plan cannot be compared: {message}") from error
    with until_the_reader_goes():
        print(f"\n{comparison}")
    return not comparison.is_fault


def _finder(
    options: argparse.Namespace, roles: RolesFile | None, clock: Clock
) -> Callable[[Settings], _Result]:
    """What plans the program. A file is read once, because it may be a pipe.

    Raises CommandError, RolesError, PlanningError.
    """
    if options.program.startswith(ZOO):
        return lambda settings: _plan_zoo(options, settings, roles, clock)
    module = _read_file(options, roles, clock)
    return lambda settings: _plan_file(options, settings, module, clock)


def _read_file(options: argparse.Namespace, roles: RolesFile | None, clock: Clock) -> ir.Module:
    if options.num_micro_batches == "auto":
        raise CommandError(
            "--num-micro-batches auto lowers the program for each number, which is impossible for "
            "a file; pass the number of micro-batches of its size per step"
        )
    if options.batch_size is not None:
        raise CommandError(
            "--batch-size is for zoo programs; a file has the size of one micro-batch, and "
            "--num-micro-batches sets their number"
        )
    with clock.phase("parse"):
        module = read(options.program, options.refine)
    if roles is not None:
        module = _with_roles(module, roles)
    return module


def _with_roles(module: ir.Module, roles: RolesFile) -> ir.Module:
    """The program with the roles of a file, which counts elements of tuples as the plan does.

    Raises RolesError, PlanningError.
    """
    try:
        module = without_tuples(module)
    except passes.PassError as error:
        problem = Diagnostic("error", place_of(error.location), error.message)
        raise PlanningError((problem,), error) from error
    roles.apply(module)
    return module


def _plan_file(
    options: argparse.Namespace, settings: Settings, module: ir.Module, clock: Clock
) -> _Result:
    settings = replace(settings, num_micro_batches=options.num_micro_batches or 1)
    planned = plan(module, settings, clock, keep=are_asked(options))
    devices, sizes = parse_cluster(options.cluster).num_devices, dict(options.shrink)

    def compare(clock: Clock) -> Comparison:
        from alpa.tools.comparing import compare_file, compare_shrunk  # noqa: PLC0415 - it needs jax

        if sizes:
            return compare_shrunk(module, settings, sizes, clock)
        return compare_file(module, planned.module, devices, options.program, clock)

    return _Result(planned=planned, compare=compare)


def _plan_zoo(
    options: argparse.Namespace, settings: Settings, roles: RolesFile | None, clock: Clock
) -> _Result:
    from alpa.tools import zoo  # noqa: PLC0415 - it needs jax
    from alpa.tools.comparing import compare_shrunk, compare_zoo  # noqa: PLC0415 - it needs jax

    name = options.program.removeprefix(ZOO)
    if roles is not None:
        raise CommandError(f"--roles is for files; {options.program} has its roles")
    if options.refine:
        raise CommandError(f"--refine is for files; {options.program} has no symbolic dimensions")
    try:
        program = zoo.get(name)
    except ValueError as error:
        raise CommandError(str(error)) from error
    batch = options.batch_size or program.global_batch_size
    numbers = divisors(batch)
    number = options.num_micro_batches
    if number not in (None, "auto"):
        if number not in numbers:
            raise CommandError(indivisible(batch, number))
        numbers = [number]
    forces = bool(options.force) or options.hints is not None
    named = options.report is not None or forces or are_asked(options)

    def lower(number: int) -> ir.Module:
        return lowered(program, batch // number, locations=named)

    found = best_number(numbers, lower, settings, clock, keep=are_asked(options))
    devices, sizes = parse_cluster(options.cluster).num_devices, dict(options.shrink)
    number = found.planned.plan.num_micro_batches

    def compare(clock: Clock) -> Comparison:
        if sizes:
            small = replace(settings, num_micro_batches=number)
            return compare_shrunk(lower(number), small, sizes, clock)
        return compare_zoo(program, batch, found.planned.module, devices, clock)

    return _Result(planned=found.planned, attempts=found.attempts, compare=compare)


def _tried(attempts: Sequence[Attempt], taken: int) -> list[str]:
    """Lists the numbers of micro-batches that were tried, with the outcome of each."""
    lines = ["micro-batches tried"]
    for attempt in sorted(attempts, key=lambda attempt: attempt.num_micro_batches):
        if attempt.seconds is not None:
            text = f"step {seconds_text(attempt.seconds)}"
        elif attempt.problem is not None:
            text = f"not possible: {attempt.problem.diagnostics[0].message}"
        else:
            text = f"skipped: takes at least {seconds_text(attempt.bound or 0)}"
        mark = "  (taken)" if attempt.num_micro_batches == taken else ""
        lines.append(f"  {attempt.num_micro_batches:>4}  {text}{mark}")
    return lines


def _phases(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())


@contextmanager
def _progress() -> Generator[Clock]:
    """Returns a clock whose phases a terminal shows."""
    with progress() as show:
        yield Clock(on_phase=show)


if __name__ == "__main__":
    command()
