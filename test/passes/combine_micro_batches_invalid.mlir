// RUN: alpa-opt %s --pipeline='combine-micro-batches{num-micro-batches=2}' --split-input-file --verify-diagnostics

!x = tensor<4x3xf32>
func.func public @maximum(%x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> tensor<3xf32> {
  %low = stablehlo.constant dense<0xFF800000> : tensor<f32>
  // expected-error @+1 {{reduce takes the maximum over the samples, and result 0 depends on it: 2 micro-batches would not give what the whole batch gives; plan with 1 micro-batch}}
  %0 = stablehlo.reduce(%x init: %low) applies stablehlo.maximum across dimensions = [0] : (!x, tensor<f32>) -> tensor<3xf32>
  return %0 : tensor<3xf32>
}

// -----

!x = tensor<4x3xf32>
func.func public @batch_norm(%x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> !x {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0] : (!x, tensor<f32>) -> tensor<3xf32>
  %1 = stablehlo.broadcast_in_dim %0, dims = [1] : (tensor<3xf32>) -> !x
  // expected-error @+1 {{subtract combines each sample with a sum over samples, and result 0 depends on it}}
  %2 = stablehlo.subtract %x, %1 : !x
  return %2 : !x
}

// -----

!x = tensor<4x3xf32>
func.func public @contrastive(%x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> tensor<4x4xf32> {
  // expected-error @+1 {{dot_general multiplies each sample by all samples, and result 0 depends on it}}
  %0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [1] : (!x, !x) -> tensor<4x4xf32>
  return %0 : tensor<4x4xf32>
}

// -----

!x = tensor<4xf32>
func.func public @cumsum(%x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> !x {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  // expected-error @+1 {{reduce_window reduces over neighbouring samples, and result 0 depends on it}}
  %0 = "stablehlo.reduce_window"(%x, %zero) <{padding = dense<[[3, 0]]> : tensor<1x2xi64>, window_dimensions = array<i64: 4>}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %1 = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %1 : tensor<f32>
  }) : (!x, tensor<f32>) -> !x
  return %0 : !x
}

// -----

!x = tensor<4xf32>
func.func public @sorted(%x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> !x {
  // expected-error @+1 {{sort sorts the samples, and result 0 depends on it}}
  %0 = "stablehlo.sort"(%x) <{dimension = 0 : i64, is_stable = true}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %1 = stablehlo.compare LT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
    stablehlo.return %1 : tensor<i1>
  }) : (!x) -> !x
  return %0 : !x
}

// -----

!x = tensor<4xf32>
func.func public @interleaved(%x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> tensor<2xf32> {
  // expected-error @+1 {{slice takes some of the samples (rows 0 to 4), and result 0 depends on it}}
  %0 = stablehlo.slice %x [0:4:2] : (!x) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

!x = tensor<4xf32>
module attributes {alpa.whole = 2 : i64} {
  func.func public @positions(%x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> !x {
    %0 = stablehlo.iota dim = 0 {alpa.whole = {types = [tensor<8xf32>]}} : !x
    // expected-error @+1 {{multiply computes with the numbers that samples have in the batch (arange), which differ from those in a micro-batch}}
    %1 = stablehlo.multiply %x, %0 {alpa.whole = {types = [tensor<8xf32>]}} : !x
    return %1 : !x
  }
}

// -----

!x = tensor<4xf32>
module attributes {alpa.whole = 4 : i64} {
  // expected-error @+1 {{the program was lowered for 4 micro-batches, and num-micro-batches is 2; lower it for as many}}
  func.func public @another_number(%x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> !x {
    return %x : !x
  }
}

// -----

// expected-error @+1 {{result 0 is said to be concat:0 of the micro-batches, and it is mean; leave its alpa.result out, or say mean}}
func.func public @another_result(%x: tensor<4x3xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> (tensor<3xf32> {alpa.result = "concat:0"}) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<4x3xf32>, tensor<f32>) -> tensor<3xf32>
  return %0 : tensor<3xf32>
}

// -----

!x = tensor<4xf32>
func.func public @blocks_returned(%x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> tensor<8xf32> {
  // expected-error @+1 {{result 0 holds the samples in several blocks, which cannot be joined}}
  %0 = stablehlo.concatenate %x, %x, dim = 0 : (!x, !x) -> tensor<8xf32>
  return %0 : tensor<8xf32>
}

// -----

!w = tensor<3xf32>
// expected-error @+1 {{no argument is cut into 2 micro-batches, and each of them would change the state; say which arguments hold the samples (alpa.role = "batch"), or plan with 1 micro-batch}}
func.func public @no_samples(%w: !w {alpa.role = "state", tf.aliasing_output = 0 : i32}) -> (!w {alpa.result = "state:0"}) {
  %0 = stablehlo.tanh %w : !w
  return %0 : !w
}

// -----

!w = tensor<f32>
!x = tensor<4xf32>
func.func public @state_beside_samples(%w: !w {alpa.role = "state", tf.aliasing_output = 0 : i32}, %x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> (!w {alpa.result = "state:0"}, !x) {
  %0:2 = stablehlo.optimization_barrier %w, %x : !w, !x
  // expected-error @+1 {{result 0 is a new state that no sample changes, made in a loop, a branch or a barrier that computes with samples, too (compute the two apart)}}
  %1 = stablehlo.tanh %0#0 : !w
  return %1, %0#1 : !w, !x
}

// -----

!x = tensor<4xf32>
!q = tensor<8xf32>
module attributes {alpa.micro_batches = "independent"} {
  func.func public @state_of_rows(%q: !q {alpa.role = "state"}, %x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> (!x {alpa.result = "state:0"}) {
    // expected-error @+1 {{the new state of argument 0 is tensor<4xf32> in a micro-batch, and the old one is tensor<8xf32>: it is made of the rows of a whole batch; plan with 1 micro-batch}}
    %0 = stablehlo.abs %x : !x
    return %0 : !x
  }
}

// -----

func.func public @count_that_is_bounded(%x: tensor<4xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64}, %mask: tensor<4xi32> {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> tensor<f32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %none = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %sum = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
  %count = stablehlo.reduce(%mask init: %none) applies stablehlo.add across dimensions = [0] : (tensor<4xi32>, tensor<i32>) -> tensor<i32>
  %bounded = stablehlo.maximum %count, %one : tensor<i32>
  // expected-error @+1 {{convert makes a float of a function of a count of samples, and the size of the whole batch is not known: sums of floats are taken for parts of means, and counts are not, and result 0 depends on it: 2 micro-batches would not give what the whole batch gives; convert the count to a float before the function}}
  %number = stablehlo.convert %bounded : (tensor<i32>) -> tensor<f32>
  %mean = stablehlo.divide %sum, %number : tensor<f32>
  return %mean : tensor<f32>
}
