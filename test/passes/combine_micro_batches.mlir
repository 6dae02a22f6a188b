// RUN: alpa-opt %s --pipeline='combine-micro-batches{num-micro-batches=2}' --split-input-file | filecheck %s

// The divisor of a mean is another one for the whole batch, and the means are averaged.
// CHECK-LABEL: module attributes {alpa.micro_batches = "exact"}
// CHECK: func.func public @mean
// CHECK-SAME: -> (tensor<f32> {alpa.result = "mean"})
module attributes {alpa.whole = 2 : i64} {
  func.func public @mean(%x: tensor<4xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> tensor<f32> {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %n = stablehlo.constant {alpa.whole = {value = dense<8.0> : tensor<f32>}} dense<4.0> : tensor<f32>
    %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
    %1 = stablehlo.divide %0, %n : tensor<f32>
    return %1 : tensor<f32>
  }
}

// -----

// Without such a divisor the sums are added up.
// CHECK-LABEL: func.func public @sum
module attributes {alpa.whole = 2 : i64} {
  func.func public @sum(%x: tensor<4xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> tensor<f32> {
    // CHECK-SAME: -> (tensor<f32> {alpa.result = "sum"})
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
    return %0 : tensor<f32>
  }
}

// -----

// A sum that no sample changes is computed apart from the batch, and accumulated all the same.
// CHECK-LABEL: func.func public @sum_of_ones
// CHECK-SAME: -> (tensor<f32> {alpa.result = "last"})
// CHECK: %[[SUM:.*]] = stablehlo.reduce
// CHECK: %[[TOTAL:.*]] = stablehlo.custom_call @alpa.gradient(%[[SUM]])
// CHECK: stablehlo.multiply %[[TOTAL]], %{{.*}} : tensor<f32>
module attributes {alpa.whole = 2 : i64} {
  func.func public @sum_of_ones(%x: tensor<4xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> tensor<f32> {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %one = stablehlo.constant dense<1.0> : tensor<f32>
    %0 = stablehlo.broadcast_in_dim %one, dims = [] {alpa.whole = {types = [tensor<8xf32>]}} : (tensor<f32>) -> tensor<4xf32>
    %1 = stablehlo.reduce(%0 init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
    return %1 : tensor<f32>
  }
}

// -----

// A program that is not known at the whole batch: sums of floats are taken for means.
// CHECK-LABEL: module attributes {alpa.micro_batches = "exact if sums over samples are parts of means"}
// CHECK: func.func public @taken_for_a_mean
// CHECK-SAME: -> (tensor<f32> {alpa.result = "mean"}, tensor<i32> {alpa.result = "sum"}, tensor<4xf32> {alpa.result = "concat:0"})
func.func public @taken_for_a_mean(%x: tensor<4xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64}, %k: tensor<4xi32> {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> (tensor<f32>, tensor<i32>, tensor<4xf32>) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %none = stablehlo.constant dense<0> : tensor<i32>
  %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
  %1 = stablehlo.reduce(%k init: %none) applies stablehlo.add across dimensions = [0] : (tensor<4xi32>, tensor<i32>) -> tensor<i32>
  %2 = stablehlo.tanh %x : tensor<4xf32>
  return %0, %1, %2 : tensor<f32>, tensor<i32>, tensor<4xf32>
}

// -----

// A count that becomes a float is a sum of floats: the mean divides two sums that are treated alike.
// CHECK-LABEL: func.func public @masked_mean_of_a_count
// CHECK-SAME: -> (tensor<f32> {alpa.result = "last"})
// CHECK: %[[TOTAL:.*]] = stablehlo.custom_call @alpa.gradient
// CHECK: %[[COUNT:.*]] = stablehlo.convert %{{.*}} : (tensor<i32>) -> tensor<f32>
// CHECK-NEXT: %[[COUNTED:.*]] = stablehlo.custom_call @alpa.gradient(%[[COUNT]])
// CHECK-NEXT: stablehlo.divide %[[TOTAL]], %[[COUNTED]]
func.func public @masked_mean_of_a_count(%x: tensor<4xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64}, %mask: tensor<4xi1> {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> tensor<f32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %none = stablehlo.constant dense<0> : tensor<i32>
  %weights = stablehlo.convert %mask : (tensor<4xi1>) -> tensor<4xf32>
  %masked = stablehlo.multiply %x, %weights : tensor<4xf32>
  %sum = stablehlo.reduce(%masked init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
  %ones = stablehlo.convert %mask : (tensor<4xi1>) -> tensor<4xi32>
  %count = stablehlo.reduce(%ones init: %none) applies stablehlo.add across dimensions = [0] : (tensor<4xi32>, tensor<i32>) -> tensor<i32>
  %number = stablehlo.convert %count : (tensor<i32>) -> tensor<f32>
  %mean = stablehlo.divide %sum, %number : tensor<f32>
  return %mean : tensor<f32>
}

// -----

// Both sums are accumulated, and divided once per step.
// CHECK-LABEL: func.func public @masked_mean
// CHECK-SAME: -> (tensor<f32> {alpa.result = "last"})
// CHECK: %[[SUM:.*]] = stablehlo.reduce(%{{.*}} init:
// CHECK-NEXT: %[[TOTAL:.*]] = stablehlo.custom_call @alpa.gradient(%[[SUM]])
// CHECK: %[[COUNT:.*]] = stablehlo.reduce(%arg1 init:
// CHECK-NEXT: %[[COUNTED:.*]] = stablehlo.custom_call @alpa.gradient(%[[COUNT]])
// CHECK: stablehlo.divide
func.func public @masked_mean(%x: tensor<4xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64}, %mask: tensor<4xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> tensor<f32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = stablehlo.multiply %x, %mask : tensor<4xf32>
  %1 = stablehlo.reduce(%0 init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
  %2 = stablehlo.reduce(%mask init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
  %3 = stablehlo.divide %1, %2 : tensor<f32>
  return %3 : tensor<f32>
}

// -----

// The root of a mean is taken once per step.
// CHECK-LABEL: func.func public @rmse
// CHECK-SAME: -> (tensor<f32> {alpa.result = "last"})
// CHECK: %[[SUM:.*]] = stablehlo.reduce
// CHECK-NEXT: %[[MEAN:.*]] = stablehlo.custom_call @alpa.gradient(%[[SUM]])
// CHECK-NEXT: stablehlo.sqrt %[[MEAN]]
func.func public @rmse(%x: tensor<4xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> tensor<f32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = stablehlo.multiply %x, %x : tensor<4xf32>
  %1 = stablehlo.reduce(%0 init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
  %2 = stablehlo.sqrt %1 : tensor<f32>
  return %2 : tensor<f32>
}

// -----

// A number of the step by which samples are multiplied is one for them, and a factor of their sum.
// CHECK-LABEL: func.func public @samples_times_a_sum
// CHECK: %[[SUM:.*]] = stablehlo.reduce(%arg0 init:
// CHECK: %[[ONES:.*]] = stablehlo.constant dense<1.000000e+00> : tensor<4xf32>
// CHECK: %[[PRODUCT:.*]] = stablehlo.multiply %arg0, %[[ONES]]
// CHECK: %[[SCALED:.*]] = stablehlo.reduce(%[[PRODUCT]] init:
// CHECK: stablehlo.custom_call @alpa.gradient(%[[SCALED]])
module attributes {alpa.whole = 2 : i64} {
  func.func public @samples_times_a_sum(%x: tensor<4xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> tensor<f32> {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
    %1 = stablehlo.broadcast_in_dim %0, dims = [] {alpa.whole = {types = [tensor<8xf32>]}} : (tensor<f32>) -> tensor<4xf32>
    %2 = stablehlo.multiply %x, %1 {alpa.whole = {types = [tensor<8xf32>]}} : tensor<4xf32>
    %3 = stablehlo.reduce(%2 init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
    return %3 : tensor<f32>
  }
}

// -----

// What runs once is as long as the whole batch.
// CHECK-LABEL: func.func public @sum_repeated_for_the_samples
// CHECK: stablehlo.broadcast_in_dim %{{.*}}, dims = [] : (tensor<f32>) -> tensor<8xf32>
// CHECK: stablehlo.tanh %{{.*}} : tensor<8xf32>
module attributes {alpa.whole = 2 : i64} {
  func.func public @sum_repeated_for_the_samples(%x: tensor<4xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> tensor<f32> {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
    %1 = stablehlo.broadcast_in_dim %0, dims = [] {alpa.whole = {types = [tensor<8xf32>]}} : (tensor<f32>) -> tensor<4xf32>
    %2 = stablehlo.tanh %1 {alpa.whole = {types = [tensor<8xf32>]}} : tensor<4xf32>
    %3 = stablehlo.reduce(%2 init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
    return %3 : tensor<f32>
  }
}

// -----

// Two batches behind one another: the rows of a micro-batch are two blocks of the whole batch.
// CHECK-LABEL: func.func public @blocks
// CHECK-SAME: -> (tensor<4xf32> {alpa.result = "concat:0"})
func.func public @blocks(%x: tensor<4xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> tensor<4xf32> {
  %0 = stablehlo.negate %x : tensor<4xf32>
  %1 = stablehlo.concatenate %x, %0, dim = 0 : (tensor<4xf32>, tensor<4xf32>) -> tensor<8xf32>
  %2 = stablehlo.tanh %1 : tensor<8xf32>
  %3 = stablehlo.slice %2 [4:8] : (tensor<8xf32>) -> tensor<4xf32>
  return %3 : tensor<4xf32>
}

// -----

// A marker inside of a loop means nothing there.
// CHECK-LABEL: func.func public @markers_in_a_loop
// CHECK-NOT: alpa.gradient
func.func public @markers_in_a_loop(%x: tensor<4xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> tensor<4xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %h = %x) : tensor<i32>, tensor<4xf32>
  cond {
    %n = stablehlo.constant dense<2> : tensor<i32>
    %0 = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %0 : tensor<i1>
  } do {
    %one = stablehlo.constant dense<1> : tensor<i32>
    %0 = stablehlo.add %i, %one : tensor<i32>
    %1 = stablehlo.custom_call @alpa.gradient(%h) : (tensor<4xf32>) -> tensor<4xf32>
    %2 = stablehlo.tanh %1 : tensor<4xf32>
    stablehlo.return %0, %2 : tensor<i32>, tensor<4xf32>
  }
  return %r#1 : tensor<4xf32>
}

// -----

// Nothing is proven where each micro-batch is a batch of its own.
// CHECK-LABEL: module attributes {alpa.micro_batches = "independent"}
// CHECK: func.func public @independent
module attributes {alpa.micro_batches = "independent"} {
  func.func public @independent(%x: tensor<4xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> (tensor<f32> {alpa.result = "mean"}) {
    %low = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %0 = stablehlo.reduce(%x init: %low) applies stablehlo.maximum across dimensions = [0] : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
    return %0 : tensor<f32>
  }
}

// -----

// A marked gradient gets one marker, and what mixes and is not read goes.
// CHECK-LABEL: func.func public @marked
// CHECK-SAME: -> (tensor<3xf32> {alpa.result = "state:0"})
// CHECK: %[[SUM:.*]] = stablehlo.reduce(%arg1 init:
// CHECK-NEXT: %[[GRADIENT:.*]] = stablehlo.custom_call @alpa.gradient(%[[SUM]])
// CHECK-NEXT: %[[NEW:.*]] = stablehlo.subtract %arg0, %[[GRADIENT]]
// CHECK-NEXT: return %[[NEW]]
func.func public @marked(%w: tensor<3xf32> {alpa.role = "state"}, %x: tensor<4x3xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> (tensor<3xf32> {alpa.result = "state:0"}) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<4x3xf32>, tensor<f32>) -> tensor<3xf32>
  %1 = stablehlo.custom_call @alpa.gradient(%0) : (tensor<3xf32>) -> tensor<3xf32>
  %2 = stablehlo.reverse %x, dims = [0] : tensor<4x3xf32>
  %3 = stablehlo.subtract %w, %1 : tensor<3xf32>
  return %3 : tensor<3xf32>
}

// -----

// A complex number is no size of a batch.
// CHECK-LABEL: func.func public @complex
// CHECK: stablehlo.constant dense<(4.000000e+00,0.000000e+00)> : tensor<4xcomplex<f32>>
func.func public @complex(%x: tensor<4xcomplex<f32>> {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> (tensor<4xcomplex<f32>> {alpa.result = "concat:0"}) {
  %c = stablehlo.constant dense<(4.0, 0.0)> : tensor<4xcomplex<f32>>
  %0 = stablehlo.multiply %x, %c : tensor<4xcomplex<f32>>
  return %0 : tensor<4xcomplex<f32>>
}

// -----

// A call of an older JAX says nothing of its side; the systems of a batch are solved apart.
// CHECK-LABEL: func.func public @older_solve
// CHECK: stablehlo.custom_call @lapack_strsm
func.func public @older_solve(%x: tensor<8x4x4xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64}, %y: tensor<8x4x2xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> (tensor<8x4x2xf32> {alpa.result = "concat:0"}) {
  %side = stablehlo.constant dense<1> : tensor<i32>
  %0 = stablehlo.custom_call @lapack_strsm(%side, %x, %y) {api_version = 2 : i32} : (tensor<i32>, tensor<8x4x4xf32>, tensor<8x4x2xf32>) -> tensor<8x4x2xf32>
  return %0 : tensor<8x4x2xf32>
}
