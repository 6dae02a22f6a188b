"""Compiles and runs modules through PJRT. Only this module uses JAX's private names for it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

import jax
import numpy as np
from jax._src import xla_bridge
from jax._src.lib import cuda_versions
from jax.core import ShapedArray
from jax.experimental import topologies
from jax.sharding import Sharding
from jaxlib import _hlo, _jax, lapack  # pyright: ignore[reportAttributeAccessIssue] - no stubs

from alpa.dialects import ir, main_function, walk
from alpa.dialects.symbols import SYMBOL, named_meshes
from alpa.runtime.compile_cache import CompileCache, warn_refused
from alpa.runtime.compile_options import CompilerOptions, compile_options
from alpa.runtime.dtypes import numpy_dtype

_GPU_PACKAGES = ("jax-cuda", "jax-rocm", "nvidia-")
# jaxlib 0.10 checks the shards of results before there are any; 0.12 has no such check.
_UNCHECKED: dict[str, bool] = (
    {"_skip_checks": True} if "_skip_checks" in str(_jax.array_result_handler.__doc__) else {}
)
_DRIVERS = (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version"))


ARRAY: type[jax.Array] = _jax.ArrayImpl
"""The class of JAX's arrays. To ask `jax.Array` itself takes many times as long."""


class Device(Protocol):
    """A JAX device. JAX has no public type for it."""

    @property
    def id(self) -> int: ...

    @property
    def platform(self) -> str: ...

    @property
    def device_kind(self) -> str: ...

    @property
    def client(self) -> Any: ...


def weakly_typed(array: jax.Array) -> jax.Array:
    """The array with a weak type, as JAX gives it to numbers of Python; it has the same buffers."""
    if array.weak_type:
        return array
    maker = _maker_of_weak(array.shape, array.dtype, array.sharding, array.committed)
    return maker(array)


@cache
def _maker_of_weak(
    shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Sharding, committed: bool
) -> Callable[[jax.Array], jax.Array]:
    """Kept, so that all arrays of a type have one `aval`, which `Call.marks` compares."""
    weak = ShapedArray(shape, dtype, weak_type=True)
    return _jax.array_result_handler(weak, sharding, committed=committed, **_UNCHECKED)


def all_devices() -> Sequence[Device]:
    """`jax.devices()`, with a type."""
    return jax.devices()


def gpus_to_compile_for(description: str, hosts: int, devices_per_host: int) -> Sequence[Device]:
    """Devices of a machine that need not exist: modules can be compiled for them, not run.

    `description` is XLA's `GpuTargetConfigProto` in text. JAX's CUDA plugin must be installed.
    """
    return topologies.get_topology_desc(
        "",
        platform="cuda",
        topology=f"1x{hosts}x{devices_per_host}",
        target_config=description,
    ).devices


def lowering_platform(device: Device) -> str:
    """A device's platform in JAX's lowering: `cuda` or `rocm` where devices say `gpu`."""
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def has_started() -> bool:
    """Whether JAX has taken devices in this process."""
    return xla_bridge.backends_are_initialized()


def platform_versions(device: Device) -> Mapping[str, str]:
    """The versions beside jaxlib's that decide what XLA makes of a module for a device."""
    versions = {"runtime": str(device.client.platform_version)}
    if device.platform == "gpu":
        versions |= _gpu_versions(lowering_platform(device))
    return versions


@cache
def _gpu_versions(platform: str) -> Mapping[str, str]:
    """The packages of the plug-in and of CUDA's libraries, the libraries that are loaded, which may
    be the system's, and the driver."""
    versions: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        name = package.name.lower()
        if name.startswith(_GPU_PACKAGES):
            versions.setdefault(name, package.version)  # Python imports the first on its path.
    for file in _DRIVERS:
        if file.exists():
            versions[str(file)] = file.read_text().strip()
    if cuda_versions is not None and platform == "cuda":
        for library in ("cuda_runtime", "cuda_driver", "cudnn", "cublas"):
            try:
                versions[library] = str(getattr(cuda_versions, f"{library}_get_version")())
            except RuntimeError:
                versions[library] = "missing"  # XLA does without it
    return versions


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """An executable for some devices, and how its results become arrays."""

    name: str
    executable: Any
    handlers: tuple[Any, ...]
    """one for each result: PJRT makes the sharded array, without one for each of its shards"""
    read_from: Path | None = None
    """the file that the executable was read from; None if this process or another compiled it"""
    loaded_from: bytes | None = None
    """the serialised executable; None if this process compiled it"""

    def __call__(self, arguments: Sequence[jax.Array]) -> list[jax.Array]:
        """Runs it. The arguments have the module's shardings; donated ones are deleted."""
        return self.executable.execute_sharded(list(arguments)).consume_with_handlers(self.handlers)

    def hlo_text(self) -> str:
        """The program after partitioning and optimisation."""
        return "\n".join(module.to_string() for module in self.executable.hlo_modules())

    def memory(self) -> Any:
        """XLA's memory statistics, in bytes per device."""
        return self.executable.get_compiled_memory_stats()

    def serialised(self) -> bytes:
        """The executable for a file, or for `compile_module` in other processes of its mesh."""
        if self.loaded_from is not None:
            # XLA's CPU backend would write it without its functions.
            return self.loaded_from
        if isinstance(self.executable, _jax.LoadedExecutable):
            return self.executable.client.serialize_executable(self.executable)
        return self.executable.serialize()  # for devices that do not exist

    def bytes_accessed(self) -> float:
        """The bytes that the program reads and writes once it is optimised, on one device."""
        return sum(_costs(module)[1] for module in self.executable.hlo_modules())


def compile_module(
    module: ir.Module,
    devices: Sequence[Device],
    results: Sequence[tuple[tuple[int, ...], Sharding]],
    *,
    name: str = "main",
    compiler_options: CompilerOptions | None = None,
    cache: CompileCache | None = None,
    executable: bytes | None = None,
) -> Compiled:
    """Compiles a module for a mesh of devices, numbered in its row-major order.

    `results` are the global shapes and the shardings of its results; none if it will not run.
    `compiler_options` are XLA's debug options by name, as in `jax.jit`; they are added to those of
    the platform (`runtime/compile_options.py`). An executable that `cache` has is read, not
    compiled; a compiled one is written there. With `executable`, that of another process for the
    same devices, nothing is read or compiled. For devices that do not exist
    (`gpus_to_compile_for`) the result cannot run.

    Raises:
        jax.errors.JaxRuntimeError: XLA refuses the module.
        UnsafeCacheError: other users can write to the cache.
        ValueError: an option is refused.
    """
    chosen = compile_options(devices[0].platform, compiler_options)
    options = _compile_options(devices, chosen)
    client, targets = devices[0].client, _jax.DeviceList(tuple(devices))
    exist = not isinstance(client, _jax.CompileOnlyPyClient)
    _prepare_lapack(module)
    handlers = _handlers(module, results)
    if executable is not None:
        loaded = client.deserialize_executable(executable, targets, options)
        return Compiled(name=name, executable=loaded, handlers=handlers, loaded_from=executable)
    key = None
    if cache is not None:
        versions = platform_versions(devices[0])
        key = cache.key(nameless_text(module), devices, chosen, versions)
        if (found := cache.read(key, name)) is not None:
            try:
                loaded = client.deserialize_executable(found.executable, targets, options)
            except jax.errors.JaxRuntimeError as error:
                warn_refused(found.path, f"XLA cannot load it ({error})")
            else:
                return Compiled(
                    name=name,
                    executable=loaded,
                    handlers=handlers,
                    read_from=found.path,
                    loaded_from=found.executable,
                )
    try:
        with module.context:
            compile_it = client.compile_and_load if exist else client.compile
            loaded = compile_it(module, targets, options)
    except jax.errors.JaxRuntimeError as error:
        error.add_note(f"while compiling @{name} for {len(devices)} devices")
        if "@CustomSPMDPartitioning" in str(module):
            error.add_note(
                "on several devices, its custom_partitioning runs only in the process that lowered "
                "it"
            )
        raise
    compiled = Compiled(name=name, executable=loaded, handlers=handlers)
    if cache is not None and key is not None and cache.directory is not None:
        cache.write(key, compiled.serialised(), [name])
    return compiled


def _handlers(
    module: ir.Module, results: Sequence[tuple[tuple[int, ...], Sharding]]
) -> tuple[Any, ...]:
    """Makers of a module's results, as arrays of these shapes and shardings."""
    if not results:
        return ()
    types = [ir.RankedTensorType(type_) for type_ in main_function(module).type.results]
    dtypes = [numpy_dtype(str(type_.element_type)) for type_ in types]
    return tuple(
        _jax.array_result_handler(ShapedArray(shape, dtype), sharding, committed=True, **_UNCHECKED)
        for (shape, sharding), dtype in zip(results, dtypes, strict=True)
    )


def _compile_options(
    devices: Sequence[Device], compiler_options: CompilerOptions
) -> _jax.CompileOptions:
    """The options of every compilation, whether the devices exist or not."""
    options = _jax.CompileOptions()
    options.num_replicas = 1
    options.num_partitions = len(devices)
    options.device_assignment = _jax.DeviceAssignment.create(
        np.array([[device.id for device in devices]])
    )
    overrides = dict(compiler_options)
    if devices[0].platform == "gpu" and (folder := _cuda_folder()) is not None:
        overrides.setdefault("xla_gpu_cuda_data_dir", folder)
    options.env_option_overrides = list(overrides.items())
    build: Any = options.executable_build_options
    build.num_replicas = 1
    build.num_partitions = len(devices)
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = True
    return options


def _cuda_folder() -> str | None:
    """The folder of the installed package of CUDA's compiler.

    XLA would take the first `ptxas` of the machine, which may be too old for the device.
    """
    if importlib.util.find_spec("nvidia") is None:
        return None
    # The package of CUDA 12, and that of CUDA 13.
    for name in ("nvidia.cuda_nvcc", "nvidia.cu13"):
        found = importlib.util.find_spec(name)
        folders = None if found is None else found.submodule_search_locations
        if folders:
            return folders[0]
    return None


def flops(hlo_text: str) -> float:
    """Floating-point operations of a program in HLO text, loops times their known trip counts."""
    return _costs(_hlo.hlo_module_from_text(hlo_text))[0]


def _costs(hlo_module: Any) -> tuple[float, float]:
    """FLOPs and accessed bytes by XLA's cost analysis, which is the same for all platforms."""
    client = jax.local_devices(backend="cpu")[0].client
    costs: dict[str, float] = _jax.hlo_module_cost_analysis(client, hlo_module)
    return costs.get("flops", 0.0), costs.get("bytes accessed", 0.0)


def _prepare_lapack(module: ir.Module) -> None:
    """Registers LAPACK with jaxlib if a module calls it. JAX does so when it lowers such a call.

    Without registration, the call crashes the process.
    """
    for op in walk(module.body):
        target = op.attributes.get("call_target_name")
        if target is not None and ir.StringAttr(target).value.startswith("lapack_"):
            lapack.prepare_lapack_call("getrf_ffi", np.float32)
            return


def nameless_text(module: ir.Module) -> str:
    """A module's text without locations, and without its own name and those of its meshes.

    Modules that differ in nothing else are compiled to the same code.
    """
    names = {name: f"@mesh_{number}" for number, name in enumerate(named_meshes(module))}
    attributes = module.operation.attributes
    if "sym_name" in attributes:
        names[ir.StringAttr(attributes["sym_name"]).value] = "@module"

    def renamed(symbol: re.Match[str]) -> str:
        return names.get(symbol[1] or symbol[2], symbol[0])

    text = cast(str, module.operation.get_asm(enable_debug_info=False))
    return SYMBOL.sub(renamed, text)
