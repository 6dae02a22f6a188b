"""Pipelines: Alpa's passes beside MLIR's, and the messages about wrong or failing ones."""

from __future__ import annotations

import dataclasses
import gc
import io
import logging
import subprocess
import sys
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Literal

import pytest

import alpa.passes
from alpa.dialects import body, ir, main_function, make_context, parse, passmanager
from alpa.passes import pipeline
from alpa.passes.base import Driver, OptionError, Pass, PassError, Remark, RunPass, Show, option
from alpa.passes.pipelines.diagnostics import Place, is_utf8, place_of
from alpa.passes.pipelines.text import PipelineError

PROGRAM = """\
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %x, %x : tensor<4xf32>
  %1 = stablehlo.add %x, %x : tensor<4xf32>
  %2 = stablehlo.multiply %0, %1 : tensor<4xf32>
  return %2 : tensor<4xf32>
}
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountOps(Pass):
    """Remarks the number of the function's ops."""

    name: ClassVar[str] = "count-ops"
    unit: str = option("ops", "what to call them")
    style: Literal["plain", "loud"] = option("plain", "how to say it")

    def __post_init__(self) -> None:
        if self.unit == "stones":
            raise OptionError("option 'unit' is 'stones'; nobody counts in stones")

    def run(self, module: ir.Module, remark: Remark) -> None:
        main = main_function(module)
        end = "!" if self.style == "loud" else ""
        remark(main.location, f"{len(list(body(main).operations))} {self.unit}{end}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refuse(Pass):
    """Fails in the requested way."""

    name: ClassVar[str] = "refuse"
    how: Literal["nothing", "error", "option", "bug", "invalid"] = option("error", "the way")

    def run(self, module: ir.Module, remark: Remark) -> None:
        first, second, *_, last = body(main_function(module)).operations
        match self.how:
            case "error":
                raise PassError(second, "is the same as another", ((first, "the other one"),))
            case "option":
                raise OptionError("needs a cluster")
            case "bug":
                raise ZeroDivisionError
            case "invalid":
                last.operation.erase()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Both(Driver):
    """Runs both."""

    name: ClassVar[str] = "both"
    how: Literal["nothing", "error", "option", "bug", "invalid"] = option("nothing", "the way")

    def drive(self, module: ir.Module, remark: Remark, run_pass: RunPass) -> None:
        run_pass(CountOps(), module, remark)
        run_pass(Refuse(how=self.how), module, remark)


@pytest.fixture(autouse=True)
def test_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pipeline.PASSES, "count-ops", f"{__name__}:CountOps")
    monkeypatch.setitem(pipeline.PASSES, "refuse", f"{__name__}:Refuse")
    monkeypatch.setitem(pipeline.PASSES, "both", f"{__name__}:Both")


def ops(module: ir.Module) -> list[str]:
    return [op.operation.name for op in body(main_function(module)).operations]


def remarks_of(text: str) -> list[str]:
    remarks: list[str] = []
    alpa.passes.run(PROGRAM, text, on_remark=lambda _, message: remarks.append(message))
    return remarks


def pipeline_error(text: str) -> PipelineError:
    with pytest.raises(PipelineError) as caught:
        pipeline.check(text)
    return caught.value


CLEAN = ["stablehlo.add", "stablehlo.multiply", "func.return"]


def test_run_takes_text_and_bytecode() -> None:
    from_text = alpa.passes.run(PROGRAM, "cse")
    bytecode = io.BytesIO()
    from_text.operation.write_bytecode(bytecode)
    from_bytecode = alpa.passes.run(bytecode.getvalue(), "canonicalize")
    assert ops(from_text) == ops(from_bytecode) == CLEAN
    assert str(from_text) == str(from_bytecode)


def test_arguments_of_other_types_are_refused() -> None:
    for source in (None, 7, Path("program.mlir")):
        with pytest.raises(TypeError, match=r"source is .*; expected Module or str or bytes"):
            alpa.passes.run(source, "canonicalize")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"pipeline is None, .*; expected str"):
        alpa.passes.run("", None)  # pyright: ignore[reportArgumentType]


def test_run_rewrites_a_given_module_in_place() -> None:
    module = parse(PROGRAM)
    assert alpa.passes.run(module, "cse") is module
    assert ops(module) == CLEAN


def test_our_passes_and_mlirs_run_in_the_order_written() -> None:
    text = "count-ops,func.func(cse),count-ops{unit='ops left' style=loud},builtin.module(cse)"
    assert remarks_of(text) == ["4 ops", "3 ops left!"]
    assert remarks_of(f"builtin.module({text})") == ["4 ops", "3 ops left!"]


def test_remarks_are_logged_if_nothing_receives_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="alpa"):
        alpa.passes.run(PROGRAM, "count-ops")
    assert caplog.messages == ["-:1:1: remark: 4 ops"]


def test_add_to_adds_to_an_existing_pass_manager() -> None:
    context = make_context()
    module = parse(PROGRAM, context)
    manager = passmanager.PassManager(context=context)
    remarks: list[str] = []
    manager.add("cse")
    alpa.passes.add_to(manager, "count-ops", on_remark=lambda _, text: remarks.append(text))
    manager.run(module.operation)
    assert remarks == ["3 ops"]


def test_pass_error_is_an_mlir_error_at_its_op_with_its_notes() -> None:
    with pytest.raises(ir.MLIRError) as caught:
        alpa.passes.run(PROGRAM, "refuse")
    (diagnostic,) = caught.value.error_diagnostics
    assert place_of(diagnostic.location) == Place("-", 3, 8)
    assert diagnostic.message == "is the same as another\n-:2:8: note: the other one"


def test_option_error_in_a_pass_names_the_pass() -> None:
    with pytest.raises(ir.MLIRError, match="refuse: needs a cluster"):
        alpa.passes.run(PROGRAM, "refuse{how=option}")


def test_module_is_verified_after_our_passes() -> None:
    with pytest.raises(ir.MLIRError, match="block with no terminator"):
        alpa.passes.run(PROGRAM, "refuse{how=invalid}")


def test_other_exceptions_come_out_as_themselves() -> None:
    with pytest.raises(ZeroDivisionError):
        alpa.passes.run(PROGRAM, "refuse{how=bug}")


@pytest.mark.parametrize("how", ["error", "bug"])
def test_the_collector_of_cycles_works_again_after_a_pass(how: str) -> None:
    assert gc.isenabled()
    with pytest.raises((ir.MLIRError, ZeroDivisionError)):
        alpa.passes.run(PROGRAM, f"refuse{{how={how}}}")
    assert gc.isenabled()


def test_what_a_pass_leaves_is_old() -> None:
    """The next collection of young objects does not go through it."""
    made: list[list[str]] = []
    alpa.passes.run(PROGRAM, "count-ops", on_remark=lambda _, text: made.append([text]))
    old = gc.get_objects(generation=2)
    assert made
    assert all(any(it is one for one in old) for it in made)


def test_what_others_have_frozen_stays_so() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        alpa.passes.run(PROGRAM, "count-ops")
        assert 0 < gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()


def test_errors_of_a_pass_inside_of_another_come_out_as_its_own() -> None:
    with pytest.raises(ir.MLIRError) as caught:
        alpa.passes.run(PROGRAM, "both{how=error}")
    (diagnostic,) = caught.value.error_diagnostics
    assert place_of(diagnostic.location) == Place("-", 3, 8)
    assert diagnostic.message == "is the same as another\n-:2:8: note: the other one"
    with pytest.raises(ir.MLIRError, match="refuse: needs a cluster"):
        alpa.passes.run(PROGRAM, "both{how=option}")
    with pytest.raises(ir.MLIRError, match="block with no terminator"):
        alpa.passes.run(PROGRAM, "both{how=invalid}")
    with pytest.raises(ZeroDivisionError):
        alpa.passes.run(PROGRAM, "both{how=bug}")


@pytest.mark.parametrize("text", ["refuse", "both{how=error}", "both{how=option}", "both{how=bug}"])
def test_a_failed_run_keeps_nothing_of_its_callers(text: str) -> None:
    """A plan that was refused kept the workers of the function that asked for it."""

    def fails() -> weakref.ref[object]:
        held = type("Held", (), {})()  # as what the frame of a caller holds
        errors: list[PassError] = []
        with pytest.raises((ir.MLIRError, ZeroDivisionError)):
            alpa.passes.run(PROGRAM, text, on_error=errors.append)
        return weakref.ref(held)

    held = fails()
    gc.collect()
    assert held() is None


def test_a_watcher_sees_the_passes_inside(capfd: pytest.CaptureFixture[str]) -> None:
    heard: list[str] = []

    @contextmanager
    def hear(name: str) -> Generator[None]:
        heard.append(name)
        yield

    alpa.passes.run(PROGRAM, "count-ops,both{how=nothing}", on_pass=hear)
    assert heard == ["count-ops", "count-ops", "refuse"]

    context = make_context()
    context.enable_multithreading(False)
    manager = passmanager.PassManager("builtin.module", context=context)
    alpa.passes.add_to(
        manager, "both{how=nothing}", on_manager=lambda inner: inner.enable_ir_printing()
    )
    manager.run(parse(PROGRAM, context).operation)
    assert "IR Dump After count-ops" in capfd.readouterr().err


def test_progress_of_passes_inside_is_told_beside_a_watcher() -> None:
    told: list[tuple[str, int, int]] = []
    watched: list[str] = []

    @contextmanager
    def watch(name: str) -> Generator[Show]:
        yield lambda what, done=0, total=0: watched.append(f"{name}: {what} {done}/{total}")

    def tell(what: str, done: int = 0, total: int = 0) -> None:
        told.append((what, done, total))

    product = PROGRAM.replace("stablehlo.add %x, %x", "stablehlo.multiply %x, %x")
    options = "alpa{cluster=cpu:1x2}"
    alpa.passes.run(product, options, on_progress=tell, on_pass=watch)
    assert told[0] == ("import-hlo", 0, 0)
    assert ("ilp-shard-annotate: 0 of 1 meshes", 0, 1) in told
    assert "ilp-shard-annotate: 0 of 1 meshes 0/1" in watched

    told.clear()
    module = parse(product)
    manager = passmanager.PassManager("builtin.module", context=module.context)
    alpa.passes.add_to(manager, options, on_progress=tell)
    manager.run(module.operation)
    assert told[0] == ("import-hlo", 0, 0)


def test_a_callback_that_raises_ends_the_run() -> None:
    def stop(what: str, done: int = 0, total: int = 0) -> None:
        if what == "layer-cluster":
            raise TimeoutError("too long")

    with pytest.raises(TimeoutError, match="too long"):
        alpa.passes.run(PROGRAM, "alpa{cluster=cpu:1x2}", on_progress=stop)


@pytest.mark.parametrize("name", ["caf\\C3\\A9", "a\\22b", "back\\\\C3slash", "\\C3\\28", "\\FF"])
def test_names_that_are_not_utf8_are_found(name: str) -> None:
    module = parse(PROGRAM.replace("@main", f'@"{name}"'))
    assert is_utf8(module) == (name not in ("\\C3\\28", "\\FF"))


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("cse,layer-clutser", 5, "unknown pass 'layer-clutser'; did you mean 'layer-cluster'?"),
        ("func.func(cse,canoncalize)", 15, "unknown pass 'canoncalize'; did you mean 'canonic"),
        ("xyzzy", 1, "unknown pass 'xyzzy'"),
        ("count-ops{unit=a stile=loud}", 18, "unknown option 'stile' of 'count-ops'; did you"),
        ("count-ops{style=quiet}", 17, "option 'style' is 'quiet'; expected plain or loud"),
        ("count-ops{style=loud unit=stones}", 27, "option 'unit' is 'stones'; nobody counts"),
        ("cse,func.func(cse,count-ops)", 19, "'count-ops' rewrites whole modules: it cannot st"),
        ("func.func(both)", 11, "'both' rewrites whole modules: it cannot stand inside func.func"),
        ("canonicalize{top-down=true foo=3}", 28, "unknown option 'foo' of 'canonicalize'"),
        ("canonicalize{max-iterations=x}", 14, "'canonicalize' does not take the options"),
        ("sdy-populate-op-sharding-rules", 1, "'sdy-populate-op-sharding-rules' runs on func.fun"),
        ("func.func(sdy-lift-inlined-meshes)", 11, "'sdy-lift-inlined-meshes' runs on builtin.mo"),
        ("func.func(sdy-propagation-pipeline)", 11, "'sdy-propagation-pipeline' runs on builtin."),
    ],
)
def test_wrong_pipeline_is_pointed_at(text: str, column: int, message: str) -> None:
    error = pipeline_error(text)
    assert error.column == column
    assert error.message.startswith(message)


def test_nothing_is_added_if_a_later_pass_is_wrong() -> None:
    manager = passmanager.PassManager("builtin.module", context=make_context())
    with pytest.raises(PipelineError):
        alpa.passes.add_to(manager, "cse,xyzzy")
    assert str(manager) == "builtin.module()"


def test_shardys_pipelines_and_options_pass_through() -> None:
    text = "sdy-propagation-pipeline,func.func(sdy-insert-explicit-reshards{enable-full-version})"
    assert ops(alpa.passes.run(PROGRAM, text))[-1] == "func.return"


def test_the_default_pipeline_takes_the_options_of_its_passes() -> None:
    pipeline.check("alpa{cluster=cpu:2x4 num-layers=4 num-stages=2},export-stages")
    error = pipeline_error("alpa{cluster=cpu:2x4 num-layer=4}")
    assert error.message == "unknown option 'num-layer' of 'alpa'; did you mean 'num-layers'?"


@pytest.mark.parametrize("name", list(pipeline.PASSES))
def test_registered_pass_has_the_name_it_is_registered_under(name: str) -> None:
    kind = pipeline.load_pass(name)
    assert kind.name == name
    assert kind.summary().endswith(".")


def test_upstream_names_are_registered() -> None:
    assert {"canonicalize", "cse", "sdy-propagation-pipeline"} <= set(pipeline.upstream_names())


def test_importing_the_package_loads_no_mlir_and_running_passes_no_jax() -> None:
    program = (
        "import sys, alpa.passes; assert 'jaxlib' not in sys.modules;"
        "alpa.passes.run('', 'cse'); assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("stablehlo.add", "stablehlo.addd"),
        ("%0, %1", "%0, %7"),
        ("tensor<4xf32>\n  return", "tensor<5xf32>\n  return"),
        ("return %2", "return %2, %2"),
        ("return", "@return"),
        ("}\n", ""),
        ("func.func @main(%x: tensor<4xf32>)", "func.func @main(%x: tensor<?xf32>)"),
    ],
)
def test_a_text_that_is_broken_is_an_error_with_its_place(old: str, new: str) -> None:
    assert old in PROGRAM
    with pytest.raises(ir.MLIRError) as raised:
        alpa.passes.run(PROGRAM.replace(old, new, 1), "alpa{cluster=cpu:1x1}")
    first, *_ = raised.value.error_diagnostics
    place = place_of(first.location)
    assert place.line >= 1
    assert place.column >= 1
    assert first.message
