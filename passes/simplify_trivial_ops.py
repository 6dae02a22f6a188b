"""Brings any StableHLO program into the form that the planning passes read.

* Calls are inlined: nested ones, those from several places, those in loops, and
  `stablehlo.composite`.
* Annotations of GSPMD and of memories other than the devices' are removed, with one remark each.
  An `sdy.mesh` that nothing refers to is removed, too.
* Collectives of one device, as a `shard_map` over one device makes, are removed. The number of that
  device is 0.
* If a result aliases an argument or an earlier result but requests a different `sdy.sharding`, a
  constraint is inserted.
* Batch norms are written out. Ops that do nothing are removed, and chains of two become one op. The
  rewrites:

      reshape(x) : type(x) -> x
      convert(x) : type(x) -> x
      bitcast_convert(x) : type(x) -> x
      slice(x) : type(x) -> x
      dynamic_slice(x, ...) : type(x) -> x, since start indices are clamped
      reshape(reshape(x)) -> reshape(x)
      reshape(broadcast_in_dim(x)) -> reshape(x), where dimensions of size 1 are all it adds
      transpose(x, [0, 1, ...]) -> x
      transpose(transpose(x, p), q) -> transpose(x, p[q])
      convert(convert(x)) -> convert(x), where the inner one is exact
      broadcast_in_dim(x, [0, 1, ...]) : type(x) -> x
      broadcast_in_dim(broadcast_in_dim(x, p), q) -> broadcast_in_dim(x, q[p])
      dynamic_update_slice(x, update : type(x), ...) -> update, since start indices are clamped
      pad(x, value, low = 0, high = 0, interior = 0) -> x
      concatenate(x) -> x
      reverse(x, dims of size 1 or none) -> x
      negate(negate(x)) -> x
      not(not(x)) -> x
      add(x, 0), add(0, x) -> x, for floats only where the zero is -0.0
      subtract(x, 0) -> x, for floats only where the zero is +0.0
      multiply(x, 1), multiply(1, x) -> x
      divide(x, 1) -> x
      select(p, x, x) -> x
      select(true, x, y) -> x; select(false, x, y) -> y
      get_tuple_element(tuple(x, y, ...), i) -> the i-th
      reduce(x, init) of no dimension by op -> op(broadcast_in_dim(init), x)
      batch_norm_training(x, scale, offset) -> normalised x, E[x], Var[x]
      batch_norm_inference(x, scale, offset, mean, variance) -> x * s + (offset - mean * s)
      batch_norm_grad(x, scale, mean, variance, dy) -> d x, d scale, d offset
      while(x...) of no trips -> x...
      while(x...) of one trip -> its body of x...
      if(true, x, y) -> x; if(false, x, y) -> y
      case(i, x, y, ...) -> the i-th branch, or the last one if i is out of range

* Ops without effects whose results are not used are erased, loops and branches of such ops, too.
* Each computationally trivial op (element-wise, transpose, reshape, broadcast, reduce) gets
  `alpa.follow`, the number of the operand whose sharding it takes: see `simplify/follow.py`.

`stablehlo.optimization_barrier`, `sdy.constant` and the markers `@alpa.layer_boundary` and
`@alpa.gradient` stay. No tensor is folded at compile time. Common subexpressions are left to
`layer-cluster`.

**Before**::

    func.func private @square(%x: tensor<4xf32>) -> tensor<4xf32> {
      %y = stablehlo.multiply %x, %x : tensor<4xf32>
      return %y : tensor<4xf32>
    }
    func.func public @main(%x: tensor<2x2xf32>) -> tensor<4xf32> {
      %0 = stablehlo.reshape %x : (tensor<2x2xf32>) -> tensor<1x4xf32>
      %1 = stablehlo.reshape %0 : (tensor<1x4xf32>) -> tensor<4xf32>
      %2 = call @square(%1) : (tensor<4xf32>) -> tensor<4xf32>
      return %2 : tensor<4xf32>
    }

**After**::

    func.func public @main(%x: tensor<2x2xf32>) -> tensor<4xf32> {
      %0 = stablehlo.reshape %x {alpa.follow = 0 : i64} : (tensor<2x2xf32>) -> tensor<4xf32>
      %1 = stablehlo.multiply %0, %0 {alpa.follow = 0 : i64} : tensor<4xf32>
      return %1 : tensor<4xf32>
    }

**Requires**: StableHLO with one public function.

**Ensures**: the module holds one function without calls, and no op that the rewrites above remove.
Each trivial op has `alpa.follow`. A custom call with a registered cost has `alpa.cost`, unless it
brought its own (`sharding/call_costs.py`).

**Options**: none.

**Fails when** the module does not hold one public function with a body of one block, it has been
cut into stages already, a shape is dynamic, or a call is recursive. It also fails when the program
is written for several replicas (`pmap`) or with GSPMD's `shard_map`, which `import-hlo` rewrites,
talks to its host (callbacks, infeed, ordered effects), is exported for several platforms, or has
collectives outside of `sdy.manual_computation`, or when the registered cost of a custom call
raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from alpa.dialects import body, ir
from alpa.dialects.symbols import drop_unused_meshes
from alpa.passes.analysis.input_checks import check_input, check_unplanned
from alpa.passes.base import Pass, Remark
from alpa.passes.sharding.call_costs import write_costs
from alpa.passes.simplify.follow import mark_follow
from alpa.passes.simplify.gspmd import drop_gspmd
from alpa.passes.simplify.host_calls import refuse_host_calls
from alpa.passes.simplify.identities import REWRITES
from alpa.passes.simplify.inline import inline_calls
from alpa.passes.simplify.lone_device import run_on_one_device
from alpa.passes.simplify.memory_kinds import drop_memory_kinds
from alpa.passes.simplify.returned import separate_results
from alpa.passes.simplify.rewriter import simplify


@dataclass(frozen=True, kw_only=True)
class SimplifyTrivialOps(Pass):
    """Inlines calls, removes ops that do nothing, marks which operand trivial ops follow."""

    name: ClassVar[str] = "simplify-trivial-ops"

    def run(self, module: ir.Module, remark: Remark) -> None:
        with module.context:
            main = check_input(module, is_checked=self.is_checked)
            check_unplanned(main)
            drop_gspmd(module, remark)
            others = inline_calls(module, main)
            drop_unused_meshes(module)
            refuse_host_calls(main, others)
            write_costs(others)
            drop_memory_kinds(main, others, remark)
            run_on_one_device(module, others)
            simplify(body(main), REWRITES)
            separate_results(module, main)  # last: rewrites make results of arguments
            mark_follow(body(main))
