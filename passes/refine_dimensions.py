"""Gives the symbolic dimensions of a program their sizes.

`jax.export` writes programs with dimensions of any size. A plan is for one size, so each name gets
a number. The other dimensions follow: StableHLO's own passes find the shapes of all values, and
what the program checks of its sizes is checked here. XLA's passes find the shapes of programs with
constraints or `shard_map`, and those of the custom calls that JAX writes for `jnp.cumsum` along
such a dimension (`stablehlo.dynamic_reduce_window`) and for random bits of such a shape
(`stablehlo.dynamic_rng_bit_generator`).

**Before**::

    func.func public @main(%x: tensor<?x4xf32>) -> tensor<?x4xf32> {
      %0 = stablehlo.get_dimension_size %x, dim = 0 : (tensor<?x4xf32>) -> tensor<i32>
      %1 = stablehlo.constant dense<1> : tensor<i32>
      %2 = stablehlo.compare GE, %0, %1 : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.custom_call @shape_assertion(%2, %0) {
          api_version = 2 : i32, has_side_effect = true,
          error_message = "b = {0} from specification 'b' for dimension x.shape[0] (= {0})"}
        : (tensor<i1>, tensor<i32>) -> ()
      %3 = stablehlo.tanh %x : tensor<?x4xf32>
      return %3 : tensor<?x4xf32>
    }

**After** `refine-dimensions{sizes=b=8}`::

    func.func public @main(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
      …
      %3 = stablehlo.tanh %x : tensor<8x4xf32>
      return %3 : tensor<8x4xf32>
    }

**Requires**: a program whose dynamic dimensions are those of its arguments, or follow from them.
The assertions of its sizes, as `jax.export` writes them, say which names the dimensions have.

**Ensures**: all shapes are static. There are no assertions of sizes, and calls are inlined.

**Options**: see the fields.

**Fails when** a name is unknown or has no size, a dimension has no name, a size is above
2147483647, the sizes break an assertion, or the shape of a value does not follow from the
arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from alpa.dialects import func, ir, main_function, passmanager, separate, stablehlo
from alpa.dialects.reading import move_contents
from alpa.dialects.refining import has_dynamic_calls, has_shardy_ops, refine_by_xla
from alpa.passes.analysis.input_checks import check_input
from alpa.passes.analysis.symbolic_dims import (
    assertions,
    dynamic_dims,
    message_of,
    name_arguments,
    place_of_dims,
    symbolic_dims,
)
from alpa.passes.base import OptionError, Pass, Remark, errors_at, option
from alpa.passes.simplify.inline import inline_calls

_ARGUMENTS = "stablehlo-refine-arguments{{types={types}}}"
_SHAPES = "stablehlo-refine-shapes,func.func(stablehlo-canonicalize-dynamism)"
_IS_SYMBOLIC = "jax.uses_shape_polymorphism"
_SIZE = re.compile(r"([^\W\d]\w*)=0*(\d+)")
_LARGEST = 2**31 - 1
"""Programs compute with sizes in 32 bits."""
_PREFIX = "Input shapes do not match the polymorphic shapes specification. "
_END = re.compile(r"\s*(?:Using the following polymorphic|Obtained dimension variables|Please see)")


@dataclass(frozen=True, kw_only=True)
class RefineDimensions(Pass):
    """Gives the symbolic dimensions of a program their sizes."""

    name: ClassVar[str] = "refine-dimensions"

    sizes: str = option("", "the size of each name, such as `b=8`, or `b=8,t=128`")

    def run(self, module: ir.Module, remark: Remark) -> None:
        sizes = _parse(self.sizes)
        main = main_function(module)
        place = place_of_dims(main)
        with errors_at(place):
            types = ",".join(_types(main, sizes))
        name_arguments(main)
        # The pass that refines shapes allows a function to be called with one set of sizes only.
        inline_calls(module, main)
        has_shardy = has_shardy_ops(module)
        # StableHLO's pass changes the operands of Shardy's ops and not their results.
        checked = _assertions_only(module) if has_shardy else module
        _run(checked, f"{_ARGUMENTS.format(types=types)},{_SHAPES}")
        for assertion in list(assertions(main_function(checked))):
            with errors_at(place):
                _check(assertion, self.sizes)
            assertion.operation.erase()
        if has_shardy:
            _run(module, _ARGUMENTS.format(types=types))
        if has_shardy or has_dynamic_calls(module):
            with errors_at(place):
                refined = refine_by_xla(module)
            move_contents(refined, module)
            inline_calls(module, main_function(module))  # erases the functions that calls named
        if _IS_SYMBOLIC in module.operation.attributes:
            del module.operation.attributes[_IS_SYMBOLIC]
        check_input(module)


def _run(module: ir.Module, pipeline: str) -> None:
    passes = passmanager.PassManager.parse(f"builtin.module({pipeline})", module.context)
    passes.run(module.operation)


def _assertions_only(module: ir.Module) -> ir.Module:
    """A copy whose `@main` returns nothing and has only the assertions, with what they read."""
    copy = separate(module.operation)
    main = main_function(copy)
    with copy.context, main.location:
        *ops, end = main.entry_block.operations
        func.ReturnOp([], ip=ir.InsertionPoint(end))
        end.operation.erase()
        inputs = main.type.inputs
        main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, []))
        if "res_attrs" in main.attributes:
            del main.attributes["res_attrs"]
    kept = set(assertions(main))
    for op in reversed(ops):
        if op not in kept and not any(True for it in op.results for _ in it.uses):
            op.operation.erase()
    return copy


def _parse(text: str) -> dict[str, int]:
    """The size of each name. Raises OptionError."""
    found: dict[str, int] = {}
    for part in text.split(","):
        match = _SIZE.fullmatch(part)
        if match is None:
            raise OptionError(f"option 'sizes' is '{text}'; expected NAME=SIZE,NAME=SIZE")
        if match[1] in found:
            raise OptionError(f"option 'sizes' is '{text}': '{match[1]}' has two sizes")
        # Python refuses to read thousands of digits.
        if len(match[2]) > len(str(_LARGEST)) or int(match[2]) > _LARGEST:
            raise OptionError(
                f"option 'sizes' is '{text}': '{match[1]}' is too large; a size is at most "
                f"{_LARGEST}"
            )
        found[match[1]] = int(match[2])
    return found


def _types(main: func.FuncOp, sizes: Mapping[str, int]) -> list[str]:
    """The types of the arguments with these sizes. Raises ValueError."""
    known, dynamic = symbolic_dims(main), dynamic_dims(main)
    arguments = list(main.entry_block.arguments)
    if not dynamic:
        raise ValueError("the program has no symbolic dimension: all sizes are given; refine none")
    shapes = {a: list(ir.RankedTensorType(arguments[a].type).shape) for a, _ in dynamic}
    for a, d in dynamic:
        if (a, d) not in known:
            raise ValueError(
                f"dimension {d} of argument {a} has no name in the program, so it cannot be given "
                "a size; export it with JAX's shape assertions, or with concrete shapes",
            )
    symbols = sorted(set().union(*(dim.symbols for dim in known.values())))
    for name in sizes:
        if name not in symbols:
            have = ", ".join(symbols) or "none"
            raise ValueError(f"no symbolic dimension is called '{name}'; the program has {have}")
    for a, d in dynamic:
        dim = known[a, d]
        for name in sorted(dim.symbols - sizes.keys()):
            raise ValueError(
                f"dimension {d} of argument {a} is '{dim.expression}' ({dim.name}), and '{name}' "
                f"has no size; give it one: {name}=SIZE",
            )
        shapes[a][d] = dim.size(sizes)
        if shapes[a][d] < 0:
            raise ValueError(
                f"dimension {d} of argument {a} is '{dim.expression}' ({dim.name}), which is "
                f"{shapes[a][d]} for the given sizes",
            )
        if shapes[a][d] > _LARGEST:
            raise ValueError(
                f"dimension {d} of argument {a} is '{dim.expression}' ({dim.name}), which is "
                f"{shapes[a][d]} for the given sizes; a dimension is at most {_LARGEST}",
            )
    return [
        str(ir.RankedTensorType.get(shapes[a], ir.RankedTensorType(argument.type).element_type))
        if a in shapes
        else str(argument.type)
        for a, argument in enumerate(arguments)
    ]


def _check(assertion: stablehlo.CustomCallOp, sizes: str) -> None:
    """Raises ValueError unless an assertion of constants holds."""
    holds, *operands = (_constant(value) for value in assertion.operands)
    if holds:
        return
    message = message_of(assertion).removeprefix(_PREFIX)
    message = message[: found.start()] if (found := _END.search(message)) else message
    for number, value in enumerate(operands):
        message = message.replace(f"{{{number}}}", "?" if value is None else str(value))
    wrong = "cannot be checked" if holds is None else "is not what the program expects"
    raise ValueError(f"{sizes} {wrong}: {message.rstrip('. ')}; choose another size")


def _constant(value: ir.Value) -> int | None:
    """The number that a scalar value is; None if it is not constant."""
    owner = value.owner.opview if isinstance(value, ir.OpResult) else None
    if not isinstance(owner, stablehlo.ConstantOp):
        return None
    return int(np.array(owner.attributes["value"]).item())
