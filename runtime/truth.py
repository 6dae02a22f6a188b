"""Reads XLA's result for an exported stage: its collectives, and its bytes per device.

XLA writes its programs to a folder if debug options ask for it. The options apply to one
compilation: nothing is registered in the process, and no module must be recognised by name.

By default, XLA's CPU backend trades memory for concurrency. It runs ops breadth first and merges
all all-reduces, whose operands and results then exist at the same time. On accelerators it does
neither. So this module tells it to save memory, unless `default_schedule` asks for the schedule of
the local executor.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alpa.dialects import ir
from alpa.passes.plan.predicted_collectives import Collective
from alpa.runtime.hlo_collectives import has_16_bit_floats, real_collectives
from alpa.runtime.hlo_text import HloError
from alpa.runtime.pjrt import CompilerOptions, Device, compile_module

_PARTITIONER = "spmd-partitioning"
# Later steps than buffer assignment do not matter here.
_FAST: CompilerOptions = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
_MEMORY_SAVING: CompilerOptions = {
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "xla_disable_hlo_passes": "cpu-all-reduce-combiner",
}


@dataclass(frozen=True, kw_only=True)
class Truth:
    """One compiled stage; bytes are per device."""

    collectives: tuple[Collective, ...]
    arguments: int
    results: int
    aliased: int
    temporaries: int
    has_16_bit_floats: bool

    @property
    def peak(self) -> int:
        """The peak of all live buffers; XLA's own `peak` omits temporaries on CPU."""
        return self.arguments + self.results - self.aliased + self.temporaries


def truth(
    module: ir.Module,
    devices: Sequence[Device],
    *,
    name: str = "main",
    default_schedule: bool = False,
) -> Truth:
    """Compiles a module for a mesh of devices and reads the compiled program.

    Raises:
        jax.errors.JaxRuntimeError: XLA refuses the module.
        HloError: XLA's text cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, str | bool | int | float] = {
            "xla_dump_to": folder,
            "xla_dump_hlo_pass_re": _PARTITIONER,
            **_FAST,
            **({} if default_schedule else _MEMORY_SAVING),
        }
        compiled = compile_module(module, devices, [], name=name, compiler_options=options)
        dumps = sorted(Path(folder).glob(f"*.after_{_PARTITIONER}.*"))
        if len(devices) > 1 and not dumps:
            raise HloError(f"XLA wrote no program of @{name} after partitioning")
        text = dumps[-1].read_text() if dumps else compiled.hlo_text()
    memory = compiled.memory()
    return Truth(
        collectives=real_collectives(text, len(devices)) if dumps else (),
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        has_16_bit_floats=has_16_bit_floats(text),
    )
