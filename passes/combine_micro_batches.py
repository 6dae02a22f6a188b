"""Proves that micro-batches give what the whole batch gives.

Every value gets a relation to the same value of a program for the whole batch. It is the same, it
holds rows of samples, it is a sum over samples, or it is a function of such sums
(`analysis/micro_batches`). If a result or a new state depends on the samples in another way, the
pass fails at the op that mixes samples. Otherwise it splits the program. What a micro-batch
computes comes first. A sum that is read by what runs once per step gets a marker `@alpa.gradient`,
by which later passes accumulate it. A number of the step by which samples are multiplied, such as
one over the number of tokens that count, is taken out: the micro-batch computes with one, and the
accumulated sum is multiplied by the number.

With `micro-batches=independent` nothing is proven. The markers of gradients then tell what runs in
each micro-batch and what once per step. A program without markers gets them by the names that JAX
gives to ops that differentiation makes (`simplify/gradients.py`).

A program that was lowered for both sizes says on its ops how they differ (`alpa.whole`). In any
other program the divisor of a mean cannot be told from other numbers. There, sums of floats over
samples are taken for means, or with `loss-reduction=sum` for sums.

**Before**::

    func.func public @main(
        %x: tensor<4xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64},
        %mask: tensor<4xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> tensor<f32> {
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %sum = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0]
        : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
      %count = stablehlo.reduce(%mask init: %zero) applies stablehlo.add across dimensions = [0]
        : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
      %mean = stablehlo.divide %sum, %count : tensor<f32>
      return %mean : tensor<f32>
    }

**After** `combine-micro-batches{num-micro-batches=2}`::

    module attributes {alpa.micro_batches = "exact"} {
      func.func public @main(%x: …, %mask: …) -> (tensor<f32> {alpa.result = "last"}) {
        %zero = stablehlo.constant …
        %sum = stablehlo.reduce(%x init: %zero) …
        %0 = stablehlo.custom_call @alpa.gradient(%sum) : (tensor<f32>) -> tensor<f32>
        %count = stablehlo.reduce(%mask init: %zero) …
        %1 = stablehlo.custom_call @alpa.gradient(%count) : (tensor<f32>) -> tensor<f32>
        %mean = stablehlo.divide %0, %1 : tensor<f32>
        return %mean : tensor<f32>
      }
    }

**Requires**: a program for one micro-batch, as it was lowered.

**Ensures**: calls are inlined, and no loop or branch holds markers, which would mean nothing there.
With several micro-batches the module attribute `alpa.micro_batches` is `exact`, `exact, random
numbers per micro-batch` or `independent`. With `exact` results have their `alpa.result`. With one
micro-batch nothing is proven, and no marker is added.

**Options**: see the fields.

**Fails when** there are several micro-batches and samples are mixed, the program was lowered for
another number of micro-batches, or no argument is a batch and the state changes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal

from alpa.dialects import body, filled, func, ir, stablehlo, terminator, walk
from alpa.dialects.attributes import (
    EXACT,
    GRADIENT,
    INDEPENDENT,
    LAYER_BOUNDARY,
    MICRO_BATCHES,
    RANDOM,
    WHOLE,
    WITH_NOISE,
    ResultRole,
    marker_of,
    micro_batches_of,
    read_results,
    write_interface,
)
from alpa.dialects.records import entries
from alpa.passes.analysis.graph import Graph, replace_operands, used_values
from alpa.passes.analysis.input_checks import check_input
from alpa.passes.analysis.micro_batches.context import Context, is_float
from alpa.passes.analysis.micro_batches.relate import argument_relations, relate
from alpa.passes.analysis.micro_batches.relation import Relation
from alpa.passes.analysis.micro_batches.shapes import splat_of
from alpa.passes.analysis.micro_batches.whole import complex_constant, strip_whole
from alpa.passes.analysis.op_kinds import ARITHMETIC
from alpa.passes.analysis.roles import Roles, infer_roles
from alpa.passes.base import Pass, PassError, Remark, option
from alpa.passes.simplify.gradients import mark_gradients
from alpa.passes.simplify.host_calls import refuse_host_calls
from alpa.passes.simplify.inline import inline_calls
from alpa.passes.simplify.scatter_add import scatter_apart


@dataclass(frozen=True, kw_only=True)
class CombineMicroBatches(Pass):
    """Proves that micro-batches give what the whole batch gives, and marks what they add up."""

    name: ClassVar[str] = "combine-micro-batches"

    num_micro_batches: int = option(
        1,
        "with one there is nothing to prove",
    )
    micro_batches: Literal["auto", "exact", "independent"] = option(
        "auto",
        "`exact` proves that micro-batches compute what the whole batch computes; `independent` "
        "makes each a batch of its own; `auto` follows the module's `alpa.micro_batches`, or exact",
    )
    loss_reduction: Literal["mean", "sum"] = option(
        "mean",
        "how sums over samples are treated if the whole batch is not known",
    )

    def run(self, module: ir.Module, remark: Remark) -> None:
        with module.context:
            main = check_input(module)
            inline_calls(module, main)
            mode = self._mode(module)
            if self.num_micro_batches > 1 and mode == EXACT:
                mode = self._combine(module, main, remark)
            elif self.num_micro_batches > 1:
                _check_states(main)
                mark_gradients(body(main))
            if WHOLE in module.operation.attributes:
                strip_whole(module)
            _clean(body(main), remark)
            if self.num_micro_batches > 1:
                module.operation.attributes[MICRO_BATCHES] = ir.StringAttr.get(mode)

    def _mode(self, module: ir.Module) -> str:
        if self.micro_batches != "auto":
            return self.micro_batches
        return INDEPENDENT if micro_batches_of(module) == INDEPENDENT else EXACT

    def _combine(self, module: ir.Module, main: func.FuncOp, remark: Remark) -> str:
        """Proves and rewrites; what was proven."""
        whole = module.operation.attributes.get(WHOLE)
        if whole is not None and ir.IntegerAttr(whole).value != self.num_micro_batches:
            raise PassError(
                main,
                f"the program was lowered for {ir.IntegerAttr(whole).value} micro-batches, and "
                f"num-micro-batches is {self.num_micro_batches}; lower it for as many",
            )
        block = body(main)
        scatter_apart(block)
        graph = Graph.of(block)
        roles = infer_roles(main, graph)
        if not any(argument.role == "batch" for argument in roles.arguments):
            if any(graph.returned[r] != a for r, a in roles.state_pairs().items()):
                raise PassError(
                    main,
                    f"no argument is cut into {self.num_micro_batches} micro-batches, and each of "
                    "them would change the state; say which arguments hold the samples "
                    '(alpa.role = "batch"), or plan with 1 micro-batch',
                )
            return EXACT
        if whole is None:
            _report_sizes(block, roles, remark)
        context = relate(
            block,
            argument_relations([(it.role, it.batch_dim) for it in roles.arguments]),
            num_micro_batches=self.num_micro_batches,
            whole_is_known=whole is not None,
            sum_power=-1 if self.loss_reduction == "mean" else 0,
        )
        split = _Split(
            main=main,
            graph=graph,
            roles=roles,
            context=context,
            in_step=_in_step(graph, roles, context),
        )
        if any(context.at(value).is_mixed for value in split.returned):
            # Calls of the host mix whatever they read, and have a sentence of their own.
            others = [op for op in walk(block) if op.operation.name not in ARITHMETIC]
            refuse_host_calls(main, others)
        split.check()
        split.rewrite()
        relations = [context.at(v) for v in split.graph.values if v in context.relations]
        return WITH_NOISE if any(it.random for it in relations) else EXACT


def _check_states(main: func.FuncOp) -> None:
    """Raises PassError where a micro-batch could not read a state that the one before wrote."""
    arguments, end = list(body(main).arguments), terminator(body(main))
    for result, value in zip(read_results(main), end.operands, strict=True):
        role = result.role
        if role is None or role.kind != "state" or role.index is None:
            continue
        old = arguments[role.index].type
        if value.type != old:
            raise PassError(
                _place(value, main),
                f"the new state of argument {role.index} is {value.type} in a micro-batch, and the "
                f"old one is {old}: it is made of the rows of a whole batch; plan with 1 "
                "micro-batch",
            )


def _report_sizes(block: ir.Block, roles: Roles, remark: Remark) -> None:
    """Says which numbers of a file may be the size of its batch: nothing tells them from it."""
    sizes = {
        float(ir.RankedTensorType(value.type).shape[role.batch_dim or 0])
        for value, role in zip(block.arguments, roles.arguments, strict=True)
        if role.role == "batch"
    }
    found = [
        (number, op.location)
        for op in block.operations
        if isinstance(op, stablehlo.ConstantOp)
        and (number := splat_of(op.attributes["value"])) is not None
        and number in sizes
        and number > 2  # Smaller ones are everywhere.
    ]
    if found:
        number, first = found[0]
        remark(
            first,
            f"the number {number:g}, here and in {len(found) - 1} other places, may be the size of "
            "the batch: a file does not tell, and it is taken for a number that stays; lower the "
            "program by alpa.parallelize(...).lower, which says what is different for the whole "
            "batch",
        )


def _clean(block: ir.Block, remark: Remark) -> None:
    """Removes what only this pass reads, and markers where they mean nothing."""
    boundary: ir.Location | None = None
    ops = [(op, False) for op in block.operations]
    ops += [(inner, True) for op, _ in ops for inner in _inner(op)]
    for op, inside in ops:
        target = _target(op)
        if target == RANDOM or (inside and target in (GRADIENT, LAYER_BOUNDARY)):
            if target == LAYER_BOUNDARY:
                boundary = boundary or op.location
            for result, operand in zip(op.results, op.operands, strict=True):
                result.replace_all_uses_with(operand)
            op.operation.erase()
    if boundary is not None:
        remark(
            boundary,
            "a layer boundary inside of a loop or a branch says nothing: a loop is cut between its "
            "trips, if at all; the marker is ignored",
        )


def _inner(op: ir.OpView) -> Iterable[ir.OpView]:
    for region in op.regions:
        for block in region.blocks:
            yield from walk(block)


def _target(op: ir.OpView) -> str | None:
    if not isinstance(op, stablehlo.CustomCallOp):
        return None
    return ir.StringAttr(op.attributes["call_target_name"]).value


@dataclass(frozen=True, kw_only=True)
class _Split:
    """A step with its relations, and which of its ops run once, after all micro-batches."""

    main: func.FuncOp
    graph: Graph
    roles: Roles
    context: Context
    in_step: list[bool]
    stepped: dict[ir.Value, ir.Value] = field(default_factory=dict[ir.Value, ir.Value])
    """what a value of a micro-batch is for the step"""

    def at(self, value: ir.Value) -> Relation:
        return self.context.at(value)

    @property
    def returned(self) -> list[ir.Value]:
        return [self.graph.values[v] for v in self.graph.returned]

    def check(self) -> None:
        """Raises PassError where a result is not what the whole batch gives."""
        pairs = self.roles.state_pairs()
        for r, value in enumerate(self.returned):
            relation = self.at(value)
            if relation.reason is not None:
                raise PassError(
                    relation.reason.location,
                    f"{relation.reason.op.partition('.')[2]} {relation.reason.text}, and "
                    f"{self._name(r)} depends on it: {self._micro_batches} micro-batches would not "
                    f"give what the whole batch gives; {self._ways_out(r)}",
                )
            problem = None
            if relation.kind == "rows" and r in pairs:
                problem = "is a new state, and grows with the batch"
            elif relation.kind == "same" and r in pairs and self._made_of_batch[value]:
                problem = (
                    "is a new state that no sample changes, made in a loop, a branch or a barrier "
                    "that computes with samples, too (compute the two apart)"
                )
            elif relation.kind == "rows" and self._made_of_batch[value]:
                if relation.outer != 1:
                    problem = "holds the samples in several blocks, which cannot be joined"
                elif relation.factors:
                    problem = "holds samples multiplied by a function of all samples"
            elif relation.kind in ("sum", "step") and self._grows(value):
                problem = "repeats a function of all samples for each of them"
            if problem:
                raise PassError(
                    _place(value, self.main),
                    f"{self._name(r)} {problem}: {self._micro_batches} micro-batches would not "
                    f"give what the whole batch gives; {self._ways_out(r)}",
                )

    def _ways_out(self, r: int) -> str:
        """What else can be asked for. Micro-batches of their own cannot go on with their samples
        after the update, which runs once behind the marks."""
        graph = self.graph
        marked = graph.depends(
            v
            for o, op in enumerate(graph.ops)
            if marker_of(op) == GRADIENT
            for v in graph.results[o]
        )
        leads = graph.cone([graph.returned[r]])
        goes_on = any(
            leads[o]
            and any(marked[v] for v in operands)
            and any(self._made_of_batch[graph.values[v]] and not marked[v] for v in operands)
            and any(self.at(graph.values[v]).is_mixed for v in graph.results[o])
            for o, operands in enumerate(graph.operands)
        )
        return _ONE_MICRO_BATCH if goes_on else _WAYS_OUT

    @property
    def _micro_batches(self) -> int:
        return self.context.num_micro_batches

    def _name(self, r: int) -> str:
        attrs = self.main.attributes.get("res_attrs")
        if attrs is not None:
            info = entries(ir.DictAttr(ir.ArrayAttr(attrs)[r])).get("jax.result_info")
            if isinstance(info, ir.StringAttr) and info.value:
                return info.value
        return f"result {r}"

    @cached_property
    def _made_of_batch(self) -> dict[ir.Value, bool]:
        """Whether a value is made of the batch's samples, and not of its size alone."""
        batch = [a for a, it in enumerate(self.roles.arguments) if it.role == "batch"]
        return dict(zip(self.graph.values, self.graph.depends(batch), strict=True))

    def _grows(self, value: ir.Value) -> bool:
        maker = value.owner
        if isinstance(maker, ir.Block):
            return False
        pairs = zip(maker.results, self.context.whole_shapes(maker.opview), strict=True)
        return any(own == value and whole != self.context.shape(own) for own, whole in pairs)

    def rewrite(self) -> None:
        """Makes the program one of micro-batches and, behind markers, of the step."""
        graph = self.graph
        marks = [op for op in graph.ops if marker_of(op) == GRADIENT]
        others = [op for op in graph.ops if marker_of(op) != GRADIENT]
        wholes: dict[ir.Value, ir.Value] = {}
        self._substitute()
        for o, op in enumerate(graph.ops):
            if not self.in_step[o]:
                continue
            used = dict.fromkeys(graph.values[v] for v in graph.operands[o])
            changed = {v: new for v in used if (new := self._for_step(v, wholes)) != v}
            if changed:
                replace_operands(op, changed)
            if self.context.whole_is_known:
                self._enlarge(op, op)
        self._return(wholes)
        for op in marks:
            op.results[0].replace_all_uses_with(op.operands[0])
            op.operation.erase()
        self._erase_mixed(others)

    def _erase_mixed(self, ops: Sequence[ir.OpView]) -> None:
        """Erases what nothing depends on, and what may read arrays of two sizes."""
        for op in reversed(ops):
            unused = not any(True for value in op.results for _ in value.uses)
            if unused and any(self.at(value).is_mixed for value in op.results):
                op.operation.erase()

    def _substitute(self) -> None:
        """Puts ones where micro-batches would read a number of the step.

        Where it is known which operand a select takes, the other one is read no more.
        """
        for op in self.graph.ops:
            if isinstance(op, stablehlo.SelectOp) and self.at(op.operands[0]).splat is not None:
                taken = 1 if self.at(op.operands[0]).splat else 2
                op.operands[3 - taken] = op.operands[taken]
        producer = self._producer
        # What is inside of a loop is mixed, or runs in the step.
        found = [(producer[v], number) for v, number in self.context.substituted if v in producer]
        for o, number in sorted(found):
            op = self.graph.ops[o]
            with ir.InsertionPoint(op), op.location:
                one = filled(ir.RankedTensorType(op.operands[number].type), 1.0)
                op.operands[number] = one

    def _for_step(self, value: ir.Value, wholes: dict[ir.Value, ir.Value]) -> ir.Value:
        """What the step reads in the place of a value."""
        value = _unmarked(value)
        relation = self.at(value)
        if relation.kind == "sum":
            if self._is_in_step(value):
                return value
            if value not in self.stepped:
                self.stepped[value] = self._total(value, relation, wholes)
            return self.stepped[value]
        if relation.kind == "size" or relation.power:
            return self._whole(value, wholes)
        return value

    def _is_in_step(self, value: ir.Value) -> bool:
        producer = self._producer.get(value, -1)
        return producer >= 0 and self.in_step[producer]

    @cached_property
    def _producer(self) -> dict[ir.Value, int]:
        return dict(zip(self.graph.values, self.graph.producer, strict=True))

    def _total(
        self, value: ir.Value, relation: Relation, wholes: dict[ir.Value, ir.Value]
    ) -> ir.Value:
        """A marker on a sum, and what makes the sum of the step out of what is accumulated: the
        mean of the micro-batches of floats, the sum of integers."""
        type_ = ir.RankedTensorType(value.type)
        with _after(value, self.main):
            total = stablehlo.CustomCallOp([type_], [value], GRADIENT).results[0]
            power = relation.power + (1 if is_float(type_) else 0)
            if power:
                number = filled(type_, float(self._micro_batches) ** power)
                total = stablehlo.multiply(total, number)
            for root, exponent in relation.factors:
                factor = _spread(self._for_step(root, wholes), type_)
                combine = stablehlo.multiply if exponent > 0 else stablehlo.divide
                total = combine(total, factor)
        return total

    def _whole(self, value: ir.Value, wholes: dict[ir.Value, ir.Value]) -> ir.Value:
        """What is made of the batch's size alone, computed at the size of the whole batch."""
        if value in wholes or isinstance(value.owner, ir.Block):
            return wholes.get(value, value)
        op = value.owner.opview
        outside = [v for v in used_values(op) if v in self._producer]
        changed = {v: new for v in outside if (new := self._whole(v, wholes)) != v}
        differs = self.context.whole(op)
        if isinstance(differs.get("value"), ir.StringAttr):
            copy = complex_constant(op, ir.StringAttr(differs["value"]).value)
        else:
            copy = op.operation.clone(ip=ir.InsertionPoint(op)).opview
            replace_operands(copy, changed)
        self._enlarge(copy, op)
        wholes.update(zip(op.results, copy.results, strict=True))
        return wholes[value]

    def _enlarge(self, op: ir.OpView, place: ir.OpView) -> None:
        """Makes an op that of the whole batch."""
        if any("types" in self.context.whole(inner) for inner in _inner(op)):
            raise PassError(
                place,
                "computes in a loop or a branch with arrays as long as the batch that hold no "
                f"samples; {_WAYS_OUT}",
            )
        for each in (op, *_inner(op)):
            differs = self.context.whole(each)
            for name, attr in differs.items():
                if name != "types":
                    each.attributes[name] = attr
                    continue
                for result, type_ in zip(each.results, ir.ArrayAttr(attr), strict=True):
                    result.set_type(ir.TypeAttr(type_).value)

    def _return(self, wholes: dict[ir.Value, ir.Value]) -> None:
        """The results, and what they are: of each micro-batch, or of the step."""
        end = terminator(body(self.main))
        pairs = self.roles.state_pairs()
        results, given = list(self.roles.results), read_results(self.main)
        for r, value in enumerate(self.returned):
            relation = self.at(value)
            role, new = self._result(value, relation, r in pairs, wholes)
            if new != value:
                end.operands[r] = new
            if r not in pairs:
                results[r] = replace(results[r], role=self._agreed(r, given[r].role, role))
        write_interface(self.main, self.roles.arguments, results)
        types = self.main.type
        returned = [operand.type for operand in end.operands]
        if list(types.results) != returned:
            kind = ir.FunctionType.get(list(types.inputs), returned)
            self.main.attributes["function_type"] = ir.TypeAttr.get(kind)

    def _result(
        self,
        value: ir.Value,
        relation: Relation,
        is_state: bool,
        wholes: dict[ir.Value, ir.Value],
    ) -> tuple[ResultRole, ir.Value]:
        last = ResultRole("last")
        if relation.of_samples:
            if not self._made_of_batch[value]:
                return last, self._whole(value, wholes)
            new = value
            if relation.power:
                with _after(value, self.main):
                    number = float(self._micro_batches) ** relation.power
                    new = stablehlo.multiply(value, filled(ir.RankedTensorType(value.type), number))
            return ResultRole("concat", relation.dim), new
        if relation.kind == "sum" and not is_state and not relation.factors:
            power = -1 if is_float(value.type) else 0
            if not self._is_in_step(value) and relation.power in (power, 0):
                return ResultRole("mean" if relation.power else "sum"), value
        new = self._for_step(value, wholes)
        if relation.kind == "sum" and _unmarked(new) != new:
            # The step needs an op of its own that returns what was accumulated.
            with _after(new, self.main):
                new = stablehlo.OptimizationBarrierOp([new]).results[0]
        return last, new

    def _agreed(self, r: int, given: ResultRole | None, proven: ResultRole) -> ResultRole:
        """What the program says of a result; it has to be what was proven.

        Where the whole batch is not known, the program may tell a mean from a sum.
        """
        if given is None or given == proven:
            return proven
        if given.kind in ("mean", "sum") and proven.kind in ("mean", "sum"):
            return given
        raise PassError(
            self.main,
            f"{self._name(r)} is said to be {given} of the micro-batches, and it is {proven}; "
            f"leave its alpa.result out, or say {proven}",
        )


_ONE_MICRO_BATCH = "plan with 1 micro-batch, which may still be sharded over the batch"
_WAYS_OUT = (
    f"{_ONE_MICRO_BATCH}, or, where each micro-batch is meant to be a batch of its own, with "
    'micro-batches=independent (micro_batches="independent" in Python)'
)


def _in_step(graph: Graph, roles: Roles, context: Context) -> list[bool]:
    """Which ops run once per step: those that make functions of sums, and what only they need.

    Linear functions of sums could be computed on either side. They are on the step's side behind a
    marked gradient. What leads to a new state and to no mark is there from where a state is added,
    and where the step reads its operand anyway: then one value is accumulated and not two. The way
    to a loss stays in the micro-batch.
    """
    at = [context.relations.get(value) for value in graph.values]
    is_mark = [marker_of(op) == GRADIENT for op in graph.ops]
    marked = graph.cone(v for o, mark in enumerate(is_mark) if mark for v in graph.results[o])
    of_state = graph.depends(roles.state_pairs().values())
    leads = graph.cone(graph.returned[r] for r in roles.state_pairs())
    found: list[bool] = []
    flexible: list[int] = []
    behind = [False] * len(graph.values)
    for o, (operands, results) in enumerate(zip(graph.operands, graph.results, strict=True)):
        kinds = {it.kind for v in results if (it := at[v]) is not None}
        read = {v: it for v in operands if (it := at[v]) is not None}
        here = "step" in kinds
        of_sums = "sum" in kinds and kinds <= {"sum", "same", "size"}
        of_sums = of_sums and all(it.kind in ("sum", "same", "size") for it in read.values())
        if of_sums and not is_mark[o]:
            flexible.append(o)
            here = here or any(behind[v] for v in operands)
            joins_state = any(it.kind == "same" and of_state[v] for v, it in read.items())
            here = here or (leads[o] and not marked[o] and joins_state)
        found.append(here)
        for v in results:
            behind[v] = here or (is_mark[o] and kinds == {"sum"})
    for o in reversed(flexible):
        # The number travels, and not the array that repeats it.
        if graph.ops[o].name == "stablehlo.broadcast_in_dim" and not (found[o] or marked[o]):
            users = [user for v in graph.results[o] for user in graph.users[v]]
            found[o] = bool(users) and all(found[user] for user in users)
    while True:
        cut = {v for o, here in enumerate(found) if here for v in graph.operands[o]}
        cut |= {v for o, here in enumerate(found) if here for v in graph.results[o]}
        more = [
            o
            for o in flexible
            if leads[o] and not marked[o] and not found[o] and cut & {*graph.operands[o]}
        ]
        if not more:
            return found
        for o in more:
            found[o] = True


def _unmarked(value: ir.Value) -> ir.Value:
    """The value that markers stand on."""
    while not isinstance(value.owner, ir.Block) and marker_of(value.owner.opview) == GRADIENT:
        value = value.owner.operands[0]
    return value


@contextmanager
def _after(value: ir.Value, main: func.FuncOp) -> Generator[None]:
    """Inserts ops behind the one that makes a value, at its place in the user's code."""
    maker = value.owner
    if isinstance(maker, ir.Block):
        point = ir.InsertionPoint.at_block_begin(maker)
    else:
        point = ir.InsertionPoint.after(maker)
    with point, _place(value, main):
        yield


def _spread(number: ir.Value, type_: ir.RankedTensorType) -> ir.Value:
    """A number, all elements of a value, as a tensor of a type."""
    own = ir.RankedTensorType(number.type)
    if own.shape:
        ones = [1] * len(own.shape)
        first = stablehlo.slice(number, [0] * len(ones), ones, ones)
        number = stablehlo.reshape(ir.RankedTensorType.get([], own.element_type), first)
    if own.element_type != type_.element_type:
        number = stablehlo.convert(ir.RankedTensorType.get([], type_.element_type), number)
    if not type_.shape:
        return number
    return stablehlo.broadcast_in_dim(type_, number, ir.DenseI64ArrayAttr.get([]))


def _place(value: ir.Value, main: func.FuncOp) -> ir.Location:
    return main.location if isinstance(value.owner, ir.Block) else value.owner.location
