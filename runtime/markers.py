"""`alpa.grad`, `alpa.value_and_grad` and `alpa.mark_layer_boundary`: markers for models.

A marker is the identity. It lowers to a `stablehlo.composite` of its name with an empty
decomposition, so a marked function compiles in XLA as if it had no markers. When Alpa lowers a
function, `to_custom_calls` turns markers into the custom calls that the passes read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from alpa.dialects import func, ir, stablehlo, walk
from alpa.dialects.attributes import BATCH_DIM, GRADIENT, LAYER_BOUNDARY, RANDOM
from alpa.dialects.records import i64

# The effect of an op that must stay although nothing reads it. Gradients, loops and recomputation
# allow this effect. JAX has no public name for it.
_EFFECTS = frozenset(jax.make_jaxpr(lambda: jax.debug.print(""))().effects)


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Differentiates like `jax.grad` and marks the gradients that micro-batches add up.

    Under plain `jax.jit` it is `jax.grad`.
    """
    both = value_and_grad(fun, argnums, has_aux, holomorphic, allow_int)

    @wraps(fun)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return gradient


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Differentiates like `jax.value_and_grad` and marks the gradients, as `alpa.grad` does."""
    plain = jax.value_and_grad(fun, argnums, has_aux, holomorphic, allow_int)

    @wraps(plain)
    def marked(*args: Any, **kwargs: Any) -> Any:
        value, gradients = plain(*args, **kwargs)
        return value, jax.tree.map(_mark_gradient, gradients)

    return marked


def mark_layer_boundary() -> None:
    """Marks the end of a layer and the start of the next one. Stages consist of whole layers.

    Call it between two layers of the forward pass. A program with such markers is split into layers
    at the markers and nowhere else.
    """
    _layer_boundary.bind()


def is_gradient_mark(eqn: JaxprEqn) -> bool:
    """Whether an equation marks a gradient."""
    return eqn.primitive is _gradient


def mark_random(numbers: Any, dim: int) -> Any:
    """Marks numbers that each micro-batch draws anew for its samples, along a dimension.

    `dim` is -1 if that is impossible: the numbers are drawn along several dimensions, or from a key
    that is not an argument. It is `SHARED` if they are numbers that all samples should share.
    """
    return _random.bind(numbers, dim=dim)


def to_custom_calls(module: ir.Module) -> None:
    """Replaces each marker of a lowered module by the custom call of its name, in place."""
    identities: set[str] = set()
    for op in list(walk(module.body)):
        if op.operation.name != "stablehlo.composite":
            continue
        target = ir.StringAttr(op.attributes["name"])
        if target.value not in (GRADIENT, LAYER_BOUNDARY, RANDOM):
            continue
        identities.add(ir.FlatSymbolRefAttr(op.attributes["decomposition"]).value)
        with ir.InsertionPoint(op), op.location:
            call = stablehlo.CustomCallOp(
                [result.type for result in op.results],
                list(op.operands),
                target,
                has_side_effect=not op.results,
            )
        if target.value == RANDOM:
            fields = ir.DictAttr(op.attributes["composite_attributes"])
            call.operation.attributes[BATCH_DIM] = fields[BATCH_DIM]
        for old, new in zip(op.results, call.results, strict=True):
            old.replace_all_uses_with(new)
        op.operation.erase()
    for op in list(module.body.operations):
        if isinstance(op, func.FuncOp) and op.sym_name.value in identities:
            op.operation.erase()


def _mark_gradient(gradient: Any) -> Any:
    return gradient if gradient.dtype == jax.dtypes.float0 else _gradient.bind(gradient)


def _lower(
    context: mlir.LoweringRuleContext,
    *operands: ir.Value,
    target: str,
    attributes: dict[str, ir.Attribute] | None = None,
) -> list[ir.Value]:
    """A composite whose decomposition returns its arguments."""
    module = context.module_context
    types = [operand.type for operand in operands]
    with ir.InsertionPoint.at_block_begin(module.module.body):
        identity = func.FuncOp(target, (types, types), visibility="private")
        entry = identity.add_entry_block()
        with ir.InsertionPoint(entry):
            func.ReturnOp(list(entry.arguments))
    module.symbol_table.insert(identity)  # may rename it
    name = ir.FlatSymbolRefAttr.get(identity.sym_name.value)
    fields = ir.DictAttr.get(attributes or {})
    composite = stablehlo.CompositeOp(types, operands, target, name, composite_attributes=fields)
    return list(composite.results)


def _lower_gradient(context: mlir.LoweringRuleContext, x: ir.Value) -> list[ir.Value]:
    return _lower(context, x, target=GRADIENT)


def _lower_layer_boundary(context: mlir.LoweringRuleContext) -> list[ir.Value]:
    return _lower(context, target=LAYER_BOUNDARY)


def _lower_random(context: mlir.LoweringRuleContext, x: ir.Value, *, dim: int) -> list[ir.Value]:
    return _lower(context, x, target=RANDOM, attributes={BATCH_DIM: i64(dim)})


def _batch_gradient(arguments: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
    return _gradient.bind(arguments[0]), dims[0]


_gradient = Primitive("alpa_gradient")
_gradient.def_impl(jnp.asarray)
_gradient.def_abstract_eval(lambda x: x)
ad.deflinear2(_gradient, lambda cotangent, _: [cotangent])
batching.primitive_batchers[_gradient] = _batch_gradient
mlir.register_lowering(_gradient, _lower_gradient)

_layer_boundary = Primitive("alpa_layer_boundary")
_layer_boundary.multiple_results = True
_layer_boundary.def_impl(list)
_layer_boundary.def_effectful_abstract_eval(lambda: ([], _EFFECTS))
mlir.register_lowering(_layer_boundary, _lower_layer_boundary)

_random = Primitive("alpa_random")
_random.def_impl(lambda x, *, dim: jnp.asarray(x))
_random.def_abstract_eval(lambda x, *, dim: x)
mlir.register_lowering(_random, _lower_random)
