"""Plans a program, runs the plan on virtual CPU devices, and compares it with XLA on one device.

    python -m alpa.tools.run_file step.mlir --cluster cpu:2x4 --num-layers 4 --num-stages 2

Arguments are random, from a seed. Arrays that only the update reads start at zero, as moments do,
and whole numbers at one, where a learning rate that is warmed up is not zero. Constants whose
values were left out of the file become arguments; `--dim N=M` shrinks the program first, as
`alpa.tools.shrink` does. `--roles` says what arguments and results are, as for `alpa-plan`.

With B > 1 micro-batches every micro-batch is the same one, so that runs of the program on one
device say what the step gives: averages and new states are as after one micro-batch, except for
states that the forward part carries from one to the next.

A result is equal if `max|a-b| <= 1e-4 max|ref|`, or 2e-2 where 16-bit floats go into it. In 32 and
64 bits a new state is asked that of its change, its own rounding apart: a step changes a parameter
by little. A new state that is not equal is held against a run in 64 bits as well: an adaptive
optimizer divides by the root of a gradient's square, so it blows up the noise of a gradient that is
zero but for noise. It is equal, too, if its distance to that run is at most 4 times that of XLA's
result. `--widen` computes everything in 64 bits: what differs then is the plan's fault.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa import passes, runtime
from alpa.dialects import ir, main_function, stablehlo, terminator, walk
from alpa.passes import PassError, pipeline
from alpa.passes.analysis.planned import Program
from alpa.passes.analysis.roles_file import RolesError, RolesFile
from alpa.passes.cost.cluster import Cluster, ClusterError
from alpa.runtime.pjrt import separate
from alpa.runtime.planning import Clock, PlanningError, run_pass
from alpa.runtime.reference import Comparison, compare, random_arguments, run_unplanned
from alpa.tools import shrink
from alpa.tools.errors import fail
from alpa.tools.guard import guard, parse_within

_ADAPTIVE = 4  # times the distance of plain jax to the run in 64 bits
_EXAMPLES = """\
examples:
  python -m alpa.tools.run_file step.mlir --cluster cpu:2x4 --num-layers 4 --num-stages 2
  python -m alpa.tools.run_file llm.mlir --dim 2560=64 --dim 8192=128
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One result: its type, its comparison, and the other yardstick where the first one failed."""

    type: str
    comparison: Comparison
    by: str = ""


def plan(module: ir.Module, options: dict[str, str], clock: Clock) -> ir.Module:
    """Runs the pipeline `alpa` in place.

    Raises:
        PlanningError: a pass cannot go on.
    """
    for name in pipeline.PIPELINES["alpa"]:
        run_pass(name, options, module, clock)
    return module


def run(source: ir.Module, planned: ir.Module, seed: int, clock: Clock) -> list[Row]:
    """Runs both programs on the same random arguments and compares their results.

    Raises:
        LoadError: the plan cannot be run.
    """
    with clock.phase("compile"):
        executable = runtime.load(planned)
    arguments = random_arguments(source, seed)
    for number in _optimizer_states(executable.program):
        array = arguments[number]
        if array.dtype.kind in "iu" or array.ndim:
            arguments[number] = np.full_like(array, array.dtype.kind in "iu")
    whole = _repeated(executable.program, arguments)
    for name in ("first run", "second run"):
        with clock.phase(name):
            results = jax.block_until_ready(executable(*whole))
    with clock.phase("one device"):
        reference = _on_one_device(source, executable.program, arguments)

    states = {
        result.number: arguments[role.index]
        for result in executable.program.results
        if (role := result.attributes.role) is not None
        if role.kind == "state" and role.index is not None
    }
    rows: list[Row] = []
    types = [str(type_) for type_ in main_function(source).type.results]
    for index, narrow in enumerate(_narrow_results(source)):
        old = None if narrow else states.get(index)
        row = _compared(index, results[index], reference[index], old, narrow=narrow)
        rows.append(Row(type=types[index], comparison=row))
    doubtful = [i for i in states if not rows[i].comparison.ok]
    if doubtful:
        with clock.phase("one device, 64 bits"):
            exact = _on_one_device(widened(source), executable.program, arguments)
        for i in doubtful:
            row = _by_distance(i, results[i], reference[i], exact[i])
            rows[i] = Row(type=types[i], comparison=row, by=f"{_ADAPTIVE} max|xla-f64|")
    return rows


def widened(module: ir.Module) -> ir.Module:
    """A copy of a program that computes all real floats in 64 bits and rounds nowhere between."""
    module = separate(module.operation)

    def new_type(type_: ir.Type) -> ir.Type:
        if not isinstance(type_, ir.RankedTensorType):
            return type_
        if not isinstance(type_.element_type, ir.FloatType):
            return type_
        return ir.RankedTensorType.get(type_.shape, ir.F64Type.get(), type_.encoding)

    def new_constant(op: shrink.Constant) -> ir.Attribute:
        type_ = ir.RankedTensorType(new_type(op.results[0].type))
        if type_ == op.results[0].type:
            return op.attributes["value"]
        elements = ir.DenseElementsAttr(op.attributes["value"])
        if not elements.is_splat:
            return shrink.dense(shrink.numpy_elements(op).astype(np.float64), type_)
        value = ir.FloatAttr(elements.get_splat_value()).value
        return ir.DenseElementsAttr.get_splat(type_, ir.FloatAttr.get(ir.F64Type.get(), value))

    with module.context, ir.Location.unknown():
        shrink.rewrite_types(module, new_type, new_constant)
        for op in list(walk(module.body)):
            if isinstance(op, stablehlo.ReducePrecisionOp):
                op.result.replace_all_uses_with(op.operand)
                op.operation.erase()
    module.operation.verify()
    return module


def _narrow_results(source: ir.Module) -> Iterator[bool]:
    """Whether 16-bit floats go into each result."""
    flat = passes.run(separate(source.operation), "simplify-trivial-ops")
    block = main_function(flat).entry_block
    for result in terminator(block).operands:
        waiting, seen = [result], set[ir.Value]()
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            if not isinstance(value.owner, ir.Block):
                inner = [op for region in value.owner.regions for op in walk(region.blocks[0])]
                waiting += [*value.owner.operands, *(v for op in inner for v in op.operands)]
        yield any(str(ir.RankedTensorType(v.type).element_type) in ("bf16", "f16") for v in seen)


def _optimizer_states(program: Program) -> Iterator[int]:
    """The numbers of the state arguments that no forward or backward part reads."""
    read = {v for f in program.fragments if f.part != "update" for v in f.inputs}
    read |= {transfer.source for transfer in program.transfers}
    states = {a.number for a in program.arguments if a.attributes.role == "state"}
    yield from sorted(states - {a.number for a in program.arguments if a.value in read})


def _repeated(program: Program, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The arguments of a whole step: every micro-batch is the same."""
    whole = list(arguments)
    for argument in program.arguments:
        dim = argument.attributes.batch_dim
        if argument.attributes.role == "batch" and dim is not None:
            parts = [arguments[argument.number]] * program.num_micro_batches
            whole[argument.number] = np.concatenate(parts, axis=dim)
    return whole


def _on_one_device(
    source: ir.Module, program: Program, arguments: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """What a step gives, by as many runs of one micro-batch as can differ from one another."""
    batches, now = program.num_micro_batches, list(arguments)
    forward = {a.number for a in program.arguments if a.value in program.varying}
    roles = {result.number: result.attributes.role for result in program.results}
    carried = {
        number: role.index
        for number, role in roles.items()
        if role is not None and role.kind == "state" and role.index in forward
    }
    runs: list[list[np.ndarray]] = []
    while len(runs) < batches:
        results = jax.block_until_ready(run_unplanned(source, now))
        run_ = [np.asarray(array) for array in results]
        runs += [run_] if carried else [run_] * batches
        for number, index in carried.items():
            now[index] = run_[number]
    step = runs[-1]
    for number, role in roles.items():
        arrays = [run_[number] for run_ in runs]
        if role is not None and role.kind == "concat":
            step[number] = np.concatenate(arrays, axis=role.index)
        elif role is not None and role.kind in ("sum", "mean"):
            total = np.sum(arrays, axis=0, dtype=arrays[0].dtype)
            step[number] = total if role.kind == "sum" else total / np.array(batches, total.dtype)
    return step


def _compared(
    index: int, result: Any, expected: np.ndarray, old: np.ndarray | None, *, narrow: bool
) -> Comparison:
    """One result against what it should be; or their differences from an old state."""
    dtype = "bfloat16" if narrow else expected.dtype.name
    if old is None or expected.dtype.kind in "biu":
        return replace(compare([result], [expected], dtype)[0], index=index)
    a, b, before = (np.asarray(array).astype(np.float64) for array in (result, expected, old))
    (row,) = compare([a - before], [b - before], dtype)
    rounding = float(jnp.finfo(expected.dtype).eps * np.max(np.abs(b), initial=0))
    bound = row.bound + rounding
    return Comparison(index=index, error=row.error, bound=bound, ok=row.error <= bound)


def _by_distance(index: int, result: Any, plain: Any, exact: Any) -> Comparison:
    """The distance to the exact result against the distance that XLA's result has."""
    exact = np.asarray(exact)
    error, bound = (
        float(np.max(np.abs(np.asarray(array).astype(exact.dtype) - exact), initial=0))
        for array in (result, plain)
    )
    return Comparison(
        index=index, error=error, bound=_ADAPTIVE * bound, ok=error <= _ADAPTIVE * bound
    )


def _print(rows: Sequence[Row], seconds: dict[str, float], *, quiet: bool) -> None:
    print(*(f"{name} {value:.2f} s" for name, value in seconds.items()), sep=", ")
    wrong = [row for row in rows if not row.comparison.ok]
    shown = [row for row in rows if not (quiet and row.comparison.ok)]
    if shown:
        print(f"{'result':>6}  {'type':28} {'max|a-b|':>10} {'bound':>10}      of")
    for row in shown:
        c = row.comparison
        mark = "ok" if c.ok else "DIFFERS"
        print(f"{c.index:6}  {row.type:28} {c.error:10.2e} {c.bound:10.2e}  {mark:7} {row.by}")
    worst = max((_share(row.comparison) for row in rows), default=0.0)
    print(
        f"{len(rows) - len(wrong)} of {len(rows)} results are equal; "
        f"the worst has {worst:.3g} times its bound"
    )


def _share(comparison: Comparison) -> float:
    if not comparison.error:
        return 0.0
    return comparison.error / comparison.bound if comparison.bound else float("inf")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m alpa.tools.run_file",
        description="Plans a program, runs it on virtual CPU devices, compares with one device.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="a program, text or bytecode")
    parser.add_argument("--cluster", default="cpu:2x4", help="default: %(default)s")
    for name in ("num-layers", "num-stages", "num-micro-batches"):
        parser.add_argument(f"--{name}", metavar="N", help=f"the option {name} of the passes")
    parser.add_argument("--roles", metavar="ROLES.toml", help="roles of arguments and results")
    parser.add_argument("--seed", type=int, default=0, help="of the arguments; default: 0")
    parser.add_argument(
        "--dim",
        dest="dims",
        action="append",
        default=[],
        type=shrink.parse_size,
        metavar="N=M",
        help="make M of every size N before planning; may be repeated",
    )
    parser.add_argument("--widen", action="store_true", help="make all real floats 64 bits wide")
    parser.add_argument("--quiet", action="store_true", help="list only results that differ")
    parser.add_argument("-o", dest="output", type=Path, metavar="OUT", help="write the plan, too")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; the exit status is 0 if every result is equal."""
    options = _parser().parse_args(arguments)
    names = ("cluster", "num_layers", "num_stages", "num_micro_batches")
    pass_options = {
        name.replace("_", "-"): value
        for name in names
        if (value := getattr(options, name)) is not None
    }
    try:
        devices = Cluster.parse(options.cluster).num_devices
        roles = None if options.roles is None else RolesFile.read(options.roles)
        # Both have to be said before jax touches a device.
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
        clock = Clock()
        source = parse_within(options.file)
        if roles is not None:
            roles.apply(source)
        shrink.elided_to_arguments(source)
        if options.dims:
            shrink.shrink(source, dict(options.dims))
        source.operation.verify()
        if options.widen:
            source = widened(source)
        planned = plan(separate(source.operation), pass_options, clock)
        if options.output is not None:
            options.output.write_text(f"{planned.operation.get_asm()}\n")
        rows = run(source, planned, options.seed, clock)
    except (PlanningError, RolesError) as error:
        print(error, file=sys.stderr)
        return 1
    except (ir.MLIRError, PassError, OSError, ValueError, ClusterError) as error:
        return fail(error, options.file)
    _print(rows, clock.seconds, quiet=options.quiet)
    return 0 if all(row.comparison.ok for row in rows) else 1


if __name__ == "__main__":
    guard("run_file")
    sys.exit(main())
