from __future__ import annotations

import inspect
import re
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jaxlib import _jax

from alpa.dialects import body, ir, main_function, parse, walk
from alpa.dialects.attributes import FOLLOW
from alpa.passes import simplify_trivial_ops
from alpa.passes.simplify import batch_norm, control_flow, identities
from alpa.passes.simplify.identities import REWRITES
from alpa.passes.simplify_trivial_ops import SimplifyTrivialOps

LIT = Path(__file__).with_name("simplify_trivial_ops.mlir")
CONTROL_FLOW = LIT.with_stem(f"{LIT.stem}_control_flow")

BATCH_NORM = {
    "training": (
        ("x", "scale", "offset"),
        "stablehlo.batch_norm_training",
        ("x", "feature", "feature"),
    ),
    "inference": (
        ("x", "scale", "offset", "mean", "variance"),
        "stablehlo.batch_norm_inference",
        ("x",),
    ),
    "grad": (
        ("x", "scale", "mean", "variance", "dy"),
        "stablehlo.batch_norm_grad",
        ("x", "feature", "feature"),
    ),
}


def simplified(text: str) -> tuple[ir.Module, list[str]]:
    module = parse(text)
    remarks: list[str] = []
    SimplifyTrivialOps().run(module, lambda _location, text: remarks.append(text))
    assert module.operation.verify()
    return module, remarks


def rewrites_with_patterns() -> dict[str, list[str]]:
    """Function name -> the `# Pattern:` lines above it."""
    found: dict[str, list[str]] = {}
    for module in (identities, batch_norm, control_flow):
        text = inspect.getsource(module)
        found.update(
            (name, re.findall(r"# Pattern: (.*)", patterns))
            for patterns, name in re.findall(
                r"^((?:# Pattern: .*\n)+)def (\w+)\(", text, re.MULTILINE
            )
        )
    return found


def test_every_rewrite_has_its_pattern_above_it():
    names = {rewrite.__name__ for rewrites in REWRITES.values() for rewrite in rewrites}
    assert rewrites_with_patterns().keys() == names


@pytest.mark.parametrize("name", rewrites_with_patterns())
def test_every_rewrite_has_a_lit_function(name: str):
    text = LIT.read_text() + CONTROL_FLOW.read_text()
    assert re.search(rf"^func\.func @{name}\(", text, re.MULTILINE)


def test_module_docstring_lists_the_patterns():
    prose = (simplify_trivial_ops.__doc__ or "").partition("**Before**")[0]
    listed = re.findall(r"^      (\S.*->.*)$", prose, re.MULTILINE)
    assert listed == [it for patterns in rewrites_with_patterns().values() for it in patterns]


@pytest.mark.parametrize(
    "path",
    sorted(
        {*LIT.parent.glob("simplify_trivial_ops*.mlir")}
        - {*LIT.parent.glob("simplify_trivial_ops*_invalid.mlir")}
    ),
    ids=lambda path: path.stem,
)
def test_twice_is_once(path: Path):
    for text in path.read_text().split("// -----"):
        once = str(simplified(text)[0])
        assert str(simplified(once)[0]) == once


def batch_norm_text(kind: str, shape: tuple[int, ...], feature: int, dtype: str) -> str:
    names, op, results = BATCH_NORM[kind]
    full = f"tensor<{'x'.join(map(str, shape))}x{dtype}>"
    types = [full if name in ("x", "dy") else f"tensor<{shape[feature]}x{dtype}>" for name in names]
    outs = [full if name == "x" else f"tensor<{shape[feature]}x{dtype}>" for name in results]
    arguments = ", ".join(f"%{name}: {type_}" for name, type_ in zip(names, types, strict=True))
    values = ", ".join(f"%0#{i}" for i in range(len(outs)))
    return f"""func.func public @main({arguments}) -> ({", ".join(outs)}) {{
      %0:{len(outs)} = "{op}"({", ".join("%" + name for name in names)})
        {{epsilon = 1.0e-3 : f32, feature_index = {feature} : i64}}
        : ({", ".join(types)}) -> ({", ".join(outs)})
      return {values} : {", ".join(outs)}
    }}"""


def execute(module: ir.Module, arguments: list[np.ndarray]) -> list[np.ndarray]:
    device = jax.devices("cpu")[0]
    devices = _jax.DeviceList((device,))
    options = _jax.CompileOptions()
    compiled = device.client.compile_and_load(str(module), devices, options)
    buffers = [jax.device_put(argument, device) for argument in arguments]
    return [np.asarray(result) for result in compiled.execute(buffers)]


@pytest.mark.parametrize("kind", BATCH_NORM)
@pytest.mark.parametrize(
    ("shape", "feature", "dtype", "tolerance"),
    [
        ((4, 5, 3, 6), 3, "f32", 1e-6),
        ((4, 6, 5), 1, "f32", 1e-6),
        ((3, 8), 0, "f32", 1e-6),
        ((6,), 0, "f32", 1e-6),
        ((4, 5, 6), 2, "f16", 1e-2),
        ((4, 5, 6), 2, "bf16", 6e-2),
    ],
)
def test_batch_norm_equals_xla(
    kind: str, shape: tuple[int, ...], feature: int, dtype: str, tolerance: float
):
    numpy_dtype = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}[dtype]
    rng = np.random.default_rng(0)
    arguments: list[np.ndarray] = []
    for name in BATCH_NORM[kind][0]:
        sizes = shape if name in ("x", "dy") else (shape[feature],)
        drawn = rng.standard_normal(sizes)
        arguments.append((np.abs(drawn) if name == "variance" else drawn).astype(numpy_dtype))

    text = batch_norm_text(kind, shape, feature, dtype)
    expanded = simplified(text)[0]
    names = {op.operation.name for op in walk(body(main_function(expanded)))}
    assert not any("batch_norm" in name for name in names)

    expected = execute(parse(text), arguments)
    for got, want in zip(execute(expanded, arguments), expected, strict=True):
        assert got.dtype == want.dtype
        want64 = want.astype(np.float64)
        bound = tolerance * max(1.0, float(np.abs(want64).max()))
        np.testing.assert_allclose(got.astype(np.float64), want64, rtol=0, atol=bound)


def test_one_remark_for_all_gspmd_shardings():
    module, remarks = simplified("""
        func.func @main(%x: tensor<4xf32> {mhlo.sharding = "{replicated}"}) -> tensor<4xf32> {
          %0 = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{replicated}"}
            : (tensor<4xf32>) -> tensor<4xf32>
          %1 = stablehlo.tanh %0 {mhlo.sharding = "{replicated}"} : tensor<4xf32>
          return %1 : tensor<4xf32>
        }""")
    (remark,) = remarks
    assert "1 @Sharding calls and 2 mhlo.sharding attributes" in remark
    assert [op.operation.name for op in body(main_function(module)).operations] == [
        "stablehlo.tanh",
        "func.return",
    ]


def test_a_remark_names_memory_kinds_that_the_plan_does_not_use():
    _, remarks = simplified("""
        func.func @main(%x: tensor<4xf32> {mhlo.memory_kind = "device"})
            -> (tensor<4xf32> {mhlo.memory_kind = "pinned_host"}) {
          return %x : tensor<4xf32>
        }""")
    (remark,) = remarks
    assert "ignored 1 placement(s) in pinned_host" in remark


def test_no_remark_without_gspmd():
    text = "func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> }"
    assert simplified(text)[1] == []


def test_jax_training_step():
    """Calls, loops and reductions as JAX writes them; the numbers do not change."""

    def loss(weights, x):
        def layer(h, w):
            return jax.nn.gelu(jax.nn.standardize(h) @ w), None

        h, _ = jax.lax.scan(layer, x, weights)
        return jax.nn.logsumexp(h, axis=-1).mean()

    rng = np.random.default_rng(0)
    weights = rng.standard_normal((3, 8, 8)).astype(np.float32)
    x = rng.standard_normal((4, 8)).astype(np.float32)
    text = jax.jit(jax.value_and_grad(loss)).lower(weights, x).as_text()
    module, _ = simplified(text)

    ops = list(walk(body(main_function(module))))
    assert "func.call" not in {op.operation.name for op in ops}
    assert all(FOLLOW in op.attributes for op in ops if op.operation.name == "stablehlo.tanh")
    for got, want in zip(
        execute(module, [weights, x]), execute(parse(text), [weights, x]), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
