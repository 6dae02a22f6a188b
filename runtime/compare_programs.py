"""Compares a plan of a program with the program itself on one device, on random arguments.

A program has the size of one micro-batch. With B > 1, all micro-batches hold the same data, so runs
of the program on one device give the results of a step: averages and new states are those after one
micro-batch, except for states that the forward part carries from one to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from alpa import passes
from alpa.dialects import ir, main_function, separate, terminator, walk
from alpa.passes.pipelines.clock import Clock
from alpa.passes.plan.data import Program
from alpa.runtime.comparison import Comparison
from alpa.runtime.dtypes import is_integer
from alpa.runtime.loading import load
from alpa.runtime.noise import Output, Reference, Run, compare_with_noise
from alpa.runtime.pjrt import CompilerOptions
from alpa.runtime.reference import random_arguments, unplanned


def compare_programs(
    source: ir.Module,
    planned: ir.Module,
    *,
    seed: int = 0,
    labels: Sequence[str] | None = None,
    clock: Clock | None = None,
    compiler_options: CompilerOptions | None = None,
) -> Comparison:
    """Runs a plan in this process and the program on one device, and compares their results.

    Args:
        source: the program, at the size of one micro-batch.
        planned: its plan, for at most as many devices as JAX has.
        seed: the seed of the random arguments.
        labels: names of the results; by default their numbers.
        clock: records the time of each phase.
        compiler_options: XLA's, for the plan.

    Raises:
        LoadError: the plan cannot be run.
        ValueError: JAX has fewer devices than the plan needs, or the results differ in number or
            shape.
    """
    clock = clock or Clock()
    source = passes.run(separate(source.operation), "import-hlo", on_remark=lambda *_: None)
    with clock.phase("compile"):
        executable = load(planned, compiler_options=compiler_options, on_progress=clock.on_phase)
    program = executable.program
    arguments = drawn_arguments(source, program, seed)
    whole = _repeated(program, arguments)
    for name in ("first run", "second run"):
        with clock.phase(name):
            results = jax.block_until_ready(executable(*whole))
    return compare_with_noise(
        results, arguments, one_device(source, program), _outputs(source, program, labels), clock
    )


def drawn_arguments(source: ir.Module, program: Program, seed: int) -> list[np.ndarray]:
    """Draws arguments at the size of a micro-batch, with moments at zero and step counts at one.

    In step zero, a learning rate with warm-up would be zero.
    """
    arguments = random_arguments(source, seed)
    return [
        np.full_like(array, is_integer(array.dtype)) if is_moment(program, n, array) else array
        for n, array in enumerate(arguments)
    ]


def is_moment(program: Program, number: int, array: np.ndarray) -> bool:
    """Whether an argument is a moment or a step count: state that only the update reads.

    A single float, such as a learning rate, is neither.
    """
    return (is_integer(array.dtype) or bool(array.ndim)) and number in _optimizer_states(program)


def one_device(source: ir.Module, program: Program) -> Reference:
    """The program on one device, run once per micro-batch that can differ."""

    def step(run: Run) -> Run:
        return lambda arguments: _by_micro_batches(run, program, arguments)

    return Reference(
        description="XLA on one device", run=step(unplanned(source)), module=source, step=step
    )


def narrow_results(source: ir.Module) -> Iterator[bool]:
    """For each result, whether 16-bit floats contribute to it."""
    flat = passes.run(separate(source.operation), "simplify-trivial-ops", on_remark=_ignore_remark)
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


def _ignore_remark(location: ir.Location, message: str) -> None:
    """Ignores remarks, because the plan has made them already."""


def _outputs(source: ir.Module, program: Program, labels: Sequence[str] | None) -> list[Output]:
    states = {
        result.number: role.index
        for result in program.results
        if (role := result.attributes.role) is not None and role.kind == "state"
    }
    types = [str(type_) for type_ in main_function(source).type.results]
    return [
        Output(
            label=labels[n] if labels else str(n),
            type=types[n],
            state=states.get(n),
            is_narrow=narrow,
        )
        for n, narrow in enumerate(narrow_results(source))
    ]


def _optimizer_states(program: Program) -> set[int]:
    """The numbers of the state arguments that no forward or backward part reads."""
    states, read = (
        {a.number for a in program.arguments if a.value in values}
        for values in (program.states, program.parameters)
    )
    return states - read


def _repeated(program: Program, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The arguments of a whole step with equal micro-batches."""
    whole = list(arguments)
    for argument in program.arguments:
        dim = argument.attributes.batch_dim
        if argument.attributes.role == "batch" and dim is not None:
            parts = [arguments[argument.number]] * program.num_micro_batches
            whole[argument.number] = np.concatenate(parts, axis=dim)
    return whole


def _by_micro_batches(run: Run, program: Program, arguments: Sequence[Any]) -> list[np.ndarray]:
    """The results of a step, from one run per micro-batch that can differ."""
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
        run_ = [np.asarray(array) for array in run(now)]
        runs += [run_] if carried else [run_] * batches
        for number, index in carried.items():
            now[index] = run_[number]
    step = list(runs[-1])
    for number, role in roles.items():
        arrays = [run_[number] for run_ in runs]
        if role is not None and role.kind == "concat":
            step[number] = np.concatenate(arrays, axis=role.index)
        elif role is not None and role.kind in ("sum", "mean"):
            total = np.sum(arrays, axis=0, dtype=arrays[0].dtype)
            step[number] = total if role.kind == "sum" else total / np.array(batches, total.dtype)
    return step
