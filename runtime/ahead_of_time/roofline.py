"""Seconds of a compiled program, by a roofline over its final HLO.

The figures of the device and its links are the cluster's, but what is computed, moved and sent is
read from the compiler's program. So the result checks the plan's own costs of ops, but not the
figures that both share.

* A fusion, or an instruction outside of fusions, is one kernel. It computes its matrix products and
  convolutions, reads its operands and writes its results. Element-wise work is not counted:
  memory limits it. Of operands that are only sliced or gathered from, the slices are read. What is
  updated in place is written where it changes.
* A library's custom call computes what its dimensions say; workspaces are not moved.
* Loops run by their trip counts. Of branches the longest counts.
* Collectives are priced by kind, bytes and group (`cost/collectives.py`). A collective-permute of
  several hosts crosses them: all devices of a host share its network. Nothing overlaps beyond the
  links' `overlap`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod

from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.collectives import (
    LogicalMesh,
    all_gather,
    all_reduce,
    all_to_all,
    message_seconds,
    reduce_scatter,
)
from alpa.passes.plan.data import Fragment, Program
from alpa.passes.plan.step_time import step_seconds
from alpa.runtime.exported import module_name
from alpa.runtime.hlo_collectives import CALLED, KINDS, HloReader, branches
from alpa.runtime.hlo_text import (
    Computation,
    HloError,
    Instruction,
    parse_hlo,
    shape_arrays,
    shape_bytes,
)

_FREE = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "domain"),
        *("partition-id", "replica-id", "opt-barrier", "add-dependency"),
    }
)
_ENDS = ("-done", "-update")
_PARTS = frozenset({"slice", "dynamic-slice", "gather"})
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}
"""The operand that such an instruction writes into its first one"""
_RENAMES = frozenset({"bitcast", "get-tuple-element"})
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CONVOLUTION = re.compile(r"__cudnn\$conv(?:BackwardInput|BackwardFilter|)")
_FILTERS = re.compile(r"dim_labels=\w+_(\w+)->")
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)[}\]]')
_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Seconds of one run on each device, by what they are spent on."""

    products: float = 0.0
    """in kernels that matrix products or convolutions limit"""
    memory: float = 0.0
    """in kernels that memory limits"""
    launches: float = 0.0
    collectives: float = 0.0

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.products + self.memory + self.launches + self.collectives

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            products=self.products + other.products,
            memory=self.memory + other.memory,
            launches=self.launches + other.launches,
            collectives=self.collectives + other.collectives,
        )

    def times(self, count: int) -> Spent:
        """Of so many runs."""
        return Spent(
            products=count * self.products,
            memory=count * self.memory,
            launches=count * self.launches,
            collectives=count * self.collectives,
        )


def spent(text: str, cluster: Cluster, hosts: int, devices_per_host: int) -> Spent:
    """Seconds of one run of a final program, compiled for a mesh of a cluster's devices.

    Raises:
        HloError: the text cannot be read.
    """
    computations, entry = parse_hlo(text)
    reader = HloReader(computations, hosts * devices_per_host)
    return _Roofline(reader, cluster, hosts, devices_per_host).of(entry)


def compiled_step_seconds(program: Program, seconds: Mapping[str, float]) -> float:
    """Seconds of a step if each fragment takes those of its module, by name; transfers take the
    plan's."""
    steps = tuple(
        replace(step, seconds=seconds[module_name(step)]) if isinstance(step, Fragment) else step
        for step in program.steps
    )
    return step_seconds(replace(program, steps=steps))


@dataclass(frozen=True)
class _Roofline:
    reader: HloReader
    cluster: Cluster
    hosts: int
    devices_per_host: int

    def of(self, name: str) -> Spent:
        """The seconds of a computation."""
        computation, total = self.reader.computations[name], Spent()
        for instruction in computation.instructions.values():
            total += self._instruction(computation, instruction)
        return total

    def _instruction(self, computation: Computation, instruction: Instruction) -> Spent:
        opcode = instruction.opcode
        if opcode in _FREE or opcode.endswith(_ENDS):
            return Spent()
        if opcode == "while":
            once = self.of(instruction.attribute("condition"))
            once += self.of(instruction.attribute("body"))
            return once.times(self.reader.trip_count(computation, instruction))
        if opcode == "conditional":
            found = map(self.of, branches(instruction))
            return max(found, key=lambda branch: branch.seconds, default=Spent())
        if opcode in ("call", "async-start"):
            return sum(map(self.of, CALLED.findall(instruction.attributes)), Spent())
        if opcode in KINDS:
            return Spent(collectives=self._collective(instruction))
        kernel = _Kernel(self.reader.computations, computation, instruction)
        return self._kernel(kernel)

    def _kernel(self, kernel: _Kernel) -> Spent:
        device = self.cluster.device
        flops, dtype = kernel.flops
        together = float(device.seconds(flops, kernel.bytes, dtype))
        if together == 0:
            return Spent()
        if together > float(device.seconds(0.0, kernel.bytes, dtype)):
            return Spent(products=together, launches=device.launch)
        return Spent(memory=together, launches=device.launch)

    def _collective(self, instruction: Instruction) -> float:
        kind = KINDS[instruction.opcode]
        if kind == "collective-permute":
            cluster, size = self.cluster, float(instruction.bytes)
            if self.hosts > 1:
                found = message_seconds(cluster.inter_host, cluster.devices_per_host, size)
            else:
                found = message_seconds(cluster.intra_host, 1, size)
            return float(found)
        mesh, axis = self._mesh(instruction)
        if mesh.sizes[axis] == 1:
            return 0.0
        size = float(instruction.bytes)
        if kind == "all-reduce":
            return all_reduce(mesh, axis, size)
        if kind == "reduce-scatter":
            return reduce_scatter(mesh, axis, size * mesh.sizes[axis])
        return (
            all_gather(mesh, axis, size) if kind == "all-gather" else all_to_all(mesh, axis, size)
        )

    def _mesh(self, instruction: Instruction) -> tuple[LogicalMesh, int]:
        """A view of the devices, and the axis of it that the groups lie along."""
        size, devices = self.reader.group_size(instruction), self.reader.devices
        if self.hosts == 1:
            return LogicalMesh.of(self.cluster, 1, size, (size,)), 0
        step = _step(instruction, size)
        shape = (devices // (size * step), size, step)
        return LogicalMesh.of(self.cluster, self.hosts, self.devices_per_host, shape), 1


def _step(instruction: Instruction, size: int) -> int:
    """The distance between the neighbours of a group."""
    rest = instruction.attributes
    if "replica_groups={}" in rest or size == 1:
        return 1
    if match := _LISTED.search(rest):
        group = [int(device) for device in match[1].split(",")]
    elif match := _IOTA.search(rest):
        group = _iota_group(match, size)
    else:
        raise HloError(f"the groups of {instruction.name} cannot be read: {rest}")
    steps = {b - a for a, b in pairwise(group)}
    if len(steps) != 1 or min(steps) < 1:
        raise HloError(f"the groups of {instruction.name} are not evenly spaced: {group}")
    return steps.pop()


def _iota_group(match: re.Match[str], size: int) -> list[int]:
    """The first group of `[groups,size]<=[dims]T(order)`."""
    dims = [int(dim) for dim in match[3].split(",")]
    order = [int(dim) for dim in match[4].split(",")] if match[4] else list(range(len(dims)))
    strides = [prod(dims[k + 1 :]) for k in range(len(dims))]
    group: list[int] = []
    for number in range(size):
        device, rest = 0, number
        for k in reversed(order):
            rest, place = divmod(rest, dims[k])
            device += place * strides[k]
        group.append(device)
    return group


@dataclass(frozen=True)
class _Kernel:
    """An instruction that a device runs by itself."""

    computations: Mapping[str, Computation]
    computation: Computation
    instruction: Instruction

    @cached_property
    def inside(self) -> Computation | None:
        """The computation of a fusion."""
        if self.instruction.opcode != "fusion":
            return None
        return self.computations[self.instruction.attribute("calls")]

    @property
    def flops(self) -> tuple[float, str]:
        """FLOPs of matrix products and convolutions, and the element type of the largest."""
        found = [*self._products(self.computation, self.instruction)]
        largest = max(found, default=(0.0, "f32"))
        return sum(flops for flops, _ in found), largest[1]

    def _products(
        self, computation: Computation, instruction: Instruction
    ) -> Iterator[tuple[float, str]]:
        if instruction.opcode == "fusion":
            inner = self.computations[instruction.attribute("calls")]
            for one in inner.instructions.values():
                yield from self._products(inner, one)
        elif (count := _product_flops(computation, instruction)) > 0:
            yield count, _element_type(computation.instructions[instruction.operands[0]].shape)

    @property
    def bytes(self) -> float:
        """Read from memory and written to it."""
        if self.inside is None:
            return _bytes_alone(self.computation, self.instruction)
        parameters = {
            int(one.operands[0]): name
            for name, one in self.inside.instructions.items()
            if one.opcode == "parameter"
        }
        read = sum(
            _bytes_read(self.inside, parameters[number])
            for number in range(len(self.instruction.operands))
        )
        return read + _bytes_written(self.inside, self.inside.root)


def _product_flops(computation: Computation, instruction: Instruction) -> float:
    """FLOPs of a matrix product or a convolution, 0 for anything else."""
    shapes = [
        computation.instructions[name].shape
        for name in instruction.operands
        if name in computation.instructions
    ]
    target = _TARGET.search(instruction.attributes)
    name = target[1] if target and instruction.opcode == "custom-call" else ""
    if instruction.opcode == "dot" or name.startswith("__cublas$"):
        contracted = _CONTRACTED.search(instruction.attributes)
        if contracted is None:
            raise HloError(f"{instruction.name} does not say what it contracts")
        left = _dims(shapes[0])
        dims = [int(d) for d in contracted[1].replace('"', "").split(",") if d]
        return 2.0 * prod(_dims(instruction.shape)) * prod(left[d] for d in dims)
    kind = _CONVOLUTION.match(name)
    if instruction.opcode != "convolution" and kind is None:
        return 0.0
    labels = _FILTERS.search(instruction.attributes)
    if labels is None:
        raise HloError(f"{instruction.name} has no dim_labels")
    # Of a convolution's input, filter and output, a custom call makes any from the two others.
    output, filters = instruction.shape, shapes[1]
    if name.startswith("__cudnn$convBackwardInput"):
        output = shapes[0]
    elif name.startswith("__cudnn$convBackwardFilter"):
        output, filters = shapes[1], instruction.shape
    sizes = _dims(filters)
    return 2.0 * prod(_dims(output)) * prod(sizes) / sizes[labels[1].index("o")]


def _bytes_alone(computation: Computation, instruction: Instruction) -> float:
    """Bytes of an instruction outside of fusions."""
    operands = [
        computation.instructions[name].bytes
        for name in instruction.operands
        if name in computation.instructions
    ]
    opcode = instruction.opcode
    if opcode in _PARTS:
        return 2.0 * instruction.bytes + sum(operands[1:])
    if opcode in _IN_PLACE:
        return 2.0 * operands[_IN_PLACE[opcode]] + sum(operands[1:])
    if opcode == "copy-start":
        return 2.0 * operands[0]
    written = instruction.bytes
    if opcode == "custom-call" and instruction.shape.startswith("("):
        written -= _workspace(instruction.shape)
    return float(sum(operands) + written)


def _workspace(shape: str) -> int:
    """Bytes of the last array of a tuple, if a library only works in it."""
    dtype, dims = shape_arrays(shape)[-1]
    return prod(dims) if dtype in ("s8", "u8") and len(dims) == 1 else 0


def _bytes_read(inside: Computation, name: str) -> float:
    """Bytes that a fusion reads of a parameter, or of another name of it."""
    whole, read = inside.instructions[name].bytes, 0.0
    for user in inside.users(name):
        if user.opcode in _RENAMES:
            read += _bytes_read(inside, user.name)
        elif user.opcode in _PARTS and user.operands[0] == name:
            read += user.bytes
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
            continue
        elif user.opcode == "scatter" and user.operands[0] == name:
            read += inside.instructions[user.operands[_IN_PLACE["scatter"]]].bytes
        else:
            return float(whole)
    return min(float(whole), read)


def _bytes_written(inside: Computation, name: str) -> float:
    """Bytes that a fusion writes of a result."""
    result = inside.instructions[name]
    if result.opcode == "tuple":
        return sum(_bytes_written(inside, part) for part in result.operands)
    if result.opcode in _RENAMES:
        return _bytes_written(inside, result.operands[0])
    if result.opcode in _IN_PLACE:
        return float(inside.instructions[result.operands[_IN_PLACE[result.opcode]]].bytes)
    return float(shape_bytes(result.shape))


def _dims(shape: str) -> tuple[int, ...]:
    """The dimensions of an array, or of the first one of a tuple."""
    return shape_arrays(shape)[0][1]


def _element_type(shape: str) -> str:
    """The element type of an array, as MLIR and the cluster file name it."""
    dtype = shape_arrays(shape)[0][0]
    return f"i{dtype[1:]}" if re.fullmatch(r"[su]\d+", dtype) else dtype
