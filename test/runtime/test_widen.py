"""`alpa.runtime.widen`: programs in 64 bits."""

from __future__ import annotations

import numpy as np

from alpa.dialects import parse
from alpa.runtime.reference import run_unplanned
from alpa.runtime.widen import widened


def test_widened_program_rounds_nowhere() -> None:
    module = parse("""
    func.func @main(%x: tensor<4xf32>) -> tensor<4xbf16> {
      %0 = stablehlo.constant dense<[1.0, 2.0, 3.0, 4.0]> : tensor<4xf32>
      %zero = sdy.constant dense<0.0> : tensor<4xf32>
      %one = stablehlo.add %x, %0 : tensor<4xf32>
      %1 = stablehlo.add %one, %zero : tensor<4xf32>
      %2 = stablehlo.reduce_precision %1, format = e8m7 : tensor<4xf32>
      %3 = stablehlo.convert %2 : (tensor<4xf32>) -> tensor<4xbf16>
      return %3 : tensor<4xbf16>
    }
    """)
    x = np.array([1e-9, 1e-8, 1e-7, 1e-6])
    (result,) = run_unplanned(widened(module), [x])
    np.testing.assert_array_equal(result, x + np.arange(1.0, 5.0))
