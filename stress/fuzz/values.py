"""Values that nobody expects: for attributes of programs, options of commands, and arguments."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

_INTEGERS = ("0", "-1", "1", "2", "3", "2147483647", "-9223372036854775808", "9223372036854775807")
_ATTRIBUTES = (
    *(f"{value} : i64" for value in _INTEGERS),
    *(f"{value} : i32" for value in _INTEGERS[:6]),
    "0x7FF8000000000000 : f64",
    "-1.0 : f32",
    '"batch"',
    '"state"',
    '"key"',
    '"state:0"',
    '"state:-1"',
    '"concat:99"',
    '""',
    '"\\1B[31m"',
    "true",
    "unit",
    "index",
    "@main",
    "[]",
    "[0, 1]",
    "{}",
    "{x = 1}",
    "array<i64>",
    "array<i64: 0, 1, 2>",
    "array<i64: -1, 5, 2>",
    "array<i32: 0>",
    "dense<1.0> : tensor<2xf32>",
    "affine_map<(d0) -> (d0)>",
)
_NAMES = (
    "alpa.role",
    "alpa.batch_dim",
    "alpa.input",
    "alpa.output",
    "alpa.result",
    "alpa.slice",
    "alpa.follow",
    "alpa.held",
    "alpa.micro_batches",
    "alpa.whole",
    "alpa.flops",
    "alpa.part",
    "alpa.random",
    "alpa.meshes",
    "alpa.plan",
    "tf.aliasing_output",
    "jax.buffer_donor",
    "sdy.sharding",
    "sdy.sharding_rule",
    "mhlo.sharding",
)
TYPES = (
    "index",
    "f32",
    "i1",
    "tensor<f32>",
    "tensor<0x4xf32>",
    "tensor<1000000007x4xf32>",
    "tensor<2x4xi2>",
    "tensor<2x4xf4E2M1FN>",
    "tensor<4xcomplex<f64>>",
    "tensor<2x!quant.uniform<i8:f32, 0.1>>",
    "tensor<4x?xf32>",
    "tensor<*xf32>",
    "vector<4xf32>",
    "memref<4xf32>",
    "none",
    "tuple<tensor<4xf32>, tensor<f32>>",
    "!stablehlo.token",
)
_TEXTS = (
    *_INTEGERS,
    "99999999999999999999999",
    "-5",
    "0.5",
    "1e-320",
    "1e308",
    "nan",
    "inf",
    "-inf",
    "true",
    "auto",
    "None",
    "x",
    "1x2",
    "2x0",
    "-1x-1",
    "1x1x1x1",
    "{a=b}",
    "[1,2]",
    "\\x1b[31m",
    "\x1b[31m",
    "é",
    "/dev/full",
    "/dev/zero",
    ".",
    "no/such/folder",
    "cpu:1x2",
    "cpu:0x1",
    "h100:1x9223372036854775807",
    "cpu:1x2,memory=-1B",
    "cpu:1x2,memory=nanGiB",
    "gpipe",
    "1f1b",
    "layer",
)


def attribute(generator: random.Random) -> str:
    """A named attribute, as MLIR text."""
    return f"{generator.choice(_NAMES)} = {generator.choice(_ATTRIBUTES)}"


def text(generator: random.Random) -> str:
    """An option's value."""
    return generator.choice(_TEXTS)


def argument(generator: random.Random) -> Any:
    """An argument of a Python function."""
    makers = (
        lambda: None,
        lambda: generator.choice((0, -1, 1, 2, 7, 10**23, -(2**63))),
        lambda: generator.choice((0.5, -0.0, float("nan"), float("inf"))),
        lambda: generator.choice((True, False)),
        lambda: text(generator),
        lambda: Path(text(generator)),
        lambda: text(generator).encode(),
        lambda: generator.choice(([], (), {}, set[int]())),
        lambda: [argument(generator)],
        lambda: {"x": argument(generator)},
        lambda: (argument(generator), argument(generator)),
        object,
        lambda: int,
        lambda: lambda *_: argument(generator),
        lambda: np.ones((2, 2), np.float32),
        lambda: np.array([object()]),
        lambda: np.float64(3),
        lambda: slice(None),
    )
    return generator.choice(makers)()
