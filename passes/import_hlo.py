"""Brings a module that came from HLO, as XLA and PyTorch/XLA dump it, into JAX's terms.

* Tuples are replaced by their elements: in arguments and results, calls, and the results of custom
  calls.
* `mhlo.input_output_alias` of the module becomes `tf.aliasing_output` of the arguments, from which
  roles follow. Where arguments say themselves what is donated, they are believed.
* GSPMD's `shard_map`, `@SPMDFullToShardShape`, becomes `sdy.manual_computation` over a mesh with as
  few axes as its shardings allow, `axis0` and so on.
* Ops of Shardy that JAX does not write (`sdy.reshard`, `sdy.all_gather` and others that move
  shards) become `sdy.sharding_constraint`, and `sdy.named_computation` its body.
* A remark says which constants are elided: they have a type, and no values.

**Before**::

    module attributes {mhlo.input_output_alias = [{alias = {kind = "may_alias",
        parameter_index = array<i64>, parameter_number = 0 : i64}, output_index = array<i64: 1>}]} {
      func.func public @main(%w: tensor<4xf32>, %x: tensor<4xf32>)
          -> tuple<tensor<4xf32>, tensor<4xf32>> {
        %0 = stablehlo.subtract %w, %x : tensor<4xf32>
        %1 = stablehlo.tuple %x, %0 : tuple<tensor<4xf32>, tensor<4xf32>>
        return %1 : tuple<tensor<4xf32>, tensor<4xf32>>
      }
    }

**After**::

    module {
      func.func public @main(%w: tensor<4xf32> {tf.aliasing_output = 1 : i32}, %x: tensor<4xf32>)
          -> (tensor<4xf32>, tensor<4xf32>) {
        %0 = stablehlo.subtract %w, %x : tensor<4xf32>
        return %x, %0 : tensor<4xf32>, tensor<4xf32>
      }
    }

**Requires**: StableHLO with one public function.

**Ensures**: no value is a tuple, and the module has no `mhlo.input_output_alias`. No
`shard_map` for several devices is in GSPMD's form. Of the ops of Shardy that say where a value is,
only constraints are left.

**Options**: none.

**Fails when** the module does not hold one public function with a body of one block, a shape is
dynamic, a custom call takes a tuple as one operand, another op takes or gives one, an alias
names an argument or a result that is not there, or one that another alias names, an op of Shardy
makes or adds up partial sums, or GSPMD's `shard_map` is over some axes of its mesh only, has
shardings without a mesh in common, or reads whole arrays inside.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from alpa.dialects import func, ir, main_function, ops_where, separate
from alpa.dialects.elided import CONSTANTS, elided_among
from alpa.passes.analysis.graph import type_bytes
from alpa.passes.analysis.input_checks import check_input, checked_types
from alpa.passes.base import Pass, Remark
from alpa.passes.cost.device import size_text
from alpa.passes.imports.aliases import take_aliases, write_aliases
from alpa.passes.imports.shard_map import import_shard_maps
from alpa.passes.imports.shardy import SHARDY, import_shardy
from alpa.passes.imports.tuples import flatten_tuples

_LOOKED_AT = {*CONSTANTS, *SHARDY, "stablehlo.custom_call"}


@dataclass(frozen=True, kw_only=True)
class ImportHlo(Pass):
    """Replaces tuples by their elements, and the module's aliases by donated arguments."""

    name: ClassVar[str] = "import-hlo"

    def run(self, module: ir.Module, remark: Remark) -> None:
        with module.context:
            main, types = checked_types(module)
            looked_at = ops_where(module, lambda op: op.name in _LOOKED_AT)
            _remark_elided(looked_at, remark)
            aliases = take_aliases(module, main)
            if any(isinstance(it, ir.TupleType) for it in types):
                functions = [op for op in module.body.operations if isinstance(op, func.FuncOp)]
                flatten_tuples(functions)
                looked_at = ops_where(module, lambda op: op.name in _LOOKED_AT)
            import_shard_maps(module, looked_at)
            import_shardy(looked_at)
            write_aliases(main, aliases)
            if aliases:
                check_input(module, is_checked=True)


def _remark_elided(ops: Iterable[ir.OpView], remark: Remark) -> None:
    """Says which constants have no values; the first one is the place."""
    elided = elided_among(ops)
    if elided:
        size = sum(type_bytes(op.results[0].type) for op in elided)
        those = "1 constant is" if len(elided) == 1 else f"{len(elided)} constants are"
        remark(
            elided[0].location,
            f"{those} elided, from here on: {size_text(size)} of values were left out when the "
            "program was printed. It is planned by their types, and cannot be run; print it with "
            "all values, or make them arguments",
        )


def without_tuples(module: ir.Module) -> ir.Module:
    """A program whose arguments and results are those of its plan: the module, or, if it takes or
    gives tuples, a copy with their elements instead.

    Raises:
        PassError: `import-hlo` refuses the program.
    """
    type_ = main_function(module).type
    if not any(isinstance(it, ir.TupleType) for it in (*type_.inputs, *type_.results)):
        return module
    copy = separate(module.operation)
    ImportHlo().run(copy, lambda location, message: None)
    return copy
