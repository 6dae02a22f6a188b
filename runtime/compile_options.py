"""The options that XLA compiles stages with on each platform.

`pjrt.compile_module` takes them from here. So a run and `alpa-plan --verify` compile alike, and the
caches of both know the options.
"""

from __future__ import annotations

from collections.abc import Mapping

CompilerOptions = Mapping[str, str | bool | int | float]
"""XLA's debug options by name, as in `jax.jit`."""

PLATFORMS: Mapping[str, CompilerOptions] = {
    "gpu": {
        # Memory is predicted for ops in program order. The scheduler moves collectives ahead of
        # their use and keeps their results for longer: a backward stage of gpt-2.6b needed 1.77 GiB
        # of temporaries, and 0.20 GiB without it.
        "xla_gpu_enable_latency_hiding_scheduler": False,
        # Otherwise each process of a mesh times a part of the kernels and waits for the others. A
        # process that finds its stage in the cache compiles nothing, so the others would wait for
        # ever. Here one process compiles for all of the mesh (`WorkerGroup.load`).
        "xla_gpu_shard_autotuning": False,
    }
}
"""By the platform of devices. These may be XLA's defaults, which change from version to version."""

_FIXED = ("xla_gpu_shard_autotuning",)


def compile_options(platform: str, given: CompilerOptions | None = None) -> CompilerOptions:
    """A platform's options, replaced and extended by those that the user gave.

    Raises:
        ValueError: the user gave another value for an option that Alpa relies on.
    """
    ours, given = PLATFORMS.get(platform, {}), given or {}
    for name in _FIXED:
        if name in ours and given.get(name, ours[name]) != ours[name]:
            raise ValueError(
                f"compiler_options has {name}={given[name]!r}, but only one process of a mesh "
                f"compiles and would wait for the others; remove {name}"
            )
    return {**ours, **given}
