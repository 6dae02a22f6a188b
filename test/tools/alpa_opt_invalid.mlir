// RUN: not alpa-opt %s --pipeline='layer-clutser' 2>&1 | filecheck %s --check-prefix=PASS
// RUN: not alpa-opt %s --pipeline='cse,layer-cluster{num-layer=4}' 2>&1 | filecheck %s --check-prefix=OPTION
// RUN: not alpa-opt %s --pipeline='func.func(cse,layer-cluster)' 2>&1 | filecheck %s --check-prefix=NESTED

// PASS: pipeline:1:1: error: unknown pass 'layer-clutser'; did you mean 'layer-cluster'?
// PASS-NEXT: layer-clutser
// PASS-NEXT: ^

// OPTION: pipeline:1:19: error: unknown option 'num-layer' of 'layer-cluster'; did you mean 'num-layers'?
// OPTION-NEXT: cse,layer-cluster{num-layer=4}
// OPTION: note: its options and their defaults: num-layers=auto

// NESTED: pipeline:1:15: error: 'layer-cluster' rewrites whole modules: it cannot stand inside func.func(...)

func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}
