"""Implements `alpa-plan --compare-with-jax`: compares one step of the plan on virtual CPU devices.

A file is compared with itself on one device, on random arguments. A zoo program is compared with
its own step in plain JAX: at the whole batch, or by a loop over micro-batches if it draws random
numbers or its forward pass writes state. With `sizes`, a smaller program of the same structure is
planned with the same settings and compared instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from alpa import runtime
from alpa.dialects import ir, main_function, separate
from alpa.passes.analysis.graph import element_bytes
from alpa.passes.import_hlo import without_tuples
from alpa.passes.pipelines.clock import Clock
from alpa.runtime.compare_programs import compare_programs, narrow_results
from alpa.runtime.compare_with_jax import check_memory, plain_jax
from alpa.runtime.comparison import Comparison
from alpa.runtime.noise import Output, compare_with_noise
from alpa.runtime.planning import Settings, plan
from alpa.runtime.shrink import elided_to_arguments, shrink
from alpa.tools.demo import reference_step
from alpa.tools.zoo import TrainingProgram


def compare_file(
    source: ir.Module, planned: ir.Module, devices: int, name: str, clock: Clock
) -> Comparison:
    """Compares a planned file with the file.

    Raises:
        ValueError: it does not fit on this machine, or has constants without values.
        LoadError: the plan cannot be run.
    """
    source = without_tuples(source)
    if number := elided_to_arguments(separate(source.operation)):
        raise ValueError(
            f"{name} has {number} constants without values, so that it cannot be run; "
            "python -m alpa.tools.run_file draws random values"
        )
    size = sum(_bytes(type_) for type_ in main_function(source).type.inputs)
    check_memory(size, devices, name)
    return compare_programs(source, planned, clock=clock)


def compare_shrunk(
    source: ir.Module, settings: Settings, sizes: Mapping[int, int], clock: Clock
) -> Comparison:
    """Plans a smaller program of the same structure with the same settings and compares it.

    Raises:
        ValueError: a size does not occur.
        PassError, ir.MLIRError: the program cannot be shrunk like this.
        PlanningError: there is no plan for it.
    """
    small = separate(source.operation)
    elided_to_arguments(small)
    shrink(small, sizes)
    small.operation.verify()
    planned = plan(small, settings, clock)
    return compare_programs(small, planned.module, clock=clock)


def compare_zoo(
    program: TrainingProgram, batch_size: int, planned: ir.Module, devices: int, clock: Clock
) -> Comparison:
    """Compares a planned zoo program with its own step in plain JAX.

    Raises:
        ValueError: it does not fit on this machine.
        LoadError: the plan cannot be run.
    """
    shapes = jax.tree.leaves(program.state_shapes())
    check_memory(sum(s.size * s.dtype.itemsize for s in shapes), devices, program.name)
    with clock.phase("compile"):
        executable = runtime.load(planned, on_progress=clock.on_phase)
    number = executable.program.num_micro_batches
    step = reference_step(program, number)
    state, batch = program.init_state(0), program.random_batch(1, batch_size)
    leaves, tree = jax.tree.flatten((state, batch))
    paths, _ = jax.tree_util.tree_flatten_with_path(state)

    def flat(*arrays: Any) -> list[Any]:
        return jax.tree.leaves(step(*jax.tree.unflatten(tree, arrays)))

    one_by_one = number > 1 and step != program.train_step
    how = f"from micro-batch to micro-batch ({number} of them)" if one_by_one else "on one device"
    structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    reference = plain_jax(flat, structs, f"plain JAX {how}")
    types = [str(type_) for type_ in main_function(reference.module).type.results]
    labels = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
    outputs = [
        Output(label=label, type=type_, state=n if n < len(paths) else None, is_narrow=narrow)
        for n, (label, type_, narrow) in enumerate(
            zip([*labels, "loss"], types, narrow_results(reference.module), strict=True)
        )
    ]
    arguments = jax.device_get(leaves)
    with clock.phase("first run"):
        results = jax.block_until_ready(executable(*arguments))
    return compare_with_noise(results, arguments, reference, outputs, clock)


def _bytes(type_: ir.Type) -> int:
    tensor = ir.RankedTensorType(type_)
    size = element_bytes(tensor.element_type)
    for dim in tensor.shape:
        size *= dim
    return size
