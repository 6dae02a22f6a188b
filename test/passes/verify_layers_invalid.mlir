// RUN: alpa-opt %s --pipeline=verify-layers --split-input-file --verify-diagnostics

!a = tensor<4x8xf32>
func.func public @outside_of_layers(%x: !a) -> !a {
  // expected-error @+1 {{stablehlo.tanh is outside of any layer; run layer-cluster before this pass}}
  %0 = stablehlo.tanh %x : !a
  return %0 : !a
}

// -----

!a = tensor<4x8xf32>
func.func public @no_name_of_a_layer(%x: !a) -> !a {
  // expected-error @+1 {{block_0 is no layer: expected layer_<number>, its backward layer_<number>(1), update_<number> or update_global}}
  %0 = mpmd.named_computation<"block_0"> (%x) (%a: !a) {
    mpmd.return %a : !a
  } : (!a) -> !a
  return %0 : !a
}

// -----

!a = tensor<4x8xf32>
func.func public @backward_of_an_update(%x: !a) -> !a {
  // expected-error @+1 {{update_0(1): an update has no backward}}
  %0 = mpmd.named_computation<"update_0"(1)> (%x) (%a: !a) {
    mpmd.return %a : !a
  } : (!a) -> !a
  return %0 : !a
}

// -----

!a = tensor<4x8xf32>
func.func public @a_layer_twice(%x: !a) -> !a {
  // expected-note @+1 {{the first time}}
  %0 = mpmd.named_computation<"layer_0"> (%x) (%a: !a) {
    mpmd.return %a : !a
  } : (!a) -> !a
  // expected-error @+1 {{layer_0 is there twice}}
  %1 = mpmd.named_computation<"layer_0"> (%0) (%a: !a) {
    mpmd.return %a : !a
  } : (!a) -> !a
  return %1 : !a
}

// -----

!a = tensor<4x8xf32>
func.func public @backward_without_forward(%x: !a) -> !a {
  // expected-error @+1 {{layer_0(1) has no forward: layer_0 is not there}}
  %0 = mpmd.named_computation<"layer_0"(1)> (%x) (%a: !a) {
    mpmd.return %a : !a
  } : (!a) -> !a
  return %0 : !a
}

// -----

!a = tensor<4x8xf32>
func.func public @forward_to_a_lower_layer(%x: !a) -> !a {
  // expected-note @+1 {{made here, by layer_1}}
  %0 = mpmd.named_computation<"layer_1"> (%x) (%a: !a) {
    mpmd.return %a : !a
  } : (!a) -> !a
  // expected-error @+1 {{operand 0 of layer_0 on layer 0 is made on layer 1: forward values flow from lower to higher ones}}
  %1 = mpmd.named_computation<"layer_0"> (%0) (%a: !a) {
    mpmd.return %a : !a
  } : (!a) -> !a
  return %1 : !a
}

// -----

!a = tensor<4x8xf32>
func.func public @backward_to_a_higher_layer(%x: !a) -> !a {
  %0 = mpmd.named_computation<"layer_0"> (%x) (%a: !a) {
    mpmd.return %a : !a
  } : (!a) -> !a
  %1 = mpmd.named_computation<"layer_1"> (%0) (%a: !a) {
    mpmd.return %a : !a
  } : (!a) -> !a
  // expected-note @+1 {{made here, by layer_0(1)}}
  %2 = mpmd.named_computation<"layer_0"(1)> (%0) (%a: !a) {
    mpmd.return %a : !a
  } : (!a) -> !a
  // expected-error @+1 {{operand 1 of layer_1(1) on layer 1 is made on layer 0: backward values flow from higher to lower ones}}
  %3 = mpmd.named_computation<"layer_1"(1)> (%1, %2) (%a: !a, %b: !a) {
    %4 = stablehlo.multiply %a, %b : !a
    mpmd.return %4 : !a
  } : (!a, !a) -> !a
  return %3 : !a
}

// -----

!a = tensor<4x8xf32>
func.func public @from_an_update_into_a_layer(%w: !a, %x: !a) -> !a {
  // expected-note @+1 {{made here, by update_0}}
  %0 = mpmd.named_computation<"update_0"> (%w) (%a: !a) {
    mpmd.return %a : !a
  } : (!a) -> !a
  // expected-error @+1 {{operand 1 of layer_0, which is forward, is made by the update update_0: every forward runs before its backward, and these before the update}}
  %1 = mpmd.named_computation<"layer_0"> (%x, %0) (%a: !a, %b: !a) {
    %4 = stablehlo.multiply %a, %b : !a
    mpmd.return %4 : !a
  } : (!a, !a) -> !a
  return %1 : !a
}

// -----

// The gradient of a shared parameter is summed in a layer, not in the update.
!a = tensor<4x8xf32>
func.func public @sum_of_a_shared_gradient(%w: !a {alpa.role = "state"}, %x: !a) -> (!a {alpa.result = "state:0"}) {
  %0 = mpmd.named_computation<"layer_0"> (%x, %w) (%a: !a, %b: !a) {
    %5 = stablehlo.multiply %a, %b : !a
    mpmd.return %5 : !a
  } : (!a, !a) -> !a
  %1 = mpmd.named_computation<"layer_1"> (%0, %w) (%a: !a, %b: !a) {
    %5 = stablehlo.multiply %a, %b : !a
    mpmd.return %5 : !a
  } : (!a, !a) -> !a
  // expected-note @+1 {{the other part is made here}}
  %2:2 = mpmd.named_computation<"layer_1"(1)> (%1, %0) (%a: !a, %b: !a) {
    %5 = stablehlo.multiply %a, %b : !a
    %6 = stablehlo.cosine %a : !a
    mpmd.return %5, %6 : !a, !a
  } : (!a, !a) -> (!a, !a)
  // expected-error @+1 {{result 0 of layer_0(1) adds to a gradient what layer_1(1) made of it; each makes its own part, and the update adds them up}}
  %3 = mpmd.named_computation<"layer_0"(1)> (%2#0, %2#1, %x) (%g: !a, %a: !a, %b: !a) {
    %5 = stablehlo.multiply %a, %b : !a
    %6 = stablehlo.add %5, %g : !a
    mpmd.return %6 : !a
  } : (!a, !a, !a) -> !a
  %4 = mpmd.named_computation<"update_0"> (%w, %3) (%a: !a, %b: !a) {
    %5 = stablehlo.subtract %a, %b : !a
    mpmd.return %5 : !a
  } : (!a, !a) -> !a
  return %4 : !a
}

// -----

!a = tensor<4x8xf32>
!s = tensor<f32>
func.func public @norm_of_two_layers_in_an_update(%v: !a, %w: !a, %x: !a) -> !s {
  %0 = mpmd.named_computation<"layer_0"> (%x, %v) (%a: !a, %b: !a) {
    %5 = stablehlo.multiply %a, %b : !a
    mpmd.return %5 : !a
  } : (!a, !a) -> !a
  %1 = mpmd.named_computation<"layer_1"> (%0, %w) (%a: !a, %b: !a) {
    %5 = stablehlo.multiply %a, %b : !a
    mpmd.return %5 : !a
  } : (!a, !a) -> !a
  %2 = mpmd.named_computation<"layer_1"(1)> (%1) (%a: !a) {
    mpmd.return %a : !a
  } : (!a) -> !a
  %3 = mpmd.named_computation<"layer_0"(1)> (%2, %0) (%a: !a, %b: !a) {
    %5 = stablehlo.multiply %a, %b : !a
    mpmd.return %5 : !a
  } : (!a, !a) -> !a
  // expected-error @+1 {{result 0 of update_0 is made of gradients or parameters of layers 0, 1, and for no layer's state alone: what mixes layers belongs to update_global}}
  %4 = mpmd.named_computation<"update_0"> (%2, %3) (%a: !a, %b: !a) {
    %c = stablehlo.constant dense<0.0> : !s
    %5 = stablehlo.multiply %a, %b : !a
    %6 = stablehlo.reduce(%5 init: %c) applies stablehlo.add across dimensions = [0, 1] : (!a, !s) -> !s
    mpmd.return %6 : !s
  } : (!a, !a) -> !s
  return %4 : !s
}

// -----

!a = tensor<4x8xf32>
func.func public @state_in_another_layers_update(%v: !a {alpa.role = "state"}, %w: !a {alpa.role = "state"}, %x: !a) -> (!a {alpa.result = "state:1"}) {
  %0 = mpmd.named_computation<"layer_0"> (%x, %v) (%a: !a, %b: !a) {
    %5 = stablehlo.multiply %a, %b : !a
    mpmd.return %5 : !a
  } : (!a, !a) -> !a
  %1 = mpmd.named_computation<"layer_1"> (%0, %w) (%a: !a, %b: !a) {
    %5 = stablehlo.multiply %a, %b : !a
    mpmd.return %5 : !a
  } : (!a, !a) -> !a
  // expected-error @+1 {{result 0 of update_0 is made for the state of layer 1 alone: it belongs to update_1}}
  %2 = mpmd.named_computation<"update_0"> (%w, %1) (%a: !a, %b: !a) {
    %5 = stablehlo.subtract %a, %b : !a
    mpmd.return %5 : !a
  } : (!a, !a) -> !a
  return %2 : !a
}
