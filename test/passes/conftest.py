"""Compares the analysis's claims with numbers: the harness of the tests beside it.

A function is lowered at the size of a micro-batch and at the size of the whole batch. Both programs
run in plain XLA and return every value of their block. Each claim about a value is then compared
with the definition in `relation.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import FrameType
from typing import Any, Protocol

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from alpa.dialects import body, filled, ir, main_function, parse, separate, terminator, walk
from alpa.dialects.attributes import (
    GRADIENT,
    WHOLE,
    Argument,
    Result,
    ResultRole,
    marker_of,
    read_results,
    write_interface,
)
from alpa.dialects.plan import read_meshes
from alpa.dialects.records import i64
from alpa.dialects.symbols import hide_computations
from alpa.passes.analysis.graph import Graph
from alpa.passes.analysis.micro_batches.context import Context
from alpa.passes.analysis.micro_batches.relate import relate
from alpa.passes.analysis.micro_batches.relation import Relation
from alpa.passes.analysis.micro_batches.resize import resize
from alpa.passes.analysis.micro_batches.whole import align
from alpa.passes.base import PassError
from alpa.passes.combine_micro_batches import CombineMicroBatches
from alpa.passes.plan.attribute import plan_and_cluster
from alpa.passes.sharding.mesh_problem import MeshProblem
from alpa.passes.sharding.rules import populated
from alpa.passes.simplify.inline import inline_calls
from alpa.runtime.pjrt import compile_module

Arrays = Sequence[np.ndarray]
TOLERANCES = {"float64": 1e-8, "complex128": 1e-8, "float32": 2e-4, "complex64": 2e-4}
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True, kw_only=True)
class Program:
    """A function of arrays, and the dimension of each argument that holds samples."""

    function: Callable[..., Any]
    arguments: tuple[np.ndarray, ...]
    dims: tuple[int | None, ...]
    state: tuple[int, ...] = ()
    """the arguments whose new values the first results are"""

    def parts(self, number: int) -> list[list[np.ndarray]]:
        """The arguments of each micro-batch."""
        cut = [
            [array] * number if dim is None else np.split(array, number, axis=dim)
            for array, dim in zip(self.arguments, self.dims, strict=True)
        ]
        return [[pieces[m] for pieces in cut] for m in range(number)]

    def lowered(self, number: int) -> tuple[ir.Module, ir.Module]:
        """The program at the size of a micro-batch and at that of the whole batch.

        The program of one sample is read off larger sizes, as for a step.
        """
        whole = lower(self.function, self.arguments)
        parts = self.parts(number)[0]
        dims = [(a, d) for a, d in zip(parts, self.dims, strict=True) if d is not None]
        if any(array.shape[dim] != 1 for array, dim in dims):
            return lower(self.function, parts), whole
        twice = self.with_samples(lambda array, dim: np.concatenate([array, array], axis=dim))
        micro, large = lower(self.function, self.arguments), lower(self.function, twice)
        resize(main_function(micro), main_function(large), (number, 2 * number), 1)
        return micro, whole

    def with_samples(self, change: Callable[[np.ndarray, int], np.ndarray]) -> list[np.ndarray]:
        """The arguments with other samples."""
        return [
            array if dim is None else change(array, dim)
            for array, dim in zip(self.arguments, self.dims, strict=True)
        ]


def lower(function: Callable[..., Any], arguments: Arrays) -> ir.Module:
    """A function as a module without calls, at the size of these arguments."""
    with jax.enable_x64(True):
        text = jax.jit(function, keep_unused=True).lower(*arguments).as_text()
    module = parse(text)
    hide_computations(module)
    with module.context:
        inline_calls(module, main_function(module))
    return module


def return_values(module: ir.Module, values: Sequence[ir.Value]) -> None:
    """Makes `@main` return these values."""
    main = main_function(module)
    with module.context, ir.Location.unknown():
        end = terminator(body(main))
        ir.Operation.create("func.return", operands=list(values), ip=ir.InsertionPoint(end))
        end.operation.erase()
        kind = ir.FunctionType.get(list(main.type.inputs), [value.type for value in values])
        main.attributes["function_type"] = ir.TypeAttr.get(kind)
        if "res_attrs" in main.attributes:
            del main.attributes["res_attrs"]


def compiled(module: ir.Module) -> Callable[[Arrays], list[np.ndarray]]:
    """Compiles a module with plain XLA for one device, without markers and attributes of the
    passes.
    """
    plain = separate(module.operation)
    with plain.context:
        main = main_function(plain)
        for name in ("arg_attrs", "res_attrs"):
            if name in main.attributes:
                del main.attributes[name]
        for op in list(walk(plain.body)):
            if WHOLE in op.attributes:
                del op.attributes[WHOLE]
            if marker_of(op) is not None:
                op.results[0].replace_all_uses_with(op.operands[0])
                op.operation.erase()
    device = jax.devices()[0]
    sharding = SingleDeviceSharding(device)
    shapes = [tuple(ir.RankedTensorType(type_).shape) for type_ in main.type.results]
    run = compile_module(
        plain, [device], [(shape, sharding) for shape in shapes], compiler_options=QUICK
    )

    def call(arguments: Arrays) -> list[np.ndarray]:
        with jax.enable_x64(True):
            arrays = [jax.device_put(a, sharding, may_alias=False) for a in arguments]
            return [np.asarray(result) for result in run(arrays)]

    return call


def top_values(module: ir.Module) -> list[ir.Value]:
    """The values that the ops of `@main` make, in order."""
    ops = list(body(main_function(module)).operations)[:-1]
    return [value for op in ops for value in op.results]


def tolerance(arrays: Iterable[np.ndarray]) -> float:
    """The rounding of the least precise type among these, which others may be computed from."""
    kinds = {str(array.dtype) for array in arrays if array.dtype.kind not in "biu"}
    return max((TOLERANCES.get(kind, 5e-2) for kind in kinds), default=0.0)


def close(actual: np.ndarray, expected: np.ndarray, rounding: float) -> bool:
    """Whether arrays are equal but for rounding; integers are not rounded."""
    if actual.shape != expected.shape:
        return False
    if expected.dtype.kind in "biu":
        return bool(np.array_equal(actual, expected))
    if not np.issubdtype(expected.dtype, np.inexact):  # bf16
        actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(expected)
    scale = max(1.0, float(np.abs(expected[finite]).max(initial=0)))
    with np.errstate(invalid="ignore"):
        near = np.abs(actual - expected) <= rounding * scale
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    return bool(np.all(near | same))


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The claims about a program with this number of micro-batches, and its values."""

    program: Program
    number: int
    micro: ir.Module
    whole: ir.Module
    context: Context

    @classmethod
    def of(
        cls, program: Program, number: int, *, whole_is_known: bool = True, sum_power: int = 0
    ) -> Checked:
        micro, whole = program.lowered(number)
        align(body(main_function(micro)), body(main_function(whole)))
        roles = [("batch" if dim is not None else "state", dim) for dim in program.dims]
        with micro.context:
            context = relate(
                Graph.of(body(main_function(micro))),
                roles,
                num_micro_batches=number,
                whole_is_known=whole_is_known,
                sum_power=sum_power,
            )
        return cls(program=program, number=number, micro=micro, whole=whole, context=context)

    @cached_property
    def values(self) -> list[ir.Value]:
        return top_values(self.micro)

    @cached_property
    def relations(self) -> list[Relation]:
        return [self.context.at(value) for value in self.values]

    @cached_property
    def results(self) -> list[Relation]:
        """The relations of what the function returns."""
        end = terminator(body(main_function(self.micro)))
        return [self.context.at(value) for value in end.operands]

    @cached_property
    def _micro_run(self) -> Callable[[Arrays], list[np.ndarray]]:
        """A micro-batch with ones in the place of the step's numbers that are taken out."""
        values, results = self.values, self.results
        assert len(results) == len(terminator(body(main_function(self.micro))).operands)
        with self.micro.context:
            for op in list(body(main_function(self.micro)).operations)[:-1]:
                for number, operand in enumerate(list(op.operands)):
                    if len(op.results) == 1 and (op.results[0], number) in self.context.substituted:
                        with ir.InsertionPoint(op), op.location:
                            op.operands[number] = filled(ir.RankedTensorType(operand.type), 1.0)
        return_values(self.micro, values)
        return compiled(self.micro)

    @cached_property
    def _whole_run(self) -> Callable[[Arrays], list[np.ndarray]]:
        return_values(self.whole, top_values(self.whole))
        return compiled(self.whole)

    @cached_property
    def wholes(self) -> list[np.ndarray]:
        return self._whole_run(self.program.arguments)

    def violations(self, *, only_results: bool = False) -> list[str]:
        """The claims that numbers contradict."""
        end = terminator(body(main_function(self.micro)))
        chosen = set(end.operands) if only_results else set(self.values)
        relations = self.relations  # before the micro-batch's program changes
        numbers = {value: v for v, value in enumerate(self.values)}
        roots = [None if it.root is None else numbers[it.root] for it in relations]
        factors = [[(numbers[value], e) for value, e in it.factors] for it in relations]
        makers = [str(value.owner).splitlines()[0][:160] for value in self.values]
        operands = [[self.context.at(x) for x in value.owner.operands] for value in self.values]
        parts = [self._micro_run(part) for part in self.program.parts(self.number)]
        rounding = tolerance(self.wholes)
        found: list[str] = []
        for v, relation in enumerate(relations):
            if self.values[v] not in chosen:
                continue
            scale = 1.0
            for root, exponent in factors[v]:
                scale = scale * self.wholes[root].flat[0] ** exponent
            root = roots[v]
            claim = _Claim(
                relation=relation,
                number=self.number,
                parts=[part[v] for part in parts],
                whole=self.wholes[v],
                rounding=rounding,
                scale=scale,
                root=None if root is None else self.wholes[root],
                operands=operands[v],
            )
            if problem := claim.problem():
                found.append(f"value {v}, {relation.kind}: {problem}; {makers[v]}")
        return found

    def contradictions(self) -> list[str]:
        """The claims that the definition contradicts: another sample, another order of samples."""
        relations = self.relations
        makers = [str(value.owner).splitlines()[0][:160] for value in self.values]

        def roll(array: np.ndarray, dim: int) -> np.ndarray:
            return np.roll(array, array.shape[dim] // self.number, axis=dim)

        def replace_first(array: np.ndarray, dim: int) -> np.ndarray:
            """Other samples in the first micro-batch: those of the second."""
            _, second, *others = np.split(array, self.number, axis=dim)
            return np.concatenate([second, second, *others], axis=dim)

        rolled = self._whole_run(self.program.with_samples(roll))
        replaced = self._whole_run(self.program.with_samples(replace_first))
        rounding = tolerance(self.wholes)
        found: list[str] = []
        for v, relation in enumerate(relations):
            problem = _moved(
                relation, self.number, rounding, self.wholes[v], rolled[v], replaced[v]
            )
            if problem:
                found.append(f"value {v}, {relation.kind}: {problem}; {makers[v]}")
        return found


def _moved(
    relation: Relation,
    number: int,
    rounding: float,
    whole: np.ndarray,
    rolled: np.ndarray,
    replaced: np.ndarray,
) -> str:
    """The way in which the whole batch's value contradicts a relation when samples move."""
    fixed = relation.kind in ("same", "size", "position") and not relation.factors
    if fixed and not (close(rolled, whole, rounding) and close(replaced, whole, rounding)):
        return "depends on the samples"
    if relation.kind == "sum" and not close(rolled, whole, rounding):
        return "depends on the order of the micro-batches"
    if relation.kind == "rows" and not relation.factors:
        blocks = blocked(whole, relation, number)
        if not close(blocked(rolled, relation, number), np.roll(blocks, 1, axis=1), rounding):
            return "does not move with the micro-batches"
        if not close(blocked(replaced, relation, number)[:, 1:], blocks[:, 1:], rounding):
            return "depends on the samples of other micro-batches"
    return ""


def blocked(whole: np.ndarray, relation: Relation, number: int) -> np.ndarray:
    """Rows of the whole batch as (blocks, micro-batches, rows, …); None where the shape does not
    divide.
    """
    if whole.shape[relation.dim] % (relation.outer * number):
        return np.zeros((0, number))
    front = np.moveaxis(whole, relation.dim, 0)
    return front.reshape(relation.outer, number, -1, *front.shape[1:])


@dataclass(frozen=True, kw_only=True)
class _Claim:
    """One value's relation, and the numbers to compare it with."""

    relation: Relation
    number: int
    parts: list[np.ndarray]
    whole: np.ndarray
    rounding: float
    scale: Any
    root: np.ndarray | None
    operands: list[Relation] = field(default_factory=list[Relation])

    def problem(self) -> str:
        """The first contradiction, or None."""
        if self.relation.is_mixed:
            return "" if self.relation.reason is not None else "has no reason"
        if self.relation.kind in ("step", "size"):
            allowed = ("same", "size") if self.relation.kind == "size" else (
                "same", "size", "sum", "step"
            )  # fmt: skip
            if any(it.kind not in allowed for it in self.operands):
                return f"is made of {[it.kind for it in self.operands]}"
            return self._root() or self._uniform([self.whole])
        return self._value() or self._uniform([*self.parts, self.whole]) or self._root()

    def _value(self) -> str:
        it, whole = self.relation, self.whole
        parts = self.parts
        if it.kind == "position" or (it.kind == "same" and it.dim >= 0):
            arrays = [*parts, whole] if it.kind == "position" else parts
            if not all(_counts(array, it.dim) for array in arrays):
                return f"does not count along dimension {it.dim}"
        if it.kind == "position":
            return ""
        if it.kind == "rows":
            front = [np.moveaxis(part, it.dim, 0) for part in parts]
            if any(part.shape[0] % it.outer for part in front):
                return f"does not have {it.outer} blocks"
            blocks = [part.reshape(it.outer, -1, *part.shape[1:]) for part in front]
            joined = np.concatenate(blocks, axis=1).reshape(-1, *front[0].shape[1:])
            return self._compare(np.moveaxis(joined, 0, it.dim), whole)
        whole, parts = self._first(whole), [self._first(part) for part in parts]
        if it.kind == "same":
            problems = [self._compare(part, whole) for part in parts]
            return next((problem for problem in problems if problem), "")
        with np.errstate(over="ignore"):
            total = parts[0]
            for part in parts[1:]:
                total = (total + part).astype(parts[0].dtype)
        return self._compare(total, whole)

    def _first(self, array: np.ndarray) -> np.ndarray:
        """One of the equal elements along dimensions that are longer in the whole batch."""
        if self.parts[0].ndim != self.whole.ndim:
            return array
        for d in self.relation.free:
            if self.parts[0].shape[d] != self.whole.shape[d]:
                array = array[(slice(None),) * d + (slice(0, 1),)]
        return array

    def _compare(self, micro: np.ndarray, whole: np.ndarray) -> str:
        scaled = micro
        if self.relation.power or self.relation.factors:
            scaled = (micro * (float(self.number) ** self.relation.power * self.scale)).astype(
                whole.dtype
            )
        if close(scaled, whole, self.rounding):
            return ""
        if scaled.shape != whole.shape:
            return f"has the shape {whole.shape}, claimed {scaled.shape}"
        return f"is {whole.ravel()[:4]}, claimed {scaled.ravel()[:4]} ({self.relation})"

    def _uniform(self, arrays: Sequence[np.ndarray]) -> str:
        for array in arrays:
            for d in self.relation.free:
                first = np.broadcast_to(array.take([0], axis=d), array.shape)
                if not close(first, array, self.rounding):
                    return f"is not equal along dimension {d}"
            if self.relation.splat is not None and not close(
                array.astype(np.complex128),
                np.full(array.shape, self.relation.splat, np.complex128),
                self.rounding,
            ):
                return f"is not {self.relation.splat} everywhere"
        return ""

    def _root(self) -> str:
        if self.root is None:
            return ""
        alike = np.broadcast_to(self.root.ravel()[0], self.whole.shape).astype(self.whole.dtype)
        return (
            ""
            if close(alike, self.whole, self.rounding)
            else "is not the number that its root holds"
        )


def _counts(array: np.ndarray, dim: int) -> bool:
    shape = [1] * array.ndim
    shape[dim] = -1
    counted = np.arange(array.shape[dim]).reshape(shape)
    return bool(np.array_equal(np.broadcast_to(counted, array.shape), array.real))


def run_split(program: Program, number: int, *, whole_is_known: bool = True) -> list[np.ndarray]:
    """The results of a step that `combine-micro-batches` has split, run part by part.

    Raises:
        PassError: the pass rejects the step.
    """
    module, whole = program.lowered(number)
    main = main_function(module)
    arguments = [
        Argument(role="batch", batch_dim=dim)
        if dim is not None
        else Argument(role="state" if a in program.state else "constant")
        for a, dim in enumerate(program.dims)
    ]
    states = [Result(role=ResultRole("state", a)) for a in program.state]
    results = [*states, *[Result()] * (len(main.type.results) - len(states))]
    with module.context:
        write_interface(main, arguments, results)
        if whole_is_known:
            align(body(main), body(main_function(whole)))
            module.operation.attributes[WHOLE] = i64(number)
    CombineMicroBatches(num_micro_batches=number).run(module, lambda *_: None)
    assert module.operation.verify()
    roles = [result.role for result in read_results(main_function(module))]
    parts = program.parts(number)
    totals, each = _forward(module, parts)
    once = iter(_once(module)([*parts[-1], *totals]))
    found: list[np.ndarray] = []
    for r, role in enumerate(roles):
        last = next(once)
        values = [values[r] for values in each]
        if role is not None and role.kind == "concat":
            assert role.index is not None
            last = np.concatenate(values, axis=role.index)
        elif role is not None and role.kind in ("mean", "sum"):
            last = _added(values, mean=role.kind == "mean")
        found.append(last)
    return found


def _added(values: Sequence[np.ndarray], *, mean: bool) -> np.ndarray:
    total = np.sum(np.stack(values), axis=0, dtype=values[0].dtype)
    return (total / len(values)).astype(total.dtype) if mean else total


def _forward(module: ir.Module, parts: Sequence[Arrays]) -> tuple[Arrays, Sequence[Arrays]]:
    """The values that the markers accumulate, and the results of each micro-batch."""
    forward = separate(module.operation)
    main = main_function(forward)
    marked = [op.operands[0] for op in body(main).operations if marker_of(op) == GRADIENT]
    return_values(forward, [*marked, *terminator(body(main)).operands])
    run = compiled(forward)
    each = [run(part) for part in parts]
    totals = [
        _added([values[m] for values in each], mean=values_are_real(each[0][m]))
        for m in range(len(marked))
    ]
    return totals, [values[len(marked) :] for values in each]


def values_are_real(array: np.ndarray) -> bool:
    return array.dtype.kind not in "biu"


def _once(module: ir.Module) -> Callable[[Arrays], list[np.ndarray]]:
    """The program with the accumulated values of the markers as further arguments."""
    step = separate(module.operation)
    main = main_function(step)
    block = body(main)
    with step.context, ir.Location.unknown():
        for op in [op for op in block.operations if marker_of(op) == GRADIENT]:
            given = block.add_argument(op.results[0].type, ir.Location.unknown())
            op.results[0].replace_all_uses_with(given)
            op.operation.erase()
        inputs = [argument.type for argument in block.arguments]
        kind = ir.FunctionType.get(inputs, list(main.type.results))
        main.attributes["function_type"] = ir.TypeAttr.get(kind)
        del main.attributes["arg_attrs"]
    return compiled(step)


def refusal(program: Program, number: int) -> str:
    """The pass's error for a program, or None. A result that differs raises AssertionError."""
    try:
        found = run_split(program, number)
    except PassError as error:
        return str(error)
    with jax.enable_x64(True):
        results = jax.jit(program.function)(*program.arguments)
        expected = [np.asarray(result) for result in jax.tree.leaves(results)]
    rounding = tolerance([*program.arguments, *expected])
    for r, (actual, reference) in enumerate(zip(found, expected, strict=True)):
        assert close(actual, reference, rounding), (
            f"result {r}: {actual.ravel()[:4]}, {reference.ravel()[:4]}"
        )
    return ""


@pytest.fixture
def pose() -> Callable[[ir.Module], list[MeshProblem]]:
    """Poses the sharding problem of each mesh of a planned module."""
    alive: list[ir.Module] = []

    def posed(module: ir.Module) -> list[MeshProblem]:
        alive.append(module)  # A problem holds ops, which do not keep their module alive.
        function = main_function(module)
        plan, cluster = plan_and_cluster(function)
        with populated(module) as rule_of, module.context, function.location:
            meshes = [
                MeshProblem.of(function, assignment, cluster, plan, rule_of)
                for assignment in read_meshes(function)
            ]
            for mesh in meshes:
                mesh.problem.check()
            return meshes

    return posed


@pytest.fixture(scope="session")
def split() -> Callable[[Program, int], str]:
    return refusal


@pytest.fixture(scope="session")
def check() -> Callable[..., Checked]:
    return Checked.of


@pytest.fixture(scope="session")
def program() -> type[Program]:
    return Program


class NumCalls(Protocol):
    """The calls that a run makes of a Python function, or of all, Python's and C's."""

    def __call__(
        self, run: Callable[[], object], of: Callable[..., object] | None = None
    ) -> int: ...


@pytest.fixture(scope="session")
def num_calls() -> NumCalls:
    """A measure of time without noise."""

    def count(run: Callable[[], object], of: Callable[..., object] | None = None) -> int:
        calls = 0

        def profile(frame: FrameType, event: str, _argument: object) -> None:
            nonlocal calls
            if of is None:
                calls += event in ("call", "c_call")
            else:
                calls += event == "call" and frame.f_code is of.__code__

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            run()
        finally:
            sys.setprofile(before)
        return calls

    return count
