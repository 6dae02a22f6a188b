"""Static shapes for what StableHLO's own passes do not refine; XLA's passes do.

These are the ops of Shardy, and custom calls that `jax.export` writes where StableHLO has no
dynamic op: `stablehlo.dynamic_reduce_window`, `stablehlo.dynamic_rng_bit_generator` and
`stablehlo.dynamic_top_k`.
"""

from __future__ import annotations

from alpa.dialects.attributes import call_target
from alpa.dialects.bindings import ir, main_function, walk
from alpa.dialects.reading import bytecode, parse

_DYNAMIC = "stablehlo.dynamic_"


def has_dynamic_calls(module: ir.Module) -> bool:
    """Whether the public function has such a custom call."""
    targets = (call_target(op) for op in walk(main_function(module).entry_block))
    return any(target is not None and target.startswith(_DYNAMIC) for target in targets)


def has_shardy_ops(module: ir.Module) -> bool:
    """Whether the public function has an op of Shardy, such as a constraint or a `shard_map`."""
    return any(op.name.startswith("sdy.") for op in walk(main_function(module).entry_block))


def refine_by_xla(module: ir.Module) -> ir.Module:
    """A copy of a module with static shapes, without assertions of shapes.

    `@main` has arguments of static shapes. Ops replace the custom calls, except a call whose
    operands are not constant.

    Raises:
        ValueError: XLA refuses the module.
    """
    # It takes 0.3 s to import, and few programs have these calls.
    from jaxlib import _jax  # noqa: PLC0415  # pyright: ignore[reportAttributeAccessIssue]

    try:
        refined = _jax.mlir.refine_polymorphic_shapes(
            bytecode(module), enable_shape_assertions=False, validate_static_shapes=False
        )
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"XLA cannot find the shapes of this module: {reason}") from error
    return parse(refined, module.context)
