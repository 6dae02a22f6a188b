// RUN: alpa-opt %s --split-input-file --pipeline=cse | filecheck %s

// Each part is a module of its own; the parts come out with the marker between them.

// CHECK: module {
// CHECK-NEXT: func.func @same_name
// CHECK-NEXT: %0 = stablehlo.add
// CHECK-NEXT: %1 = stablehlo.multiply %0, %0
func.func @same_name(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %x, %x : tensor<4xf32>
  %1 = stablehlo.add %x, %x : tensor<4xf32>
  %2 = stablehlo.multiply %0, %1 : tensor<4xf32>
  return %2 : tensor<4xf32>
}

// -----

// CHECK: // -----
// CHECK-NEXT: module {
// CHECK-NEXT: func.func @same_name(%arg0: tensor<8xf32>)
func.func @same_name(%x: tensor<8xf32>) -> tensor<8xf32> {
  return %x : tensor<8xf32>
}
