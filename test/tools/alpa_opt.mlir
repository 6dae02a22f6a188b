// RUN: alpa-opt %s --pipeline='func.func(canonicalize,cse)' | filecheck %s

// Upstream passes run, options and nesting as in mlir-opt.

// CHECK-LABEL: func.func @common_subexpressions
// CHECK-NEXT: %[[SUM:.*]] = stablehlo.add %arg0, %arg0
// CHECK-NEXT: stablehlo.multiply %[[SUM]], %[[SUM]]
// CHECK-NOT: stablehlo.negate
func.func @common_subexpressions(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %x, %x : tensor<4xf32>
  %1 = stablehlo.add %x, %x : tensor<4xf32>
  %dead = stablehlo.negate %x : tensor<4xf32>
  %2 = stablehlo.multiply %0, %1 : tensor<4xf32>
  return %2 : tensor<4xf32>
}
