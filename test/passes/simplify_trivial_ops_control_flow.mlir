// RUN: alpa-opt %s --pipeline='simplify-trivial-ops' --split-input-file | filecheck %s

// A loop that never runs gives its operands, and what stands in it is gone. One that runs once is
// its body. A branch that is known to be taken stands alone. Other loops and branches stay.

// CHECK-LABEL: @loop_of_no_trips
// CHECK-NEXT: return %arg0, %arg1 : tensor<4xf32>, tensor<4xf32>
func.func @loop_of_no_trips(%x: tensor<4xf32>, %y: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %0:3 = stablehlo.while(%i = %zero, %a = %x, %b = %y) : tensor<i32>, tensor<4xf32>, tensor<4xf32>
    cond {
      %c = stablehlo.compare LT, %i, %zero : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %j = stablehlo.add %i, %one : tensor<i32>
      %r = stablehlo.reshape %a : (tensor<4xf32>) -> tensor<4xf32>
      %s = stablehlo.add %r, %b : tensor<4xf32>
      stablehlo.return %j, %b, %s : tensor<i32>, tensor<4xf32>, tensor<4xf32>
    }
  return %0#1, %0#2 : tensor<4xf32>, tensor<4xf32>
}

// -----

// What a rewrite finds in the body is rewritten, too.
// CHECK-LABEL: @loop_of_one_trip
// CHECK-NOT: stablehlo.while
// CHECK: %[[S:.*]] = stablehlo.add %arg0, %arg1 {alpa.follow = 0 : i64} : tensor<4xf32>
// CHECK-NEXT: return %arg1, %[[S]]
func.func @loop_of_one_trip(%x: tensor<4xf32>, %y: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  %three = stablehlo.constant dense<3> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %0:3 = stablehlo.while(%i = %three, %a = %x, %b = %y) : tensor<i32>, tensor<4xf32>, tensor<4xf32>
    cond {
      %c = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %j = stablehlo.add %i, %one : tensor<i32>
      %r = stablehlo.reshape %a : (tensor<4xf32>) -> tensor<4xf32>
      %s = stablehlo.add %r, %b : tensor<4xf32>
      stablehlo.return %j, %b, %s : tensor<i32>, tensor<4xf32>, tensor<4xf32>
    }
  return %0#1, %0#2 : tensor<4xf32>, tensor<4xf32>
}

// -----

// CHECK-LABEL: @loop_in_loop
// CHECK-NEXT: %[[S:.*]] = stablehlo.add %arg0, %arg0
// CHECK-NEXT: return %[[S]]
func.func @loop_in_loop(%x: tensor<4xf32>) -> tensor<4xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %0:2 = stablehlo.while(%i = %zero, %a = %x) : tensor<i32>, tensor<4xf32>
    cond {
      %c = stablehlo.compare LT, %i, %one : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %j = stablehlo.add %i, %one : tensor<i32>
      %1:2 = stablehlo.while(%k = %one, %b = %a) : tensor<i32>, tensor<4xf32>
        cond {
          %c = stablehlo.compare LT, %k, %one : (tensor<i32>, tensor<i32>) -> tensor<i1>
          stablehlo.return %c : tensor<i1>
        } do {
          %l = stablehlo.add %k, %one : tensor<i32>
          %t = stablehlo.tanh %b : tensor<4xf32>
          stablehlo.return %l, %t : tensor<i32>, tensor<4xf32>
        }
      %s = stablehlo.add %1#1, %a : tensor<4xf32>
      stablehlo.return %j, %s : tensor<i32>, tensor<4xf32>
    }
  return %0#1 : tensor<4xf32>
}

// -----

// CHECK-LABEL: @two_trips
// CHECK: stablehlo.while
func.func @two_trips(%x: tensor<4xf32>) -> tensor<4xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %two = stablehlo.constant dense<2> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %0:2 = stablehlo.while(%i = %zero, %a = %x) : tensor<i32>, tensor<4xf32>
    cond {
      %c = stablehlo.compare LT, %i, %two : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %j = stablehlo.add %i, %one : tensor<i32>
      %s = stablehlo.tanh %a : tensor<4xf32>
      stablehlo.return %j, %s : tensor<i32>, tensor<4xf32>
    }
  return %0#1 : tensor<4xf32>
}

// -----

// CHECK-LABEL: @trips_from_outside
// CHECK: stablehlo.while
func.func @trips_from_outside(%x: tensor<4xf32>, %n: tensor<i32>) -> tensor<4xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %0:2 = stablehlo.while(%i = %zero, %a = %x) : tensor<i32>, tensor<4xf32>
    cond {
      %c = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %j = stablehlo.add %i, %one : tensor<i32>
      %s = stablehlo.tanh %a : tensor<4xf32>
      stablehlo.return %j, %s : tensor<i32>, tensor<4xf32>
    }
  return %0#1 : tensor<4xf32>
}

// -----

// The condition compares an argument of the function, not the loop's own variable.
// CHECK-LABEL: @a_condition_of_an_outer_value
// CHECK: stablehlo.while
func.func @a_condition_of_an_outer_value(%n: tensor<i32>, %x: tensor<4xf32>) -> tensor<4xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %0:2 = stablehlo.while(%i = %zero, %a = %x) : tensor<i32>, tensor<4xf32>
    cond {
      %c = stablehlo.compare LT, %n, %one : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %j = stablehlo.add %i, %one : tensor<i32>
      %s = stablehlo.tanh %a : tensor<4xf32>
      stablehlo.return %j, %s : tensor<i32>, tensor<4xf32>
    }
  return %0#1 : tensor<4xf32>
}

// -----

// More trips than a Python range has a length for, and a counter of four bits.
// CHECK-LABEL: @counters_of_other_widths
// CHECK: stablehlo.while
// CHECK-NOT: stablehlo.while
// CHECK: stablehlo.cosine
func.func @counters_of_other_widths(%x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  %least = stablehlo.constant dense<-9223372036854775807> : tensor<i64>
  %most = stablehlo.constant dense<9223372036854775807> : tensor<i64>
  %one = stablehlo.constant dense<1> : tensor<i64>
  %0:2 = stablehlo.while(%i = %least, %a = %x) : tensor<i64>, tensor<4xf32>
    cond {
      %c = stablehlo.compare LT, %i, %most : (tensor<i64>, tensor<i64>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %j = stablehlo.add %i, %one : tensor<i64>
      %s = stablehlo.tanh %a : tensor<4xf32>
      stablehlo.return %j, %s : tensor<i64>, tensor<4xf32>
    }
  %six = stablehlo.constant dense<6> : tensor<i4>
  %seven = stablehlo.constant dense<7> : tensor<i4>
  %step = stablehlo.constant dense<1> : tensor<i4>
  %1:2 = stablehlo.while(%i = %six, %a = %x) : tensor<i4>, tensor<4xf32>
    cond {
      %c = stablehlo.compare LT, %i, %seven : (tensor<i4>, tensor<i4>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %j = stablehlo.add %i, %step : tensor<i4>
      %s = stablehlo.cosine %a : tensor<4xf32>
      stablehlo.return %j, %s : tensor<i4>, tensor<4xf32>
    }
  return %0#1, %1#1 : tensor<4xf32>, tensor<4xf32>
}

// -----

// What the condition does, it does once even if there are no trips.
// CHECK-LABEL: @a_condition_with_an_effect
// CHECK: stablehlo.while
// CHECK: stablehlo.custom_call @my.count
func.func @a_condition_with_an_effect(%x: tensor<4xf32>) -> tensor<4xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %0:2 = stablehlo.while(%i = %zero, %a = %x) : tensor<i32>, tensor<4xf32>
    cond {
      stablehlo.custom_call @my.count(%i) {has_side_effect = true} : (tensor<i32>) -> ()
      %c = stablehlo.compare LT, %i, %zero : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %j = stablehlo.add %i, %one : tensor<i32>
      %s = stablehlo.tanh %a : tensor<4xf32>
      stablehlo.return %j, %s : tensor<i32>, tensor<4xf32>
    }
  return %0#1 : tensor<4xf32>
}

// -----

// The sharding that the program gives a loop's results stays on those that are read.
// CHECK-LABEL: module @a_sharded_loop
// CHECK: func.func
// CHECK-NEXT: %[[X:.*]] = sdy.sharding_constraint %arg0 <@m, [{"a"}]>
// CHECK: return %[[X]]
module @a_sharded_loop {
  sdy.mesh @m = <["a"=2]>
  func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %0:2 = stablehlo.while(%i = %zero, %a = %x) : tensor<i32>, tensor<4xf32> attributes {sdy.sharding = #sdy.sharding_per_value<[<@m, []>, <@m, [{"a"}]>]>}
      cond {
        %c = stablehlo.compare LT, %i, %zero : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %c : tensor<i1>
      } do {
        %j = stablehlo.add %i, %one : tensor<i32>
        %s = stablehlo.tanh %a : tensor<4xf32>
        stablehlo.return %j, %s : tensor<i32>, tensor<4xf32>
      }
    return %0#1 : tensor<4xf32>
  }
}

// -----

// CHECK-LABEL: @taken_branch
// CHECK-NEXT: %[[T:.*]] = stablehlo.tanh %arg0
// CHECK-NEXT: %[[N:.*]] = stablehlo.negate %arg0
// CHECK-NEXT: return %[[T]], %[[N]]
func.func @taken_branch(%x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  %yes = stablehlo.constant dense<true> : tensor<i1>
  %no = stablehlo.constant dense<false> : tensor<i1>
  %0 = "stablehlo.if"(%yes) ({
    %r = stablehlo.reshape %x : (tensor<4xf32>) -> tensor<4xf32>
    %t = stablehlo.tanh %r : tensor<4xf32>
    stablehlo.return %t : tensor<4xf32>
  }, {
    stablehlo.return %x : tensor<4xf32>
  }) : (tensor<i1>) -> tensor<4xf32>
  %1 = "stablehlo.if"(%no) ({
    stablehlo.return %x : tensor<4xf32>
  }, {
    %n = stablehlo.negate %x : tensor<4xf32>
    stablehlo.return %n : tensor<4xf32>
  }) : (tensor<i1>) -> tensor<4xf32>
  return %0, %1 : tensor<4xf32>, tensor<4xf32>
}

// -----

// CHECK-LABEL: @a_known_case
// CHECK-NEXT: %[[S:.*]] = stablehlo.sine %arg0
// CHECK-NEXT: %[[C:.*]] = stablehlo.cosine %arg0
// CHECK-NEXT: return %arg0, %[[S]], %[[C]]
func.func @a_known_case(%x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %below = stablehlo.constant dense<-1> : tensor<i32>
  %0 = "stablehlo.case"(%zero) ({
    stablehlo.return %x : tensor<4xf32>
  }, {
    %t = stablehlo.tanh %x : tensor<4xf32>
    stablehlo.return %t : tensor<4xf32>
  }) : (tensor<i32>) -> tensor<4xf32>
  %1 = "stablehlo.case"(%one) ({
    stablehlo.return %x : tensor<4xf32>
  }, {
    %s = stablehlo.sine %x : tensor<4xf32>
    stablehlo.return %s : tensor<4xf32>
  }) : (tensor<i32>) -> tensor<4xf32>
  %2 = "stablehlo.case"(%below) ({
    stablehlo.return %x : tensor<4xf32>
  }, {
    stablehlo.return %x : tensor<4xf32>
  }, {
    %c = stablehlo.cosine %x : tensor<4xf32>
    stablehlo.return %c : tensor<4xf32>
  }) : (tensor<i32>) -> tensor<4xf32>
  return %0, %1, %2 : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>
}

// -----

// CHECK-LABEL: @a_case_that_is_not_known
// CHECK: stablehlo.case
func.func @a_case_that_is_not_known(%x: tensor<4xf32>, %i: tensor<i32>) -> tensor<4xf32> {
  %0 = "stablehlo.case"(%i) ({
    stablehlo.return %x : tensor<4xf32>
  }, {
    %t = stablehlo.tanh %x : tensor<4xf32>
    stablehlo.return %t : tensor<4xf32>
  }) : (tensor<i32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
