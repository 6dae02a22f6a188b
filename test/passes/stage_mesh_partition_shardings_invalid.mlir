// RUN: alpa-opt %s --split-input-file --pipeline='stage-mesh-partition{cluster=cpu:1x4}' --verify-diagnostics

// The mesh has to be the cluster's.
module {
  // expected-error @+1 {{the program's shardings are over @m, which has 2 device(s), and the cluster has 4; plan for a cluster of 2, set num-stages=2, or remove the shardings}}
  sdy.mesh @m = <["a"=2]>
  func.func public @main(%x: tensor<4x6xf32>) -> tensor<4x6xf32> {
    %0 = mpmd.named_computation<"layer_0"> (%x) (%a: tensor<4x6xf32>) {
      %1 = sdy.sharding_constraint %a <@m, [{"a"}, {}]> : tensor<4x6xf32>
      mpmd.return %1 : tensor<4x6xf32>
    } : (tensor<4x6xf32>) -> tensor<4x6xf32>
    return %0 : tensor<4x6xf32>
  }
}

// -----

module {
  // expected-error @+1 {{@m lists its devices as [3, 2, 1, 0], but the plan numbers the cluster's devices host by host: remove device_ids from the mesh}}
  sdy.mesh @m = <["a"=4], device_ids=[3, 2, 1, 0]>
  func.func public @main(%x: tensor<4x6xf32>) -> tensor<4x6xf32> {
    %0 = mpmd.named_computation<"layer_0"> (%x) (%a: tensor<4x6xf32>) {
      %1 = sdy.sharding_constraint %a <@m, [{"a"}, {}]> : tensor<4x6xf32>
      mpmd.return %1 : tensor<4x6xf32>
    } : (tensor<4x6xf32>) -> tensor<4x6xf32>
    return %0 : tensor<4x6xf32>
  }
}

// -----

module {
  // expected-error @+1 {{@one is device 2 alone, but the plan places all ops: remove the shardings over @one}}
  sdy.mesh @one = <[], device_ids=[2]>
  func.func public @main(%x: tensor<4x6xf32>) -> tensor<4x6xf32> {
    %0 = mpmd.named_computation<"layer_0"> (%x) (%a: tensor<4x6xf32>) {
      %1 = sdy.sharding_constraint %a <@one, []> : tensor<4x6xf32>
      mpmd.return %1 : tensor<4x6xf32>
    } : (tensor<4x6xf32>) -> tensor<4x6xf32>
    return %0 : tensor<4x6xf32>
  }
}

// -----

module {
  // expected-note @+1 {{@m is here}}
  sdy.mesh @m = <["a"=2, "b"=2]>
  // expected-error @+1 {{the program's shardings are over the meshes @m and @n; the plan of a program with shardings has one mesh: use it in all of them}}
  sdy.mesh @n = <["a"=4]>
  func.func public @main(%x: tensor<4x6xf32>) -> tensor<4x6xf32> {
    %0 = mpmd.named_computation<"layer_0"> (%x) (%a: tensor<4x6xf32>) {
      %2 = sdy.sharding_constraint %a <@m, [{"a"}, {}]> : tensor<4x6xf32>
      %1 = sdy.sharding_constraint %2 <@n, [{"a"}, {}]> : tensor<4x6xf32>
      mpmd.return %1 : tensor<4x6xf32>
    } : (tensor<4x6xf32>) -> tensor<4x6xf32>
    return %0 : tensor<4x6xf32>
  }
}

// -----

module {
  sdy.mesh @m = <["a"=2, "b"=2]>
  func.func public @main(%x: tensor<4x6xf32>) -> tensor<4x6xf32> {
    %0 = mpmd.named_computation<"layer_0"> (%x) (%a: tensor<4x6xf32>) {
      // expected-error @+1 {{dimension 1 of tensor<4x6xf32> cannot be split into 4 equal shards over a, b; pad it or shard another dimension}}
      %1 = sdy.sharding_constraint %a <@m, [{}, {"a", "b"}]> : tensor<4x6xf32>
      mpmd.return %1 : tensor<4x6xf32>
    } : (tensor<4x6xf32>) -> tensor<4x6xf32>
    return %0 : tensor<4x6xf32>
  }
}

// -----

module {
  sdy.mesh @m = <["a"=4]>
  func.func public @main(%x: tensor<4x6xf32>) -> tensor<4x6xf32> {
    %0 = mpmd.named_computation<"layer_0"> (%x) (%a: tensor<4x6xf32>) {
      // expected-error @+1 {{a sharding over a part of the axis a; the search uses axes whole: split a into two axes of the mesh}}
      %1 = sdy.sharding_constraint %a <@m, [{"a":(1)2}, {}]> : tensor<4x6xf32>
      mpmd.return %1 : tensor<4x6xf32>
    } : (tensor<4x6xf32>) -> tensor<4x6xf32>
    return %0 : tensor<4x6xf32>
  }
}

// -----

module {
  sdy.mesh @m = <["a"=2, "b"=2]>
  func.func public @main(%x: tensor<4x6xf32>) -> tensor<4x6xf32> {
    %0 = mpmd.named_computation<"layer_0"> (%x) (%a: tensor<4x6xf32>) {
      // expected-error @+1 {{a sharding with unreduced axes: the search decides which values stay partial sums; remove the axes}}
      %1 = sdy.sharding_constraint %a <@m, [{}, {}], unreduced={"a"}> : tensor<4x6xf32>
      mpmd.return %1 : tensor<4x6xf32>
    } : (tensor<4x6xf32>) -> tensor<4x6xf32>
    return %0 : tensor<4x6xf32>
  }
}

// -----

// A returned argument, and a state, have one layout.
module {
  sdy.mesh @m = <["a"=2, "b"=2]>
  // expected-error @+1 {{result 0 is the new value of argument 0, which keeps its layout, but they are given #sdy.sharding<@m, [{"b"}, {}]> and #sdy.sharding<@m, [{"a"}, {}]>; give both the same sharding}}
  func.func public @main(%x: tensor<4x6xf32> {sdy.sharding = #sdy.sharding<@m, [{"a"}, {}]>}) -> (tensor<4x6xf32> {sdy.sharding = #sdy.sharding<@m, [{"b"}, {}]>}) {
    %0 = mpmd.named_computation<"layer_0"> (%x) (%a: tensor<4x6xf32>) {
      %1 = stablehlo.tanh %a : tensor<4x6xf32>
      mpmd.return %1 : tensor<4x6xf32>
    } : (tensor<4x6xf32>) -> tensor<4x6xf32>
    return %x : tensor<4x6xf32>
  }
}

// -----

// So has a value that is returned twice.
module {
  sdy.mesh @m = <["a"=2, "b"=2]>
  // expected-error @+1 {{result 1 is returned with another sharding before: #sdy.sharding<@m, [{"b"}, {}]> and #sdy.sharding<@m, [{"a"}, {}]>; run simplify-trivial-ops before this pass}}
  func.func public @main(%x: tensor<4x6xf32>) -> (tensor<4x6xf32> {alpa.result = "state:0", sdy.sharding = #sdy.sharding<@m, [{"b"}, {}]>}, tensor<4x6xf32> {sdy.sharding = #sdy.sharding<@m, [{"a"}, {}]>}) {
    %0 = mpmd.named_computation<"layer_0"> (%x) (%a: tensor<4x6xf32>) {
      %1 = stablehlo.tanh %a : tensor<4x6xf32>
      mpmd.return %1 : tensor<4x6xf32>
    } : (tensor<4x6xf32>) -> tensor<4x6xf32>
    return %0, %0 : tensor<4x6xf32>, tensor<4x6xf32>
  }
}
