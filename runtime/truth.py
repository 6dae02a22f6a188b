"""Reads XLA's result for an exported stage: its collectives, FLOPs, and bytes per device.

XLA writes its programs to a folder if debug options ask for it. The options apply to one
compilation: nothing is registered in the process, and no module must be recognised by name.

On CPU, collectives are read directly after partitioning, because the CPU backend merges and
rewrites them as no accelerator does. On other platforms they are read from the final program.
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
from alpa.runtime.pjrt import Compiled, CompilerOptions, Device, compile_module, flops

_PARTITIONER = "spmd-partitioning"
FAST: CompilerOptions = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""Later steps than buffer assignment change neither collectives nor memory."""
SAVING_MEMORY: CompilerOptions = {
    **FAST,
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "xla_disable_hlo_passes": "cpu-all-reduce-combiner",
}
"""By default, XLA's CPU backend trades memory for concurrency: it runs ops breadth first and merges
all all-reduces, whose operands and results then exist at the same time. Accelerators do neither."""


@dataclass(frozen=True, kw_only=True)
class Truth:
    """One compiled stage; bytes are per device."""

    collectives: tuple[Collective, ...]
    arguments: int
    results: int
    aliased: int
    temporaries: int
    flops: float
    """of one run, as partitioned"""
    bytes_accessed: float
    """of one run, as optimised"""
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
    compiler_options: CompilerOptions = SAVING_MEMORY,
) -> Truth:
    """Compiles a module for a mesh of devices and reads the compiled program.

    Raises: as `compiled_and_truth`.
    """
    return compiled_and_truth(module, devices, name=name, compiler_options=compiler_options)[1]


def compiled_and_truth(
    module: ir.Module,
    devices: Sequence[Device],
    *,
    name: str = "main",
    compiler_options: CompilerOptions,
) -> tuple[Compiled, Truth]:
    """Compiles a module for a mesh of devices; returns the executable and what was read of it.

    Raises:
        jax.errors.JaxRuntimeError: XLA refuses the module.
        HloError: XLA's text cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, str | bool | int | float] = {
            "xla_dump_to": folder,
            "xla_dump_hlo_pass_re": _PARTITIONER,
            **compiler_options,
        }
        compiled = compile_module(module, devices, [], name=name, compiler_options=options)
        written = Path(folder)
        dumps = sorted(written.glob(f"*.after_{_PARTITIONER}.*"))
        if len(devices) > 1 and not dumps:
            raise HloError(f"XLA wrote no program of @{name} after partitioning")
        dumps = dumps or sorted(written.glob("*before_optimizations.txt"))
        partitioned, final = dumps[-1].read_text(), compiled.hlo_text()
    memory = compiled.memory()
    read = partitioned if devices[0].platform == "cpu" else final
    found = Truth(
        collectives=real_collectives(read, len(devices)) if len(devices) > 1 else (),
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        flops=flops(partitioned),
        bytes_accessed=compiled.bytes_accessed(),
        has_16_bit_floats=has_16_bit_floats(partitioned),
    )
    return compiled, found
