"""Op sharding rules: Shardy's own, those registered for custom calls, and ours for the rest.

Shardy's pass `sdy-populate-op-sharding-rules` writes most of them; `populated(module)` runs it
for a while. `rule_of(op)` reads an op's rule and knows these besides:

* custom calls by `register_sharding_rule`; only what passes through a call is ever cut;
* FFI calls of LAPACK and cuSOLVER: batch dimensions pass through (`linear_algebra.py`);
* element-wise ops of CHLO and `stablehlo.map`: each dimension passes through;
* constants, iota: each dimension of the result is free;
* optimization_barrier: each dimension of each operand passes to the result of its number;
* `stablehlo.rng` is replicated: split, it would draw other numbers;
* `chlo.top_k`: the last dimension is replicated, the others pass through;
* `chlo.ragged_dot` whose rows are grouped: rows and groups are replicated, the rest as dot_general.

Loops, branches, calls and unknown custom calls have none.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import chain, count
from typing import Any

from alpa.dialects import chlo, ir, passmanager, sdy, stablehlo, walk
from alpa.dialects.sharding import ShardingRule
from alpa.passes.analysis.op_kinds import ELEMENTWISE_CHLO, ELEMENTWISE_STABLEHLO, SOURCES
from alpa.passes.base import PassError, UsersCode, check_kind
from alpa.passes.sharding.linear_algebra import linear_algebra_rule
from alpa.passes.sharding.padded_ops import with_padding

SHARDING_RULE = "sdy.sharding_rule"
_POPULATE = "sdy-populate-op-sharding-rules"
_DROP = "sdy-drop-sharding-rules"
_ELEMENTWISE = ELEMENTWISE_CHLO | ELEMENTWISE_STABLEHLO

RuleOf = Callable[[ir.OpView], ShardingRule | None]
CustomRule = ShardingRule | Callable[[ir.OpView], ShardingRule]


# Filled by user code before it plans; nothing in the compiler writes it.
CUSTOM_CALL_RULES: dict[str, CustomRule] = {}
"""Sharding rules of custom calls by their target: what users teach the compiler."""


def _registered(op: ir.OpView) -> ShardingRule | None:
    """The rule registered for a custom call.

    Raises:
        PassError: the rule does not fit the op's operands and results, or its function raises.
    """
    target = ir.StringAttr(op.attributes["call_target_name"]).value
    rule = CUSTOM_CALL_RULES.get(target)
    if rule is None:
        return None
    if not isinstance(rule, ShardingRule):
        title = f"the sharding rule registered for @{target}"
        with UsersCode(lambda reason: PassError(op, f"{title}: {reason}")):
            rule = rule(op)
            check_kind("what it returns", rule, ShardingRule)
    _check_fit(op, target, rule)
    return rule


def _of_routine(op: ir.OpView) -> ShardingRule | None:
    """The rule of a call of a routine of linear algebra."""
    config = op.attributes.get("backend_config")
    if isinstance(config, ir.StringAttr) and config.value:
        return None
    target = ir.StringAttr(op.attributes["call_target_name"]).value
    return linear_algebra_rule(target, tuple(_shapes(op.operands)), tuple(_shapes(op.results)))


def register_sharding_rule(target: str, rule: CustomRule) -> None:
    """Teaches the planner how custom calls of a target may be sharded.

    `rule` is a ShardingRule, or a function that makes one from the op, which fits any shape. A
    custom call that carries `sdy.sharding_rule` itself keeps that.

    Raises:
        TypeError: an argument is of another type.
    """
    check_kind("target", target, str)
    check_kind("rule", rule, ShardingRule, Callable)
    CUSTOM_CALL_RULES[target] = rule


@contextmanager
def populated(module: ir.Module) -> Generator[RuleOf]:
    """As `populate`, and gives `rule_of`; the attributes that it wrote are removed at the end.

    Used as:

        with populated(module) as rule_of:
            rule = rule_of(op)
    """
    given = [
        (op, op.attributes[SHARDING_RULE])
        for op in walk(module.body)
        if SHARDING_RULE in op.attributes
    ]
    registered = bool(CUSTOM_CALL_RULES)
    try:
        populate(module)
        yield rule_of
    finally:
        _run(_DROP, module)  # Shardy keeps the rules of custom calls that are not its own.
        for op in walk(module.body) if registered else ():
            if isinstance(op, stablehlo.CustomCallOp) and SHARDING_RULE in op.attributes:
                del op.attributes[SHARDING_RULE]
        for op, rule in given:
            op.attributes[SHARDING_RULE] = rule


def populate(module: ir.Module) -> None:
    """Writes the rules that Shardy or the user knows on all ops.

    The text of the module then has all rules, for a process that has no registry.
    """
    # Shardy warns of each op that it has no rule for; we have rules for those, or say so ourselves.
    handler: Any = module.context.attach_diagnostic_handler(
        lambda diagnostic: "sharding rule registry" in diagnostic.message
    )
    try:
        _run(_POPULATE, module)
    finally:
        handler.detach()
    if not CUSTOM_CALL_RULES:
        return
    for op in walk(module.body):
        if isinstance(op, stablehlo.CustomCallOp) and SHARDING_RULE not in op.attributes:
            rule = _registered(op)
            if rule is not None:
                with module.context:
                    op.attributes[SHARDING_RULE] = rule.to_attr()


def _run(name: str, module: ir.Module) -> None:
    """Runs one of Shardy's passes on all functions."""
    with module.context:
        passes = passmanager.PassManager.parse(f"builtin.module(func.func({name}))")
        passes.run(module.operation)


def rule_of(op: ir.OpView) -> ShardingRule | None:
    """The sharding rule of an op; None where the caller has to decide: loops, branches, unknowns.

    It says which factors may be cut unevenly (`padding.py`).

    Raises:
        PassError: a rule that the user gave does not fit the op.
    """
    rule = _even_rule(op)
    return None if rule is None else with_padding(op, rule)


def _even_rule(op: ir.OpView) -> ShardingRule | None:
    attr = op.attributes.get(SHARDING_RULE)
    name = op.operation.name
    if name == "stablehlo.custom_call":
        given = _registered(op) if attr is None else ShardingRule.from_attr(attr)
        if given is None:
            return _of_routine(op)
        rule = _through(given)
        if attr is None or sdy.OpShardingRuleAttr(attr).is_custom:
            _check_sizes(op, rule)
        return rule
    if attr is not None:
        return ShardingRule.from_attr(attr)
    if name in SOURCES:
        # constant_like has an operand, which gives its shape alone.
        return _elementwise(len(op.operands), len(op.results), _shapes(op.results)[0])
    if name in _ELEMENTWISE:
        shape, *others = {*_shapes(op.operands), *_shapes(op.results)}
        return None if others else _elementwise(len(op.operands), len(op.results), shape)
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


def _own_factors(shapes: Sequence[_Shape]) -> tuple[_Shape, tuple[_Mapping, ...]]:
    """Factors of which each dimension has one for itself: their sizes, and those of the tensors."""
    numbers = count()
    mappings = tuple(tuple((next(numbers),) for _ in shape) for shape in shapes)
    return tuple(chain(*shapes)), mappings


@lru_cache(maxsize=1024)
def _elementwise(num_operands: int, num_results: int, shape: _Shape) -> ShardingRule:
    mapping = tuple((dim,) for dim in range(len(shape)))
    return ShardingRule(shape, (mapping,) * num_operands, (mapping,) * num_results)


@lru_cache(maxsize=1024)
def _per_operand(shapes: tuple[_Shape, ...]) -> ShardingRule:
    sizes, mappings = _own_factors(shapes)
    return ShardingRule(sizes, mappings, mappings)


@lru_cache(maxsize=1024)
def _replicated(operands: tuple[_Shape, ...], results: tuple[_Shape, ...]) -> ShardingRule:
    sizes, mappings = _own_factors((*operands, *results))
    whole = frozenset(range(len(sizes)))
    given, made = mappings[: len(operands)], mappings[len(operands) :]
    return ShardingRule(sizes, given, made, need_replication=whole)


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
    free = [d for d in range(len(rhs)) if d not in (*rhs_batch, *rhs_contracted)]
    # The factors of the left dimensions have their numbers, those of free right ones come behind.
    right = dict(zip((*rhs_batch, *rhs_contracted), (*lhs_batch, *lhs_contracted), strict=True))
    right |= {d: len(lhs) + n for n, d in enumerate(free)}
    group = right[grouped[0]]
    rows = [d for d in range(len(lhs)) if d not in (*lhs_batch, *lhs_contracted)]
    columns = [right[d] for d in free if d != grouped[0]]
    return ShardingRule(
        (*lhs, *(rhs[d] for d in free)),
        (
            tuple((d,) for d in range(len(lhs))),
            tuple((right[d],) for d in range(len(rhs))),
            ((group,),),
        ),
        (tuple((factor,) for factor in (*lhs_batch, *rows, *columns)),),
        reduction=frozenset(lhs_contracted),
        need_replication=frozenset({group, *ragged}),
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


def _check_sizes(op: ir.OpView, rule: ShardingRule) -> None:
    """Raises PassError where shards of a free factor are not even shards of its dimensions."""
    target = ir.StringAttr(op.attributes["call_target_name"]).value
    for what, values, mappings in (
        ("operand", op.operands, rule.operands),
        ("result", op.results, rule.results),
    ):
        for number, (shape, mapping) in enumerate(zip(_shapes(values), mappings, strict=True)):
            for dim, (extent, factors) in enumerate(zip(shape, mapping, strict=True)):
                for factor in set(factors) - rule.need_replication:
                    size = rule.factor_sizes[factor]
                    if size != extent and (size < 1 or extent % size != 0):
                        raise PassError(
                            op,
                            f"the sharding rule of @{target} gives dimension {dim} of {what} "
                            f"{number} a factor of size {size}, and it has {extent}; make the rule "
                            "from the shapes of the call",
                        )
