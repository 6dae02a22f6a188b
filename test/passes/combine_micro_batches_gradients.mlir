// RUN: alpa-opt %s --pipeline='combine-micro-batches{num-micro-batches=2 micro-batches=independent}' --split-input-file | filecheck %s

// Where each micro-batch is a batch of its own, the gradients of what jax has differentiated are marked,
// told by the names of the ops.

// The gradient of %w is the other factor of the loss times one.
// CHECK-LABEL: @a_factor_of_the_loss
// CHECK: %[[MEAN:.*]] = stablehlo.reduce
// CHECK: %[[MADE:.*]] = stablehlo.multiply %{{cst.*}}, %[[MEAN]]
// CHECK: %[[G:.*]] = stablehlo.custom_call @alpa.gradient(%[[MADE]])
// CHECK: %[[NEW:.*]] = stablehlo.subtract %arg0, %[[G]]
// CHECK: return %[[NEW]]
func.func @a_factor_of_the_loss(%w: tensor<f32>, %x: tensor<8xf32>) -> (tensor<f32>, tensor<f32>) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %one = stablehlo.constant dense<1.0> : tensor<f32>
  %mean = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<8xf32>, tensor<f32>) -> tensor<f32> loc("jit(step)/jvp()/reduce_sum")
  %loss = stablehlo.multiply %w, %mean : tensor<f32> loc("jit(step)/jvp()/mul")
  %g = stablehlo.multiply %one, %mean : tensor<f32> loc("jit(step)/transpose(jvp())/mul")
  %new = stablehlo.subtract %w, %g : tensor<f32> loc("jit(step)/sub")
  return %new, %loss : tensor<f32>, tensor<f32>
}

// -----

// What differentiation uses itself is no gradient; a call's name holds for what is inlined.
// CHECK-LABEL: @one_marker_for_all_readers
// CHECK: %[[T:.*]] = stablehlo.tanh
// CHECK-NEXT: %[[S:.*]] = stablehlo.sine %[[T]]
// CHECK-NEXT: %[[G:.*]] = stablehlo.custom_call @alpa.gradient(%[[S]])
// CHECK-NEXT: %[[D:.*]] = stablehlo.multiply %[[G]], %[[G]]
// CHECK-NEXT: return %[[D]], %[[G]]
func.func private @sine(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = stablehlo.sine %x : tensor<8xf32> loc("sin")
  return %0 : tensor<8xf32>
}
func.func public @one_marker_for_all_readers(%x: tensor<8xf32>) -> (tensor<8xf32>, tensor<8xf32>) {
  %0 = stablehlo.tanh %x : tensor<8xf32> loc("transpose(jvp())/tanh")
  %1 = func.call @sine(%0) : (tensor<8xf32>) -> tensor<8xf32> loc("transpose(jvp(jvp()))/checkpoint/jit(sine)")
  %2 = stablehlo.multiply %1, %1 : tensor<8xf32> loc("jit(step)/mul")
  return %2, %1 : tensor<8xf32>, tensor<8xf32>
}

// -----

// CHECK-LABEL: @a_program_that_marks_its_own
// CHECK-COUNT-1: @alpa.gradient
// CHECK-NOT: @alpa.gradient
func.func @a_program_that_marks_its_own(%x: tensor<8xf32>) -> (tensor<8xf32>, tensor<8xf32>) {
  %0 = stablehlo.tanh %x : tensor<8xf32> loc("transpose(jvp())/tanh")
  %1 = stablehlo.custom_call @alpa.gradient(%0) : (tensor<8xf32>) -> tensor<8xf32> loc("alpa_gradient")
  return %0, %1 : tensor<8xf32>, tensor<8xf32>
}

// -----

// An adversarial sample is made of a gradient, and differentiated: the last gradient is marked.
// CHECK-LABEL: @a_gradient_that_is_differentiated_on
// CHECK: stablehlo.tanh
// CHECK-NEXT: stablehlo.sign
// CHECK-NEXT: stablehlo.sine
// CHECK-NEXT: %[[G:.*]] = stablehlo.cosine
// CHECK-NEXT: %[[M:.*]] = stablehlo.custom_call @alpa.gradient(%[[G]])
// CHECK-NEXT: return %[[M]]
func.func @a_gradient_that_is_differentiated_on(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = stablehlo.tanh %x : tensor<8xf32> loc("transpose(jvp())/tanh")
  %1 = stablehlo.sign %0 : tensor<8xf32> loc("jit(step)/sign")
  %2 = stablehlo.sine %1 : tensor<8xf32> loc("jvp()/sin")
  %3 = stablehlo.cosine %1 : tensor<8xf32> loc("transpose(jvp())/cos")
  return %3 : tensor<8xf32>
}

// -----

// What is differentiated again is a new state, and a second loss follows a first update.
// CHECK-LABEL: @an_update_that_is_differentiated_on
// CHECK-NOT: @alpa.gradient
func.func @an_update_that_is_differentiated_on(%x: tensor<8xf32>) -> (tensor<8xf32>, tensor<8xf32>) {
  %0 = stablehlo.tanh %x : tensor<8xf32> loc("transpose(jvp())/tanh")
  %1 = stablehlo.sign %0 : tensor<8xf32> loc("jit(step)/sign")
  %2 = stablehlo.sine %1 : tensor<8xf32> loc("jvp()/sin")
  %3 = stablehlo.cosine %1 : tensor<8xf32> loc("transpose(jvp())/cos")
  return %1, %3 : tensor<8xf32>, tensor<8xf32>
}

// -----

// A penalty on a gradient is a part of the loss.
// CHECK-LABEL: @a_gradient_inside_of_the_loss
// CHECK: stablehlo.tanh
// CHECK-NEXT: stablehlo.sine
// CHECK-NEXT: @alpa.gradient
// CHECK-NEXT: return
func.func @a_gradient_inside_of_the_loss(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = stablehlo.tanh %x : tensor<8xf32> loc("jvp(transpose(jvp()))/tanh")
  %1 = stablehlo.sine %0 : tensor<8xf32> loc("transpose(jvp(transpose(jvp())))/sin")
  return %1 : tensor<8xf32>
}

// -----

// CHECK-LABEL: @gradients_of_samples
// CHECK-NOT: @alpa.gradient
func.func @gradients_of_samples(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = stablehlo.tanh %x : tensor<8xf32> loc("vmap(transpose(jvp()))/tanh")
  %1 = stablehlo.sine %0 : tensor<8xf32> loc("transpose(jvp())/sin")
  return %1 : tensor<8xf32>
}

// -----

// CHECK-LABEL: @without_names
// CHECK-NOT: @alpa.gradient
func.func @without_names(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = stablehlo.transpose %x, dims = [0] : (tensor<8xf32>) -> tensor<8xf32> loc("jvp(f)/transpose")
  %1 = stablehlo.sine %0 : tensor<8xf32>
  return %1 : tensor<8xf32>
}
