"""Pipelines: our passes by name, beside MLIR's, in one pass manager.

`alpa` is the default pipeline. Why its order is what it is:

1. `combine-micro-batches` comes first: a rewrite would lose what ops say of the whole batch.
2. `simplify-trivial-ops` comes next: every later pass then reads one flat function of plain ops.
3. `split-loops` comes before the layers: what a loop holds together cannot be clustered apart.
4. `layer-cluster` comes before the stages, because a stage is an interval of layers.
5. `stage-mesh-partition` comes before the shardings: a stage's mesh decides which there are.
6. `ilp-shard-annotate` needs the mesh of each op, and gives both ends of a transfer their layouts.
7. `insert-cross-mesh-reshard` chooses each transfer by the shardings at its two ends.

`verify-layers` is not part of it: the passes that make layers and stages check them themselves.

`export-stages` is not part of it: it copies the fragments of the finished plan into modules for XLA
and changes nothing of the plan, so who wants the modules writes `alpa{...},export-stages`.

MLIR's `canonicalize` and `cse` are not part of it either. Dead ops are gone after the first pass.
`cse` would make one value of the masks and iotas that each layer computes for itself: equal layers
would no longer be equal, and the value would cross meshes. After the first pass, a rewrite that
swaps operands or replaces an op would falsify or lose its `alpa.follow`. Both may be written in
front of `alpa`.

An option of `alpa` goes to every pass of the seven that has one of that name.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import logging
import typing
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from alpa.dialects import ir, parse, passmanager
from alpa.passes.base import OptionError, Pass, PassError, Remark, describe_type
from alpa.passes.pipelines import upstream
from alpa.passes.pipelines.diagnostics import place_of, with_notes
from alpa.passes.pipelines.text import Element, Option, PipelineError, did_you_mean
from alpa.passes.pipelines.text import parse as parse_pipeline

PASSES = {
    "combine-micro-batches": "alpa.passes.combine_micro_batches:CombineMicroBatches",
    "simplify-trivial-ops": "alpa.passes.simplify_trivial_ops:SimplifyTrivialOps",
    "split-loops": "alpa.passes.split_loops:SplitLoops",
    "layer-cluster": "alpa.passes.layer_cluster:LayerCluster",
    "verify-layers": "alpa.passes.verify_layers:VerifyLayers",
    "stage-mesh-partition": "alpa.passes.stage_mesh_partition:StageMeshPartition",
    "ilp-shard-annotate": "alpa.passes.ilp_shard_annotate:IlpShardAnnotate",
    "insert-cross-mesh-reshard": "alpa.passes.insert_cross_mesh_reshard:InsertCrossMeshReshard",
    "export-stages": "alpa.passes.export_stages:ExportStages",
}

PIPELINES = {
    "alpa": (
        "combine-micro-batches",
        "simplify-trivial-ops",
        "split-loops",
        "layer-cluster",
        "stage-mesh-partition",
        "ilp-shard-annotate",
        "insert-cross-mesh-reshard",
    )
}

OnError = Callable[[PassError], None]

_logger = logging.getLogger("alpa")


def run(
    source: ir.Module | str | bytes,
    pipeline: str,
    *,
    on_remark: Remark | None = None,
    on_error: OnError | None = None,
) -> ir.Module:
    """Runs a pipeline such as `alpa{cluster=cpu:2x4 num-layers=4}` on a program.

    Args:
        source: a module, rewritten in place, or MLIR text or bytecode, parsed in a fresh context.
        pipeline: passes in MLIR's textual syntax, ours and MLIR's.
        on_remark: receives what passes say that is no error; by default the logger `alpa` does.
        on_error: receives why a pass of ours cannot go on, before that is raised as an MLIRError.

    Returns:
        The rewritten module.

    Raises:
        PipelineError: the pipeline's text is wrong.
        ir.MLIRError: the program does not parse, or a pass cannot go on; with file, line, column.
    """
    steps = _steps(pipeline)
    module = source if isinstance(source, ir.Module) else parse(source)
    manager = passmanager.PassManager("builtin.module", context=module.context)
    _add_steps(manager, steps, on_remark, on_error)
    manager.run(module.operation)
    return module


def check(text: str) -> None:
    """Raises PipelineError if `run` would, without a program."""
    _steps(text)


def add_to(
    manager: passmanager.PassManager, pipeline: str, *, on_remark: Remark | None = None
) -> None:
    """Adds a pipeline to a pass manager that runs on modules.

    Raises:
        PipelineError: the pipeline's text is wrong; nothing was added.
    """
    _add_steps(manager, _steps(pipeline), on_remark, None)


def upstream_names() -> list[str]:
    """Passes of MLIR and Shardy that a pipeline may name; the usual ones, not all."""
    return upstream.registered()


def load_pass(name: str) -> type[Pass]:
    """The class of one of our passes."""
    module, _, attribute = PASSES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def describe_options(kind: type[Pass]) -> list[tuple[str, str, str, str]]:
    """Name, values, default and help of each option of a pass."""
    hints = typing.get_type_hints(kind)
    return [
        (name, describe_type(hints[field.name]), _default(field), field.metadata.get("help", ""))
        for name, field in kind.option_fields().items()
    ]


def _steps(text: str) -> list[Pass | str]:
    """Our passes, and the texts of MLIR's between them.

    Raises:
        PipelineError: at the position that is wrong.
    """
    steps: list[Pass | str] = []
    for element in parse_pipeline(text):
        if element.nested is None and element.name in PIPELINES:
            steps += _configured(text, element, PIPELINES[element.name])
        elif element.nested is None and element.name in PASSES:
            steps += _configured(text, element, (element.name,))
        else:
            upstream.check(text, element, [*PASSES, *PIPELINES])
            steps.append(element.source)
    return steps


def _configured(text: str, element: Element, names: Sequence[str]) -> list[Pass]:
    """The passes of the names, each with those options of the element that it has."""
    kinds = [load_pass(name) for name in names]
    known = {name for kind in kinds for name in kind.option_fields()}
    for option in element.options:
        if option.key not in known:
            raise _unknown_option(text, element, option, kinds)
    return [_configured_pass(text, element, kind) for kind in kinds]


def _configured_pass(text: str, element: Element, kind: type[Pass]) -> Pass:
    fields = kind.option_fields()
    values = {option.key: option.value for option in element.options if option.key in fields}
    try:
        return kind.from_options(values)
    except OptionError as error:
        named = [option for option in element.options if f"'{option.key}'" in str(error)]
        position = named[0].value_position if named else element.position
        raise PipelineError(text, position, str(error)) from error


def _unknown_option(
    text: str, element: Element, option: Option, kinds: Sequence[type[Pass]]
) -> PipelineError:
    defaults = {
        name: f"{name}={default}"
        for kind in kinds
        for name, _, default, _ in describe_options(kind)
    }
    message = f"unknown option '{option.key}' of '{element.name}'"
    message += did_you_mean(option.key, defaults)
    options = " ".join(defaults.values())
    note = f"its options and their defaults: {options}" if options else "it has no options"
    return PipelineError(text, option.position, message, note)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return ""
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return "" if field.default is None else str(field.default)


def _add_steps(
    manager: passmanager.PassManager,
    steps: Sequence[Pass | str],
    on_remark: Remark | None,
    on_error: OnError | None,
) -> None:
    for step in steps:
        if isinstance(step, str):
            manager.add(step)
        else:
            manager.add(
                _as_mlir_pass(step, on_remark or _log_remark, on_error),
                name=step.name,
                argument=step.name,
                description=step.summary(),
            )


def _as_mlir_pass(
    step: Pass, on_remark: Remark, on_error: OnError | None
) -> Callable[[ir.Operation, Any], None]:
    def run_pass(operation: ir.Operation, manager: Any) -> None:
        # The bindings hand out the op; as a view it has all that a pass uses of a module.
        module = cast(ir.Module, operation.opview)
        try:
            # What a pass builds without a location of its own gets the module's.
            with operation.location, _without_collector():
                step.run(module, on_remark)
        except PassError as error:
            if on_error is not None:
                on_error(error)
            error.location.emit_error(with_notes(error.message, error.notes))
            manager.signal_pass_failure()
        except OptionError as error:
            operation.location.emit_error(f"{step.name}: {error}")
            manager.signal_pass_failure()
        except RuntimeError as error:
            # What the bindings say of a name that they cannot make a str of.
            if "str_from_cstr" not in str(error):
                raise
            operation.location.emit_error(f"{step.name}: a name in the program is not UTF-8")
            manager.signal_pass_failure()

    return run_pass


@contextmanager
def _without_collector() -> Generator[None]:
    """Keeps Python from looking for cycles: passes make many objects that stay and hardly a cycle,
    and to look among them again and again costs a seventh of their time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _log_remark(location: ir.Location, message: str) -> None:
    _logger.info("%s: remark: %s", place_of(location), message)
