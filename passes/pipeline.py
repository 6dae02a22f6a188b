"""Pipelines: passes of Alpa, MLIR and other packages by name, in one pass manager."""

from __future__ import annotations

import gc
import importlib
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from alpa.dialects import ir, make_context, parse, passmanager
from alpa.dialects.caches import forget
from alpa.dialects.symbols import hide_computations
from alpa.passes.analysis.input_checks import check_input
from alpa.passes.base import Driver, OptionError, Pass, PassError, Remark, Show, check_kind
from alpa.passes.pipelines import packages, upstream
from alpa.passes.pipelines.clock import Clock
from alpa.passes.pipelines.diagnostics import is_utf8, place_of, with_notes
from alpa.passes.pipelines.text import Element, Option, PipelineError, did_you_mean
from alpa.passes.pipelines.text import parse as parse_pipeline
from alpa.passes.solve.sharding.problem import Solver

PASSES = {
    "alpa": "alpa.passes.alpa:Alpa",
    "import-hlo": "alpa.passes.import_hlo:ImportHlo",
    "combine-micro-batches": "alpa.passes.combine_micro_batches:CombineMicroBatches",
    "simplify-trivial-ops": "alpa.passes.simplify_trivial_ops:SimplifyTrivialOps",
    "split-loops": "alpa.passes.split_loops:SplitLoops",
    "layer-cluster": "alpa.passes.layer_cluster:LayerCluster",
    "verify-layers": "alpa.passes.verify_layers:VerifyLayers",
    "stage-mesh-partition": "alpa.passes.stage_mesh_partition:StageMeshPartition",
    "token-slice": "alpa.passes.token_slice:TokenSlice",
    "place-gradient-reductions": "alpa.passes.place_gradient_reductions:PlaceGradientReductions",
    "ilp-shard-annotate": "alpa.passes.ilp_shard_annotate:IlpShardAnnotate",
    "insert-cross-mesh-reshard": "alpa.passes.insert_cross_mesh_reshard:InsertCrossMeshReshard",
    "split-backward": "alpa.passes.split_backward:SplitBackward",
    "export-stages": "alpa.passes.export_stages:ExportStages",
    "delay-copies": "alpa.passes.delay_copies:DelayCopies",
    "merge-fragments": "alpa.passes.merge_fragments:MergeFragments",
    "wait-for-gradients": "alpa.passes.wait_for_gradients:WaitForGradients",
    "outline-fragments": "alpa.passes.outline_fragments:OutlineFragments",
    "lower-partial-sums": "alpa.passes.lower_partial_sums:LowerPartialSums",
    "accumulate-gradients": "alpa.passes.accumulate_gradients:AccumulateGradients",
    "scale-totals": "alpa.passes.scale_totals:ScaleTotals",
    "donate-states": "alpa.passes.donate_states:DonateStates",
    "run-calls-on-shards": "alpa.passes.run_calls_on_shards:RunCallsOnShards",
    "constrain-shardings": "alpa.passes.constrain_shardings:ConstrainShardings",
    "write-reshard-steps": "alpa.passes.write_reshard_steps:WriteReshardSteps",
    "refine-dimensions": "alpa.passes.refine_dimensions:RefineDimensions",
    "strip-sdy": "alpa.passes.strip_sdy:StripSdy",
}

OnError = Callable[[PassError], None]
OnPass = Callable[[str], AbstractContextManager[object]]
OnManager = Callable[[passmanager.PassManager], None]

_logger = logging.getLogger("alpa")


def run(
    source: ir.Module | str | bytes,
    pipeline: str,
    *,
    on_remark: Remark | None = None,
    on_error: OnError | None = None,
    on_pass: OnPass = nullcontext,
    on_progress: Show | None = None,
    solver: Solver | None = None,
) -> ir.Module:
    """Runs a pipeline such as `alpa{cluster=cpu:2x4 num-layers=4}` on a program.

    Args:
        source: a module, rewritten in place, or MLIR text or bytecode, parsed in a fresh context.
        pipeline: passes in MLIR's textual syntax, ours and MLIR's.
        on_remark: receives what passes say that is no error; by default the logger `alpa` does.
        on_error: receives why a pass of ours cannot go on, before that is raised as an MLIRError.
        on_pass: gives a context in which a pass of this name runs, such as one that takes its time;
            `alpa` runs other passes, and each of them has one instead. If the context gives a
            `Show`, that hears how far the pass is.
        on_progress: is called with a text that says what begins, and with `done` and `total` where
            that can be counted. What it raises ends the run and comes out of it.
        solver: solves the sharding problems of finished stages in place of Alpa's solver. Each
            solution is checked (`alpa.passes.solve.sharding.problem.verify`).

    Returns:
        The rewritten module.

    Raises:
        TypeError: an argument is of another type.
        PipelineError: the pipeline's text is wrong.
        ir.MLIRError: the program does not parse, or a pass cannot go on; with file, line, column.
    """
    steps = parsed(pipeline)
    check_kind("source", source, ir.Module, str, bytes)
    module = source if isinstance(source, ir.Module) else parse(source)
    watched = _watched(on_pass, on_progress)
    run_steps(module, steps, on_remark=on_remark, on_error=on_error, on_pass=watched, solver=solver)
    return module


def run_steps(
    module: ir.Module,
    steps: Sequence[Pass | str],
    *,
    on_remark: Remark | None = None,
    on_error: OnError | None = None,
    on_pass: OnPass = nullcontext,
    solver: Solver | None = None,
) -> None:
    """As `run`, of passes that are made already, and the texts of MLIR's.

    Raises:
        ir.MLIRError: a pass cannot go on; with file, line, column.
    """
    manager = passmanager.PassManager("builtin.module", context=module.context)
    runner = _Runner(
        remark=on_remark or _log_remark, on_error=on_error, on_pass=on_pass, solver=solver
    )
    runner.add(manager, steps)
    try:
        manager.run(module.operation)
    finally:
        del manager  # See `_Runner._add`.
        forget()


def check(text: str) -> None:
    """Raises PipelineError if `run` would, without a program."""
    parsed(text)


def add_to(
    manager: passmanager.PassManager,
    pipeline: str,
    *,
    on_remark: Remark | None = None,
    on_pass: OnPass = nullcontext,
    on_progress: Show | None = None,
    on_manager: OnManager | None = None,
    solver: Solver | None = None,
) -> None:
    """Adds a pipeline to a pass manager that runs on modules.

    Args:
        manager: the pass manager.
        pipeline: as in `run`.
        on_remark: as in `run`.
        on_pass: as in `run`.
        on_progress: as in `run`.
        on_manager: receives each pass manager by which `alpa` runs another pass, before it does,
            for instance to make it print the IR as `manager` does.
        solver: as in `run`.

    Raises:
        TypeError: the pipeline is no text.
        PipelineError: the pipeline's text is wrong; nothing was added.
    """
    runner = _Runner(
        remark=on_remark or _log_remark,
        on_pass=_watched(on_pass, on_progress),
        on_manager=on_manager,
        solver=solver,
    )
    runner.add(manager, parsed(pipeline))


def upstream_names() -> list[str]:
    """Passes of MLIR and Shardy that a pipeline may name; the usual ones, not all."""
    return upstream.registered()


def installed(context: ir.Context) -> packages.Installed:
    """The passes of other packages."""
    return packages.installed(PASSES, lambda name: upstream.is_registered(name, context))


def load_pass(name: str) -> type[Pass]:
    """The class of one of our passes."""
    module, _, attribute = PASSES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def parsed(text: str) -> list[Pass | str]:
    """Our passes, and the texts of MLIR's between them.

    Raises:
        TypeError: it is no text.
        PipelineError: at the position that is wrong.
    """
    check_kind("pipeline", text, str)
    steps: list[Pass | str] = []
    context: ir.Context | None = None
    for element in parse_pipeline(text):
        if element.nested is None and element.name in PASSES:
            steps.append(_configured(text, element, load_pass(element.name)))
            continue
        context = context or make_context()
        kind = _of_package(text, element, context)
        if kind is None:
            upstream.check(text, element, partial(_names, context), context)
            steps.append(element.source)
        else:
            steps.append(_configured(text, element, kind))
    return steps


def _of_package(text: str, element: Element, context: ir.Context) -> type[Pass] | None:
    """The pass of an element if it is another package's. Raises PipelineError."""
    if element.nested is not None or upstream.is_registered(element.name, context):
        return None
    found = installed(context)
    if (problem := found.problems.get(element.name)) is not None:
        raise PipelineError(text, element.position, str(problem))
    entry = found.passes.get(element.name)
    if entry is None:
        return None
    try:
        return packages.load(entry)
    except packages.PackageError as error:
        raise PipelineError(text, element.position, str(error)) from error


def _names(context: ir.Context) -> list[str]:
    return [*PASSES, *installed(context).passes]


def _configured(text: str, element: Element, kind: type[Pass]) -> Pass:
    """The pass of an element. Raises PipelineError."""
    known = kind.options()
    for option in element.options:
        if option.key not in known:
            raise _unknown_option(text, element, option, kind)
    try:
        return kind.from_options({option.key: option.value for option in element.options})
    except OptionError as error:
        named = [option for option in element.options if f"'{option.key}'" in str(error)]
        position = named[0].value_position if named else element.position
        raise PipelineError(text, position, str(error)) from error


def _unknown_option(text: str, element: Element, option: Option, kind: type[Pass]) -> PipelineError:
    defaults = {name: f"{name}={known.default_text()}" for name, known in kind.options().items()}
    message = f"unknown option '{option.key}' of '{element.name}'"
    message += did_you_mean(option.key, defaults)
    options = " ".join(defaults.values())
    note = f"its options and their defaults: {options}" if options else "it has no options"
    return PipelineError(text, option.position, message, note)


def _watched(on_pass: OnPass, on_progress: Show | None) -> OnPass:
    """What runs around each pass, so that `on_progress` hears of it, too."""
    if on_progress is None:
        return on_pass
    clock = Clock(on_progress)

    @contextmanager
    def both(name: str) -> Generator[Show]:
        with on_pass(name) as other, clock.phase(name) as show:

            def tell(what: str, done: int = 0, total: int = 0) -> None:
                show(what, done, total)
                if callable(other):
                    other(what, done, total)

            yield tell

    return both


@dataclass(frozen=True, kw_only=True)
class _Runner:
    """Adds passes to pass managers; what is said on the way goes to the callbacks of `run`."""

    remark: Remark
    on_error: OnError | None = None
    on_pass: OnPass = field(default=nullcontext)
    on_manager: OnManager | None = None
    solver: Solver | None = None

    def add(self, manager: passmanager.PassManager, steps: Sequence[Pass | str]) -> None:
        for step in steps:
            if isinstance(step, str):
                manager.add(step)
            else:
                self._add(manager, step, self.remark, self._emit)

    def _add(
        self,
        manager: passmanager.PassManager,
        step: Pass,
        remark: Remark,
        failed: Callable[[PassError], None],
    ) -> None:
        """Adds a pass of ours, as a callback of MLIR. `failed` receives what it raises.

        The collector does not see that a manager holds its callbacks, so they live as long as it.
        The traceback of an error holds the frame that ran the manager: that frame forgets it, or
        it would never be freed, nor whatever its callers hold.
        """

        def run_pass(operation: ir.Operation, manager: Any) -> None:
            try:
                self._run(step, operation, remark)
            except PassError as error:
                failed(error)
                manager.signal_pass_failure()
            except ir.MLIRError as error:
                # A pass inside of this one left IR that is not valid.
                for diagnostic in error.error_diagnostics:
                    diagnostic.location.emit_error(diagnostic.message)
                manager.signal_pass_failure()

        manager.add(run_pass, name=step.name, argument=step.name, description=step.summary())

    def _emit(self, error: PassError) -> None:
        if self.on_error is not None:
            self.on_error(error)
        error.location.emit_error(with_notes(error.message, error.notes))

    def _run(self, step: Pass, operation: ir.Operation, remark: Remark) -> None:
        """Runs a pass. Raises PassError; ir.MLIRError where it runs others that fail so."""
        # The bindings hand out the op; as a view it has all that a pass uses of a module.
        module = cast(ir.Module, operation.opview)
        # What a pass builds without a location of its own gets the module's.
        with operation.location:
            hide_computations(module)
            check_input(module, is_checked=True)
            if isinstance(step, Driver):
                step.drive(module, remark, self._run_nested)
                return
            try:
                with self.on_pass(step.name) as show, _without_collector():
                    told = replace(step, show=show) if callable(show) else step
                    self._with_solver(told).run(module, remark)
            except OptionError as error:
                raise PassError(operation, f"{step.name}: {error}") from error
            except RuntimeError as error:
                # The bindings cannot make a str of a name that is not UTF-8.
                if is_utf8(module):
                    raise
                message = f"{step.name}: a name in the program is not UTF-8"
                raise PassError(operation, message) from error

    def _with_solver(self, step: Pass) -> Pass:
        if self.solver is None:
            return step
        from alpa.passes.ilp_shard_annotate import IlpShardAnnotate  # noqa: PLC0415 - start-up time

        return replace(step, solver=self.solver) if isinstance(step, IlpShardAnnotate) else step

    def _run_nested(self, step: Pass, module: ir.Module, remark: Remark) -> None:
        """`RunPass`: a pass in a pass manager of its own, which verifies what it leaves."""
        failed: list[PassError] = []
        manager = passmanager.PassManager("builtin.module", context=module.context)
        self._add(manager, step, remark, failed.append)
        if self.on_manager is not None:
            self.on_manager(manager)
        try:
            manager.run(module.operation)
        except ir.MLIRError:
            if failed:
                raise failed.pop() from None
            raise
        finally:
            del manager  # See `_add`.


_FROZEN_BY_PYTHON = 1000
"""Python 3.12 freezes some hundred objects as it starts. A program that freezes its own, before it
forks, freezes many thousand."""


@contextmanager
def _without_collector() -> Generator[None]:
    """Turns Python's garbage collector off while a pass runs.

    Passes make many objects that stay, and few cycles. Planning GPT-2.6B for 8 V100s takes 10.9 s
    of processor time without the collector, and 13.2 s with it (two runs each, jax 0.10.2).

    What a pass leaves counts as old: otherwise the next collection of young objects would go
    through all of them, which takes a second behind the largest programs.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if gc.get_freeze_count() <= _FROZEN_BY_PYTHON:  # What others have frozen stays so.
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _log_remark(location: ir.Location, message: str) -> None:
    _logger.info("%s: remark: %s", place_of(location), message)
