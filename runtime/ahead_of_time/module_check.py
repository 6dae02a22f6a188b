"""Predictions for each module of a plan beside what XLA made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from alpa.dialects import body, main_function
from alpa.passes.analysis import op_work
from alpa.passes.cost.presets import has_triton
from alpa.passes.plan.annotated import annotated_fragments
from alpa.passes.plan.attribute import plan_and_any_cluster
from alpa.passes.plan.combined_collectives import predicted_counts
from alpa.passes.plan.predicted_collectives import Collective, predicted_collectives
from alpa.passes.plan.predicted_memory import FragmentMemory, predicted_memory
from alpa.runtime.exported import Exported, module_name
from alpa.runtime.truth import Truth


@dataclass(frozen=True, kw_only=True)
class ModuleCheck:
    """One exported module, predicted and compiled; bytes and FLOPs are per device and run."""

    name: str
    mesh: str
    devices: int
    """of the mesh"""
    collectives: tuple[Collective, ...]
    combined: Counter[str]
    """how many of each kind are left once the compiler has combined them"""
    memory: FragmentMemory
    flops: float
    """of the whole module, split evenly over the devices"""
    bytes_accessed: float
    """by all kernels of the module (`op_work.fused`), split evenly over the devices"""
    real: Truth

    @property
    def payloads(self) -> dict[str, tuple[int, int]]:
        """Predicted and real payload bytes by kind of collective."""
        predicted, real = _payloads(self.collectives), _payloads(self.real.collectives)
        return {kind: (predicted[kind], real[kind]) for kind in sorted({*predicted, *real})}

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """Predicted and real numbers of collectives by kind, combined as the compiler does it.

        On CPU none are: real ones are read before that.
        """
        predicted, real = self.combined, Counter[str]()
        for it in self.real.collectives:
            real[it.kind] += it.count
        return {kind: (predicted[kind], real[kind]) for kind in sorted({*predicted, *real})}

    def to_json(self) -> dict[str, Any]:
        """All numbers, and each collective."""
        return {
            "name": self.name,
            "devices": self.devices,
            "collectives": {
                "predicted": [asdict(it) for it in self.collectives],
                "real": [asdict(it) for it in self.real.collectives],
            },
            "payload_bytes": _both(self.payloads),
            "memory": {"predicted": _memory(self.memory), "real": _memory(self.real)},
            "flops": {"predicted": self.flops, "real": self.real.flops},
            "bytes_accessed": {"predicted": self.bytes_accessed, "real": self.real.bytes_accessed},
            "has_16_bit_floats": self.real.has_16_bit_floats,
        }


def checks(stages: Exported, real: Mapping[str, Truth]) -> list[ModuleCheck]:
    """The modules of an exported program beside XLA's results, which `real` has by name.

    Raises:
        PassError: a sharding does not fit its mesh.
    """
    module, program = stages.module, stages.program
    predictions = zip(
        program.fragments,
        predicted_collectives(module),
        predicted_counts(module),
        predicted_memory(module),
        annotated_fragments(module),
        strict=True,
    )
    meshes = {mesh.name: mesh for mesh in program.meshes}
    _, cluster = plan_and_any_cluster(main_function(module))
    found: list[ModuleCheck] = []
    for fragment, collectives, combined, memory, annotated in predictions:
        mesh = meshes[fragment.mesh]
        converts = has_triton(cluster.of(mesh.hosts).device.name)
        flops, num_bytes, _ = op_work.total(
            op_work.fused(body(annotated.fragment), converts_in_dots=converts)
        )
        devices = len(mesh.devices)
        found.append(
            ModuleCheck(
                name=module_name(fragment),
                mesh=fragment.mesh,
                devices=devices,
                collectives=collectives,
                combined=combined,
                memory=memory,
                flops=flops / devices,
                bytes_accessed=num_bytes / devices,
                real=real[module_name(fragment)],
            )
        )
    return found


def total(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Adds up predicted and real numbers."""
    listed = list(pairs)
    return sum(a for a, _ in listed), sum(b for _, b in listed)


def ratio(predicted: float, real: float) -> float:
    """Predicted over real; 1 if both are 0."""
    if predicted == real:
        return 1.0
    return predicted / real if real else float("inf")


def _payloads(collectives: Sequence[Collective]) -> Counter[str]:
    found: Counter[str] = Counter()
    for it in collectives:
        found[it.kind] += it.payload
    return found


def _both(pairs: Mapping[str, tuple[int, int]]) -> dict[str, dict[str, int]]:
    return {kind: {"predicted": a, "real": b} for kind, (a, b) in pairs.items()}


def _memory(memory: FragmentMemory | Truth) -> dict[str, int]:
    return {
        name: getattr(memory, name)
        for name in ("arguments", "results", "aliased", "temporaries", "peak")
    }
