"""Op sharding rules: Shardy's own, those registered for custom calls, and ours for the rest.

Shardy's pass `sdy-populate-op-sharding-rules` writes most of them; `populated(module)` runs it
for a while. `rule_of(op)` reads an op's rule and knows these besides:

* custom calls by `register_sharding_rule`; only what passes through a call is ever cut;
* element-wise ops of CHLO and `stablehlo.map`: each dimension passes through;
* constants, iota: each dimension of the result is free;
* optimization_barrier: each dimension of each operand passes to the result of its number;
* `stablehlo.rng` is replicated: split, it would draw other numbers;
* `chlo.top_k`: the last dimension is replicated, the others pass through;
* `chlo.ragged_dot` whose rows are grouped: rows and groups are replicated, the rest as dot_general.

Loops, branches, calls and unknown custom calls have none.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

from alpa.dialects import chlo, ir, passmanager, stablehlo, walk
from alpa.dialects.sharding import ShardingRule
from alpa.passes.analysis.op_kinds import ELEMENTWISE_CHLO, ELEMENTWISE_STABLEHLO, SOURCES
from alpa.passes.base import PassError

_ATTRIBUTE = "sdy.sharding_rule"
_POPULATE = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
_ELEMENTWISE = ELEMENTWISE_CHLO | ELEMENTWISE_STABLEHLO

RuleOf = Callable[[ir.OpView], ShardingRule | None]
CustomRule = ShardingRule | Callable[[ir.OpView], ShardingRule]


class CustomCallRules:
    """Sharding rules of custom calls by their target: what users teach the compiler."""

    def __init__(self) -> None:
        self._rules: dict[str, CustomRule] = {}

    def register(self, target: str, rule: CustomRule) -> None:
        """Sets the rule of a target; a later one replaces it."""
        self._rules[target] = rule

    def unregister(self, target: str) -> None:
        """Forgets a target's rule; no error where there is none."""
        self._rules.pop(target, None)

    def rule_of(self, op: ir.OpView) -> ShardingRule | None:
        """The rule registered for a custom call.

        Raises:
            PassError: the rule does not fit the op's operands and results.
        """
        target = ir.StringAttr(op.attributes["call_target_name"]).value
        rule = self._rules.get(target)
        if rule is None:
            return None
        if not isinstance(rule, ShardingRule):
            rule = rule(op)
        _check_fit(op, target, rule)
        return rule


# The process-wide registry behind `register_sharding_rule`. It is filled by user code before it
# plans and read by `rule_of`; nothing in the compiler writes it.
CUSTOM_CALL_RULES = CustomCallRules()


def register_sharding_rule(target: str, rule: CustomRule) -> None:
    """Teaches the planner how custom calls of a target may be sharded.

    `rule` is a ShardingRule, or a function that makes one from the op, which fits any shape. A
    custom call that carries `sdy.sharding_rule` itself keeps that.
    """
    CUSTOM_CALL_RULES.register(target, rule)


@contextmanager
def populated(module: ir.Module) -> Generator[RuleOf]:
    """As `populate`, and gives `rule_of`; the attributes that it wrote are removed at the end.

    Used as:

        with populated(module) as rule_of:
            rule = rule_of(op)
    """
    # A list: the bindings hash an op by its Python object, of which there may be several.
    given = [op.operation for op in walk(module.body) if _ATTRIBUTE in op.attributes]
    try:
        populate(module)
        yield rule_of
    finally:
        for op in walk(module.body):
            if _ATTRIBUTE in op.attributes and op.operation not in given:
                del op.attributes[_ATTRIBUTE]


def populate(module: ir.Module) -> None:
    """Writes the rules that Shardy or the user knows on all ops.

    The text of the module then has all rules, for a process that has no registry.
    """
    # Shardy warns of each op that it has no rule for; we have rules for those, or say so ourselves.
    handler: Any = module.context.attach_diagnostic_handler(
        lambda diagnostic: "sharding rule registry" in diagnostic.message
    )
    try:
        with module.context:
            passmanager.PassManager.parse(_POPULATE).run(module.operation)
    finally:
        handler.detach()
    for op in walk(module.body):
        if isinstance(op, stablehlo.CustomCallOp) and _ATTRIBUTE not in op.attributes:
            rule = CUSTOM_CALL_RULES.rule_of(op)
            if rule is not None:
                with module.context:
                    op.attributes[_ATTRIBUTE] = rule.to_attr()


def rule_of(op: ir.OpView) -> ShardingRule | None:
    """The sharding rule of an op; None where the caller has to decide: loops, branches, unknowns.

    Raises:
        PassError: a registered rule does not fit the op.
    """
    attr = op.attributes.get(_ATTRIBUTE)
    name = op.operation.name
    if name == "stablehlo.custom_call":
        given = CUSTOM_CALL_RULES.rule_of(op) if attr is None else ShardingRule.from_attr(attr)
        return None if given is None else _through(given)
    if attr is not None:
        return ShardingRule.from_attr(attr)
    if name in SOURCES:
        # constant_like has an operand, which gives its shape alone.
        return _pass_through(tuple(_shapes(op.operands)), tuple(_shapes(op.results)))
    if name in _ELEMENTWISE:
        shapes = {*_shapes(op.operands), *_shapes(op.results)}
        return (
            _elementwise(len(op.operands), len(op.results), *shapes) if len(shapes) == 1 else None
        )
    if name == "stablehlo.optimization_barrier":
        return _per_operand(tuple(_shapes(op.operands)))
    if name == "stablehlo.rng":
        return _replicated(tuple(_shapes(op.operands)), tuple(_shapes(op.results)))
    if name == "chlo.top_k":
        return _top_k(*_shapes(op.operands))
    if name == "chlo.ragged_dot":
        return _ragged_dot(op)
    return None


_Shape = tuple[int, ...]
_Mapping = tuple[tuple[int, ...], ...]


def _shapes(values: ir.OpOperandList | ir.OpResultList) -> list[_Shape]:
    return [
        tuple(value.type.shape) if isinstance(value.type, ir.RankedTensorType) else ()
        for value in values
    ]


class _Factors:
    """Hands out factors: one per dimension."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def of(self, shape: _Shape) -> _Mapping:
        first = len(self.sizes)
        self.sizes += shape
        return tuple((first + i,) for i in range(len(shape)))


@lru_cache(maxsize=1024)
def _elementwise(num_operands: int, num_results: int, shape: _Shape) -> ShardingRule:
    mapping = tuple((dim,) for dim in range(len(shape)))
    return ShardingRule(shape, (mapping,) * num_operands, (mapping,) * num_results)


@lru_cache(maxsize=1024)
def _per_operand(shapes: tuple[_Shape, ...]) -> ShardingRule:
    factors = _Factors()
    mappings = tuple(factors.of(shape) for shape in shapes)
    return ShardingRule(tuple(factors.sizes), mappings, mappings)


@lru_cache(maxsize=1024)
def _pass_through(operands: tuple[_Shape, ...], results: tuple[_Shape, ...]) -> ShardingRule:
    """Operands and results of one shape, or results alone."""
    return _elementwise(len(operands), len(results), results[0])


@lru_cache(maxsize=1024)
def _replicated(operands: tuple[_Shape, ...], results: tuple[_Shape, ...]) -> ShardingRule:
    factors = _Factors()
    mappings = [factors.of(shape) for shape in (*operands, *results)]
    return ShardingRule(
        tuple(factors.sizes),
        tuple(mappings[: len(operands)]),
        tuple(mappings[len(operands) :]),
        need_replication=frozenset(range(len(factors.sizes))),
    )


@lru_cache(maxsize=1024)
def _top_k(shape: _Shape) -> ShardingRule:
    mapping = tuple((dim,) for dim in range(len(shape)))
    last = frozenset({len(shape) - 1})
    return ShardingRule(shape, (mapping,), (mapping, mapping), need_replication=last, blocked=last)


def _ragged_dot(op: ir.OpView) -> ShardingRule | None:
    """lhs[b, m, k], rhs[g, b, k, n], group sizes -> [b, m, n]; m consists of g groups."""
    numbers = chlo.RaggedDotDimensionNumbers(op.attributes["ragged_dot_dimension_numbers"])
    lhs, rhs, groups = _shapes(op.operands)
    lhs_batch, rhs_batch = numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions
    lhs_contracted = numbers.lhs_contracting_dimensions
    rhs_contracted = numbers.rhs_contracting_dimensions
    ragged, grouped = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    by_rows = not {*ragged} & {*lhs_batch, *lhs_contracted}
    if not by_rows or len(grouped) != 1 or len(groups) != 1:
        return None
    factors = _Factors()
    left = list(factors.of(lhs))
    right: list[tuple[int, ...]] = [()] * len(rhs)
    shared = zip((*lhs_batch, *lhs_contracted), (*rhs_batch, *rhs_contracted), strict=True)
    for lhs_dim, rhs_dim in shared:
        right[rhs_dim] = left[lhs_dim]
    free = [d for d in range(len(rhs)) if d not in (*rhs_batch, *rhs_contracted)]
    for dim in free:
        (right[dim],) = factors.of((rhs[dim],))
    group = right[grouped[0]]
    rows = [left[d] for d in range(len(lhs)) if d not in (*lhs_batch, *lhs_contracted)]
    columns = [right[d] for d in free if d != grouped[0]]
    return ShardingRule(
        tuple(factors.sizes),
        (tuple(left), tuple(right), (group,)),
        ((*(left[d] for d in lhs_batch), *rows, *columns),),
        reduction=frozenset(left[d][0] for d in lhs_contracted),
        need_replication=frozenset({group[0], *(left[d][0] for d in ragged)}),
    )


@lru_cache(maxsize=4096)
def _through(rule: ShardingRule) -> ShardingRule:
    """A custom call's rule with only those factors free that pass through it.

    jax gives factors to dimensions of which a call needs all, as those of a matrix to invert: only
    its operands or only its results have them. What a sum over a factor would be nobody says.
    """
    mappings = (*rule.operands, *rule.results)
    operands, results = (
        {f for mapping in side for dim in mapping for f in dim}
        for side in (rule.operands, rule.results)
    )
    merged = {f for mapping in mappings for dim in mapping if len(dim) > 1 for f in dim}
    whole = (operands ^ results) | merged | rule.reduction
    return replace(rule, need_replication=rule.need_replication | whole, reduction=frozenset[int]())


def _check_fit(op: ir.OpView, target: str, rule: ShardingRule) -> None:
    """Raises PassError where a rule is not one of this op."""
    for what, values, mappings in (
        ("operands", op.operands, rule.operands),
        ("results", op.results, rule.results),
    ):
        ranks = [len(shape) for shape in _shapes(values)]
        given = [len(mapping) for mapping in mappings]
        if ranks != given:
            raise PassError(
                op,
                f"the sharding rule registered for @{target} is for {what} of ranks {given}, "
                f"this call has ranks {ranks}",
            )
        used = {f for mapping in mappings for dim in mapping for f in dim}
        unknown = sorted(used - set(range(len(rule.factor_sizes))))
        if unknown:
            raise PassError(
                op,
                f"the sharding rule registered for @{target} uses factor {unknown[0]} in its "
                f"{what} but has {len(rule.factor_sizes)} factor sizes",
            )
