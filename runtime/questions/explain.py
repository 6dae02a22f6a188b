"""Why a plan is as it is: `alpa-plan --explain`, `plan.explain(...)`.

    explain("state.params['wte']", ...)    the sharding of an argument, by name or number
    explain("model.py:42", ...)            the sharding of the largest value made at a line
    explain("stage 1", ...)                the layers, submesh and logical shape of a stage

Each other sharding or stage is forced, and the rest is solved again by the passes that made the
plan, so the difference is that of two plans by the same costs. For a sharding the stages stay as
they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from alpa.dialects import body, file_position, ir, main_function, mpmd, sdy, walk
from alpa.dialects.attributes import input_number, read_arguments, read_part
from alpa.dialects.mpmd_types import MeshTensor, mesh_of, read_topology
from alpa.dialects.sharding import Mesh, Sharding, op_shardings
from alpa.passes.analysis.graph import element_bytes
from alpa.passes.analysis.interface_names import Names
from alpa.passes.cost.device import size_text
from alpa.passes.pipelines.clock import Clock
from alpa.passes.plan.report import PlanReport
from alpa.passes.plan.row_names import num_stages
from alpa.passes.sharding.forced_results import write_forced_result
from alpa.passes.sharding.strategies import tensor_layouts
from alpa.passes.stages.forced_shardings import Dims, dims_text
from alpa.runtime.planning import Planned
from alpa.runtime.questions.explanation import Alternative, Explanation, QuestionError
from alpa.runtime.questions.stage_alternatives import explain_shared_stage, explain_stage
from alpa.runtime.questions.variants import Variant, Variants

_STAGE = re.compile(r"stage (\d+)")
_LINE = re.compile(r"(.+):(\d+)")
_SHOWN = 3


def explain(what: str, planned: Planned, clock: Clock) -> tuple[Explanation, ...]:
    """Answers a question about a plan: one explanation per mesh that has the value.

    Args:
        what: an argument, a line of a file, or a stage.
        planned: the plan, with what its search has kept.
        clock: adds up the seconds of the passes.

    Raises:
        QuestionError: there is no such argument, line or stage.
    """
    kept = planned.kept
    assert kept is not None, "the search has kept what questions need"
    assert kept.program is not None, "the search has ended"
    report, variants = PlanReport.of(planned.module), Variants(kept=kept, clock=clock)
    if stage := _STAGE.fullmatch(what.strip()):
        number = int(stage[1])
        if number >= num_stages(report):
            raise QuestionError(
                f"there is no stage {number} to explain; the plan has {num_stages(report)}, "
                "counted from 0"
            )
        if num_stages(report) > len(report.stages):
            return (explain_shared_stage(number, planned.module, report),)
        return (explain_stage(number, report, variants),)
    values = _Values(program=kept.program, planned=planned.module, report=report, variants=variants)
    if line := _LINE.fullmatch(what.strip()):
        return (values.at_line(line[1], int(line[2])),)
    return tuple(values.of_argument(what.strip()))


@dataclass(frozen=True, kw_only=True)
class _Values:
    """Explains the shardings of values."""

    program: ir.Module
    planned: ir.Module
    report: PlanReport
    variants: Variants

    def of_argument(self, selector: str) -> Iterator[Explanation]:
        """On each mesh. Raises QuestionError."""
        names = Names.of_arguments(main_function(self.program))
        try:
            numbers = names.select(selector)
        except ValueError as error:
            raise QuestionError(f"{selector!r} cannot be explained: {error}") from error
        if len(numbers) > 1:
            shown = ", ".join(names.names[n] or str(n) for n in numbers[:_SHOWN])
            raise QuestionError(f"{selector} is {len(numbers)} arguments, {shown}, ...; name one")
        function = main_function(self.planned)
        meshes = set[str]()
        for position, attributes in enumerate(read_arguments(function)):
            value = function.arguments[position]
            mesh = MeshTensor.from_type(value.type).mesh
            # The rows of a stack that layers of one mesh read are explained once.
            if input_number(position, attributes) == numbers[0] and mesh not in meshes:
                meshes.add(mesh)
                name = names.names[numbers[0]] or f"argument {numbers[0]}"
                yield self._argument(position, name)

    def _argument(self, position: int, name: str) -> Explanation:
        value = main_function(self.planned).arguments[position]
        tensor = MeshTensor.from_type(value.type)
        assert tensor.sharding is not None, "a planned argument has a sharding"
        assert self.variants.kept.stages is not None, "the search has kept what questions need"
        staged = main_function(self.variants.kept.stages).arguments[position]
        notes = list[str]()
        if MeshTensor.from_type(staged.type).sharding is not None:
            notes.append("the program, or a choice that was forced, fixes this sharding")
        return self._explained(
            f"{name}: {tensor.type}, {size_text(_bytes(tensor.type))}, on {tensor.mesh}",
            tensor.type,
            tensor.sharding,
            partial(_force_argument, position),
            f"argument {position}",
            notes,
        )

    def at_line(self, path: str, line: int) -> Explanation:
        """Of the largest value that is made there. Raises QuestionError."""
        found = list[tuple[int, mpmd.FragmentOp, ir.OpView]]()
        near = set[int]()
        for number, (fragment, op) in enumerate(_ops(self.planned)):
            place = file_position(op.location)
            if place is None or not (place.filename == path or place.filename.endswith(f"/{path}")):
                continue
            near.add(place.start_line)
            if place.start_line == line and _tensors(op):
                found.append((number, fragment, op))
        if not found:
            lines = sorted(near, key=lambda it: abs(it - line))[:_SHOWN]
            there = f"; the nearest lines with ops are {', '.join(map(str, sorted(lines)))}"
            raise QuestionError(
                f"no op of the plan is from {path}:{line}"
                + (
                    there
                    if near
                    else f"; no op is from {path}. Files are known where the program "
                    "has locations (debug_info=True in jax)"
                )
            )
        number, fragment, op = max(
            found, key=lambda it: (read_part(it[1]) == "forward", _bytes(it[2].results[0].type))
        )
        type_ = ir.RankedTensorType(op.results[0].type)
        shardings = op_shardings(op)
        mesh = mesh_of(fragment)
        chosen = Sharding.of(mesh, ((),) * type_.rank) if shardings is None else shardings[0]
        others = len(found) - 1
        more = f"; the largest of {len(found)} values from there" if others else ""
        return self._explained(
            f"{path}:{line}: {op.operation.name}, {type_}, {size_text(_bytes(type_))}, on "
            f"{mesh}, in the {read_part(fragment)} part{more}",
            type_,
            chosen,
            partial(_force_result, number),
            f"op {number}",
            [],
        )

    def _explained(
        self,
        subject: str,
        type_: ir.RankedTensorType,
        chosen: Sharding,
        force: partial[None],
        key: str,
        notes: list[str],
    ) -> Explanation:
        mesh = read_topology(main_function(self.planned))[chosen.mesh]
        base = self._alternative(dims_text(chosen.axis_names), self._here(), chosen.mesh, key)
        found = list[Alternative]()
        for dims in _other_dims(type_, mesh, chosen.axis_names):
            variant = self.variants.of_shardings(partial(force, Sharding.of(chosen.mesh, dims)))
            found.append(self._alternative(dims_text(dims), variant, chosen.mesh, key))
        found.sort(key=lambda it: (bool(it.refused), it.step_seconds or 0.0))
        return Explanation(
            subject=subject,
            chosen=base,
            alternatives=tuple(found),
            notes=(*notes, *_indivisible(type_, mesh), *self._proof(chosen.mesh)),
        )

    def _here(self) -> Variant:
        return Variant(module=self.planned, report=self.report)

    def _alternative(self, text: str, variant: Variant, mesh: str, key: str) -> Alternative:
        report, module = variant.report, variant.module
        if report is None or module is None:
            return Alternative(choice=text, refused=variant.refused)
        stage = next(it for it in report.stages if it.mesh == mesh)
        solver = report.solver
        objective = (
            next(it.objective for it in solver.meshes if it.mesh == mesh) if solver else None
        )
        return Alternative(
            choice=text,
            step_seconds=report.predicted_step_seconds,
            objective=objective,
            sent_bytes=stage.sent_bytes,
            peak_bytes=stage.peak_bytes,
            changes=tuple(self._changes(module, key)),
        )

    def _changes(self, module: ir.Module, key: str) -> Iterator[str]:
        """What else another plan of the same stages shards differently, largest first."""
        names = Names.of_arguments(main_function(self.program)).names
        before, after = dict(_shardings(self.planned, names)), dict(_shardings(module, names))
        differ = [
            (size, text, dims, after[place][2])
            for place, (size, text, dims) in before.items()
            if place in after and after[place][2] != dims and place != key
        ]
        differ.sort(key=lambda it: -it[0])
        for _, text, old, new in differ[:_SHOWN]:
            yield f"{text} from {dims_text(old)} to {dims_text(new)}"
        if len(differ) > _SHOWN:
            yield f"{len(differ) - _SHOWN} smaller values"

    def _proof(self, mesh: str) -> Iterator[str]:
        memory, solver = self.report.memory_bytes, self.report.solver
        stage = next(it for it in self.report.stages if it.mesh == mesh)
        if memory and stage.peak_bytes is not None:
            yield (
                f"memory of {mesh}: {size_text(stage.peak_bytes)} of {size_text(memory)} are used "
                "at the peak"
            )
        if solver is None:
            return
        one = next(it for it in solver.meshes if it.mesh == mesh)
        if one.status == "optimal":
            yield f"the shardings of {mesh} are proven optimal for the {one.problem} problem"
        else:
            gap = (one.objective - one.bound) / one.objective if one.objective else 0.0
            yield (
                f"the shardings of {mesh} are at most {gap:.2%} above the optimum of the "
                f"{one.problem} problem; smaller differences say nothing"
            )


def _force_argument(position: int, sharding: Sharding, module: ir.Module) -> None:
    function = main_function(module)
    value = function.arguments[position]
    tensor = MeshTensor.from_type(value.type)
    value.set_type(replace(tensor, sharding=sharding).to_type())
    inputs = [it.type for it in function.arguments]
    type_ = ir.FunctionType.get(inputs, function.type.results)
    function.attributes["function_type"] = ir.TypeAttr.get(type_)


def _force_result(number: int, sharding: Sharding, module: ir.Module) -> None:
    _, op = _ops(module)[number]
    write_forced_result(main_function(module), op, sharding)


def _ops(module: ir.Module) -> list[tuple[mpmd.FragmentOp, ir.OpView]]:
    """The ops inside fragments, but for constraints, which differ between variants of a plan."""
    fragments = [
        op for op in body(main_function(module)).operations if isinstance(op, mpmd.FragmentOp)
    ]
    return [
        (fragment, op)
        for fragment in fragments
        for op in walk(body(fragment))
        if not isinstance(op, sdy.ShardingConstraintOp)
    ]


def _shardings(
    module: ir.Module, names: Sequence[str | None]
) -> Iterator[tuple[str, tuple[int, str, Dims]]]:
    """By place: the bytes of each argument and op result, its name, and its axes."""
    function = main_function(module)
    for position, attributes in enumerate(read_arguments(function)):
        tensor = MeshTensor.from_type(function.arguments[position].type)
        number = input_number(position, attributes)
        if tensor.sharding is not None:
            text = names[number] or f"argument {number}"
            yield f"argument {position}", (_bytes(tensor.type), text, tensor.sharding.axis_names)
    for number, (_, op) in enumerate(_ops(module)):
        shardings = op_shardings(op)
        if shardings and _tensors(op):
            place = file_position(op.location)
            at = (
                ""
                if place is None
                else f" at {place.filename.rpartition('/')[2]}:{place.start_line}"
            )
            text = f"{op.operation.name}{at}"
            yield f"op {number}", (_bytes(op.results[0].type), text, shardings[0].axis_names)


def _tensors(op: ir.OpView) -> bool:
    return bool(op.results) and isinstance(op.results[0].type, ir.RankedTensorType)


def _bytes(type_: ir.Type) -> int:
    tensor = ir.RankedTensorType(type_)
    return prod(tensor.shape) * element_bytes(tensor.element_type)


def _other_dims(type_: ir.RankedTensorType, mesh: Mesh, chosen: Dims) -> list[Dims]:
    """The other shardings that split evenly, with the axes of a dimension in the mesh's order."""
    names = [axis for axis, _ in mesh.axes]
    layouts = tensor_layouts(tuple(type_.shape), mesh.sizes)
    every = [tuple(tuple(names[a] for a in axes) for axes in it) for it in layouts]
    ordered = [it for it in every if all(axes == tuple(sorted(axes)) for axes in it)]
    return [it for it in ordered if it != chosen]


def _indivisible(type_: ir.RankedTensorType, mesh: Mesh) -> Iterator[str]:
    for dim, size in enumerate(type_.shape):
        axes = " and ".join(f"{axis} ({ways})" for axis, ways in mesh.axes if size % ways)
        if axes:
            yield f"dimension {dim} has {size} elements: {axes} cannot split it evenly"
