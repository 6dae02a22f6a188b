"""What the executor takes beside computation: calls of modules, and moves between meshes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median, quantiles
from typing import Any

import jax
import numpy as np

from alpa.dialects import parse
from alpa.dialects.plan import Plan
from alpa.dialects.sharding import Sharding
from alpa.passes.pipelines.clock import Clock
from alpa.passes.plan.data import DeviceMesh, Program, Transfer, Value
from alpa.runtime.loading import load
from alpa.runtime.placement import Placement
from alpa.runtime.planning import Settings, plan
from alpa.runtime.tiles import Tiles
from alpa.runtime.timing import TimedStep, in_turns

_ELEMENTS = 64


def call_samples(
    devices: Sequence[Any], arguments: Sequence[int], runs: int
) -> Iterator[tuple[str, float, float, float]]:
    """Name, size, seconds and spread of calls on one device, on two, on four and so on.

    A step with n donated arguments and n results of a few bytes, whose ops take next to nothing,
    is a call of the step and one of its module.
    """
    steps: dict[tuple[int, int], TimedStep] = {}
    group = 1
    while group <= len(devices):
        for number in arguments:
            settings = Settings(cluster=f"cpu:1x{group}", inter="none")
            planned = plan(parse(_program(number)), settings, Clock())
            executable = load(planned.module, devices=devices[:group])
            step = TimedStep(executable, [np.zeros(_ELEMENTS, np.float32)] * number)
            steps[group, number] = step
        group *= 2
    for (group, number), times in in_turns(steps, runs=3 * runs).items():
        low, _, high = quantiles(times, n=4)
        middle = median(times)
        # Each argument and each result belongs to both calls.
        yield f"call {group}", 4.0 * number, middle, (high - low) / 2 / middle


def move_of(devices: Sequence[Any], num_bytes: int) -> Callable[[], None]:
    """Moves an array from a mesh to another one; each of its devices sends so many bytes."""
    half = len(devices) // 2
    meshes = tuple(
        DeviceMesh(
            name=name,
            hosts=(0,),
            devices=tuple(range(first, first + half)),
            axes=(("axis0", half),),
        )
        for name, first in (("mesh_0", 0), ("mesh_1", half))
    )
    values = tuple(
        Value(
            mesh=mesh.name,
            shape=(half * num_bytes // 4,),
            dtype="f32",
            sharding=Sharding.of(mesh.name, (("axis0",),)),
        )
        for mesh in meshes
    )
    program = Program(values=values, arguments=(), results=(), steps=(), meshes=meshes, plan=Plan())
    placement = Placement(program=program, devices=tuple(devices))
    tiles, transfer = Tiles(placement), Transfer(source=0, target=1, method="send_recv")
    array = jax.device_put(np.zeros(values[0].shape, np.float32), placement.shardings[0])
    return lambda: jax.block_until_ready(tiles.carry(array, transfer))


def _program(number: int) -> str:
    """A step that changes so many states."""
    type_ = f"tensor<{_ELEMENTS}xf32>"
    arguments = ", ".join(
        f'%s{i}: {type_} {{alpa.role = "state", tf.aliasing_output = {i} : i32}}'
        for i in range(number)
    )
    results = ", ".join(f'{type_} {{alpa.result = "state:{i}"}}' for i in range(number))
    ops = "\n".join(f"  %r{i} = stablehlo.add %s{i}, %s{i} : {type_}" for i in range(number))
    returned = ", ".join(f"%r{i}" for i in range(number))
    types = ", ".join([type_] * number)
    return (
        f"func.func public @main({arguments}) -> ({results}) {{\n{ops}\n"
        f"  return {returned} : {types}\n}}\n"
    )
