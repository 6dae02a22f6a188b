// RUN: not alpa-opt %s --verify-diagnostics 2>&1 | filecheck %s

// A diagnostic that nobody expects and one that does not come are errors.

// CHECK: alpa_opt_verify_invalid.mlir:11:26: error: unexpected error: use of undeclared SSA value
// CHECK-NEXT: alpa_opt_verify_invalid.mlir:10:1: error: expected error "of another kind" was not
// CHECK-NOT: error

func.func @undeclared_value(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @below {{of another kind}}
  %0 = stablehlo.add %x, %y : tensor<4xf32>
  return %0 : tensor<4xf32>
}
