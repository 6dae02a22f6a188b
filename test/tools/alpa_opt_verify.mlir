// RUN: alpa-opt %s --split-input-file --verify-diagnostics

// The lines of later parts keep their numbers; a part that fails as expected is no failure.

func.func @undeclared_value(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @+1 {{use of undeclared SSA value name}}
  %0 = stablehlo.add %x, %y : tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

func.func @wrong_type(%x: tensor<4xf32>) -> tensor<8xf32> {
  // expected-error-re @below {{type of return operand {{[0-9]}} ('tensor<4xf32>')}}
  return %x : tensor<4xf32>
}

// -----

// expected-note @below {{see existing symbol definition here}}
func.func @twice() {
  return
}
// expected-error @below {{redefinition of symbol named 'twice'}}
func.func @twice() {
  return
}
