"""Whether the micro-batches of a planned program can be run as the plan says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from alpa.dialects.attributes import Part
from alpa.dialects.bindings import body, func, ir
from alpa.passes.analysis.graph import Graph
from alpa.passes.base import PassError
from alpa.passes.plan.data import (
    ACCUMULATORS,
    DONATED,
    EXTRA_RESULTS,
    Fragment,
    Program,
    ProgramResult,
    Transfer,
)

MOST_MICRO_BATCHES = 1 << 16
"""Each has instructions of its own; with more, a step would be ready to run after minutes only."""

ORDER: dict[Part | None, int] = {None: 0, "forward": 1, "backward": 2, "update": 3}
"""In which order values are made; arguments come first."""


def check_num_micro_batches(function: func.FuncOp, number: int) -> None:
    """Raises `PassError` at a function for a number of micro-batches that no plan has."""
    if not 1 <= number <= MOST_MICRO_BATCHES:
        raise PassError(
            function, f"num-micro-batches is {number:,}; expected 1 to {MOST_MICRO_BATCHES:,}"
        )


def check_program(program: Program, ops: Sequence[ir.OpView], main: func.FuncOp) -> None:
    """Raises `PassError` at one of `ops`, the program's steps, or at `main`."""
    unsettled = _unsettled(program, ops)
    for step, op in zip(program.steps, ops, strict=True):
        _check_step(program, step, op, unsettled)
    for problem in _problems(program):
        raise PassError(main, problem)


def _unsettled(program: Program, ops: Sequence[ir.OpView]) -> frozenset[int]:
    """The values that updates read and that differ between the micro-batches.

    They are neither totals nor states that the forward part has carried on, but made of the batch,
    or of such a state. Forward fragments make constants, too, and hand them on.
    """
    if program.num_micro_batches == 1:
        return frozenset()
    carried = {program.sources[value] for value in program.carries.values()}
    found = {
        value
        for value in program.read_by("update") & program.varying - program.totals
        if program.sources[value] not in carried
    }
    if not found:
        return frozenset()
    changing = {a.value for a in program.arguments} & program.varying
    for step, op in zip(program.steps, ops, strict=True):
        if isinstance(step, Transfer):
            changing |= {step.target} if step.source in changing else set()
        elif step.part != "update":
            graph = Graph.of(body(op))
            depends = graph.depends(n for n, v in enumerate(step.inputs) if v in changing)
            pairs = zip(step.outputs, graph.returned, strict=True)
            changing.update(value for value, inner in pairs if depends[inner])
    return frozenset(found & changing)


def _check_step(
    program: Program, step: Fragment | Transfer, op: ir.OpView, unsettled: frozenset[int]
) -> None:
    if isinstance(step, Transfer):
        return
    results, arguments = len(step.outputs), len(step.inputs) + len(step.accumulators)
    for name, numbers, count, what in (
        (ACCUMULATORS, step.accumulators, results, "results"),
        (EXTRA_RESULTS, step.extra_results, results, "results"),
        (DONATED, step.donated, arguments, "arguments"),
    ):
        if not all(0 <= number < count for number in numbers):
            raise PassError(op, f"{name} is {list(numbers)}; the fragment has {count} {what}")
    for number, value in enumerate(step.inputs):
        part = program.parts[value]
        if ORDER[part] > ORDER[step.part]:
            raise PassError(
                op,
                f"operand {number} of this {step.part} fragment is made by the {part} part; "
                "over the micro-batches every forward runs before its backward, "
                "and these before the update",
            )
        if step.part == "update" and value in unsettled:
            it = program.values[value]
            type_ = "x".join([*map(str, it.shape), it.dtype])
            remedy = (
                "return it as a result whose mean or sum is meant, which the update then reads"
                if it.is_float
                else "where the update draws random numbers, mark the gradients by alpa.grad, and "
                "it uses the key that the step is given"
            )
            raise PassError(
                op,
                f"operand {number} of this update fragment, a {type_}, "
                + ("an argument" if part is None else f"made by the {part} part")
                + f", differs between the {program.num_micro_batches} micro-batches, "
                f"and the update runs once, after all of them; {remedy}, or plan with 1 "
                "micro-batch",
            )
    for number, value in enumerate(step.outputs):
        is_float = program.values[value].is_float
        if value in program.totals and not is_float and not program.is_exact:
            raise PassError(
                op,
                f"result {number} of type {program.values[value].dtype} flows from a backward into "
                f"an update fragment and would be added up over {program.num_micro_batches} "
                "micro-batches, which is meant for floating-point gradients only; plan with 1 "
                "micro-batch",
            )


def _problems(program: Program) -> Iterator[str]:
    """What is wrong with arguments, results and the number of micro-batches, in words."""
    for what, one in (
        *((f"argument {i}", argument) for i, argument in enumerate(program.arguments)),
        *((f"result {i}", result) for i, result in enumerate(program.results)),
    ):
        shape, part = program.values[one.value].shape, one.attributes.slice
        if one.number < 0:
            yield f"{what} has the number {one.number} in the given program"
        if part is None:
            continue
        fits = 0 <= part.dim < len(shape) and part.start >= 0
        if not fits or part.stop - part.start != shape[part.dim]:
            yield (
                f"{what} of shape {list(shape)} cannot be rows {part.start} to {part.stop} of "
                f"dimension {part.dim}"
            )
    numbers = {result.number for result in program.results}
    if numbers != set(range(len(numbers))):
        yield f"the results' alpa.output are {sorted(numbers)}: one is missing"
    batches = program.num_micro_batches
    if not 1 <= batches <= MOST_MICRO_BATCHES:
        yield f"alpa.plan has num_micro_batches = {batches}; it takes 1 to {MOST_MICRO_BATCHES:,}"
    if batches == 1:
        return
    for i, argument in enumerate(program.arguments):
        dim, rank = argument.attributes.batch_dim, len(program.values[argument.value].shape)
        if argument.attributes.role == "batch" and (dim is None or not 0 <= dim < rank):
            yield (
                f"argument {i} is a batch of {batches} micro-batches and needs alpa.batch_dim "
                f"below its rank of {rank}; it has {dim}"
            )
    for i, result in enumerate(program.results):
        problem = _result_problem(program, result) if result.value in program.varying else None
        if problem is not None:
            yield f"result {i} {problem}"


def _result_problem(program: Program, result: ProgramResult) -> str | None:
    """What is wrong with a result that each micro-batch has a version of; None if nothing is."""
    role, value = result.attributes.role, program.values[result.value]
    batches, part = program.num_micro_batches, program.parts[result.value]
    if role is None:
        return (
            f"has {batches} versions, one per micro-batch, and no alpa.result that says how they "
            "become one: concat:<dim>, mean, sum, last or state:<argument>"
        )
    if role.kind == "concat" and not 0 <= (role.index or 0) < len(value.shape):
        return f'of rank {len(value.shape)} has alpa.result = "{role}"'
    if result.sum_kind is not None and value.dtype == "i1":
        return (
            f"is boolean and has no {role} over the {batches} micro-batches; return a number in "
            "its place"
        )
    if role.kind == "state" and part == "forward" and program.is_exact:
        return (
            f"is the new state of argument {role.index} and comes from a forward fragment, which "
            f"would change it in each of the {batches} micro-batches; a step that is exact changes "
            "it once, in the update; plan with 1 micro-batch"
        )
    if role.kind == "state" and part == "backward":
        return (
            f"is the new state of argument {role.index} and comes from a backward fragment; with "
            f"{batches} micro-batches it has to come from a forward fragment, which carries it on, "
            "or from an update, which runs once, after all of them: where the step goes on to "
            "differentiate with the new state, let it read the old one, make two steps of it, or "
            "plan with 1 micro-batch"
        )
    return None
