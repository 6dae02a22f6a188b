// RUN: alpa-opt %s --pipeline='stage-mesh-partition{cluster=cpu:1x2 num-stages=2 num-micro-batches=2}' --split-input-file --verify-diagnostics

func.func public @not_clustered(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @+1 {{stablehlo.tanh is outside of any layer; run layer-cluster before this pass}}
  %0 = stablehlo.tanh %x : tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// expected-error @+1 {{cannot tell whether argument 0 is batch, state, key or constant, which several micro-batches need; set alpa.role (and alpa.batch_dim) on it, or name it in a file of roles (alpa-plan --roles)}}
func.func public @argument_without_a_role(%x: tensor<4xf32>) -> (tensor<4xf32> {alpa.result = "last"}) {
  return %x : tensor<4xf32>
}

// -----

// expected-error @+1 {{cannot tell whether argument 0 is batch, state, key or constant}}
func.func public @batch_without_a_dimension(%x: tensor<4xf32> {alpa.role = "batch"}) -> (tensor<4xf32> {alpa.result = "last"}) {
  return %x : tensor<4xf32>
}

// -----

// expected-error @+1 {{cannot tell how result 0 is made from those of the micro-batches; set alpa.result = "concat:<dim>", "mean", "sum", "last" or "state:<argument>" on it}}
func.func public @result_without_a_role(%x: tensor<4xf32> {alpa.role = "constant"}) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}

// -----

// expected-error @+1 {{cannot make 2 stages of 1 layer(s) on 2 device(s); num-stages can be at most 1}}
func.func public @more_stages_than_layers(%x: tensor<4xf32> {alpa.role = "constant"}) -> (tensor<4xf32> {alpa.result = "last"}) {
  %0 = mpmd.named_computation<"layer_0"> (%x) (%a: tensor<4xf32>) {
    mpmd.return %a : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// expected-error @+1 {{no cut of 2 layers in 2 stages fits into memory, even with one micro-batch in flight; add devices or use smaller micro-batches (2 devices now). In the shardings that were tried, layer_0 alone holds at least 128 GiB on each of 2 device(s); CPU has 16 GiB}}
func.func public @no_memory(%w: tensor<1048576x65536xf32> {alpa.role = "state"}, %x: tensor<4xf32> {alpa.role = "constant"}) -> (tensor<1048576x65536xf32> {alpa.result = "state:0"}, tensor<4xf32> {alpa.result = "last"}) {
  %0 = mpmd.named_computation<"layer_0"> (%w) (%a: tensor<1048576x65536xf32>) {
    %2 = stablehlo.tanh %a : tensor<1048576x65536xf32>
    mpmd.return %2 : tensor<1048576x65536xf32>
  } : (tensor<1048576x65536xf32>) -> tensor<1048576x65536xf32>
  %1 = mpmd.named_computation<"layer_1"> (%x) (%a: tensor<4xf32>) {
    mpmd.return %a : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %0, %1 : tensor<1048576x65536xf32>, tensor<4xf32>
}

// -----

// expected-error @+1 {{there is nothing to plan: @main returns its arguments unchanged}}
func.func public @nothing_to_compute(%x: tensor<4xf32> {alpa.role = "constant"}) -> (tensor<4xf32> {alpa.result = "last"}) {
  return %x : tensor<4xf32>
}

// -----

// expected-error @+1 {{there is nothing to plan: @main has no results}}
func.func public @nothing_to_return(%x: tensor<4xf32> {alpa.role = "constant"}) {
  return
}

// -----

func.func public @from_an_update_into_a_layer(
    %w: tensor<4xf32> {alpa.role = "constant"}, %x: tensor<4xf32> {alpa.role = "constant"})
    -> (tensor<4xf32> {alpa.result = "last"}) {
  // expected-note @+1 {{made here, by update_0}}
  %0 = mpmd.named_computation<"update_0"> (%w) (%a: tensor<4xf32>) {
    mpmd.return %a : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  // expected-error @+1 {{operand 1 of layer_0, which is forward, is made by the update update_0}}
  %1 = mpmd.named_computation<"layer_0"> (%x, %0) (%a: tensor<4xf32>, %b: tensor<4xf32>) {
    %2 = stablehlo.multiply %a, %b : tensor<4xf32>
    mpmd.return %2 : tensor<4xf32>
  } : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  return %1 : tensor<4xf32>
}
