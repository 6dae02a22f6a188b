"""Where the values of a program live: jax meshes, shardings and dtypes for those of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from alpa.passes.analysis.planned import DeviceMesh, Program, Value
from alpa.runtime.pjrt import Device

_DTYPES: dict[str, Any] = {
    "i1": np.bool_,
    "bf16": jnp.bfloat16,
    "f8E4M3FN": jnp.float8_e4m3fn,
    "f8E5M2": jnp.float8_e5m2,
    "f8E4M3B11FNUZ": jnp.float8_e4m3b11fnuz,
    "f8E4M3FNUZ": jnp.float8_e4m3fnuz,
    "f8E5M2FNUZ": jnp.float8_e5m2fnuz,
    "i4": jnp.int4,
    "ui4": jnp.uint4,
    "complex<f32>": np.complex64,
    "complex<f64>": np.complex128,
    **{f"f{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    **{f"i{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"ui{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
}


def numpy_dtype(element_type: str) -> np.dtype[Any]:
    """The numpy dtype of an MLIR element type; ValueError where there is none."""
    if element_type not in _DTYPES:
        raise ValueError(f"arrays of element type {element_type} are not supported")
    return np.dtype(_DTYPES[element_type])


def jax_mesh(mesh: DeviceMesh, devices: Sequence[Device]) -> Mesh:
    """A mesh over its share of the devices."""
    chosen = np.array([devices[number] for number in mesh.devices], dtype=object)
    sizes = tuple(size for _, size in mesh.axes)
    names = tuple(name for name, _ in mesh.axes)
    return Mesh(chosen.reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The program's meshes on devices."""

    program: Program
    devices: tuple[Device, ...]

    @cached_property
    def meshes(self) -> dict[str, Mesh]:
        needed = 1 + max(number for mesh in self.program.meshes for number in mesh.devices)
        if needed > len(self.devices):
            raise ValueError(
                f"the plan needs {needed} devices and {len(self.devices)} are there. On a CPU, "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={needed} makes virtual ones; "
                "set it before jax starts"
            )
        used = (self.devices[number] for mesh in self.program.meshes for number in mesh.devices)
        kinds = sorted({device.device_kind for device in used})
        if len(kinds) > 1:
            raise ValueError(
                f"the plan is for equal devices, these are {' and '.join(kinds)}; give the devices "
                "of one kind, and plan for as many"
            )
        return {mesh.name: jax_mesh(mesh, self.devices) for mesh in self.program.meshes}

    def mesh_devices(self, name: str) -> list[Device]:
        """The devices of a mesh in row-major order."""
        return list(self.meshes[name].devices.flat)

    @cached_property
    def shardings(self) -> tuple[NamedSharding, ...]:
        """The sharding of each value."""
        return tuple(self._sharding(value) for value in self.program.values)

    def _sharding(self, value: Value) -> NamedSharding:
        mesh = self.meshes[value.mesh]
        if value.sharding is None:
            return NamedSharding(mesh, PartitionSpec())
        axes = [axis for dim in value.sharding.dims for axis in dim]
        if any(axis.sub for axis in axes) or value.sharding.unreduced:
            raise ValueError(
                f"a value of shape {value.shape} on {value.mesh} is sharded over a part of an axis "
                "or unreduced, which holds inside a fragment only"
            )
        dims = value.sharding.axis_names
        return NamedSharding(mesh, PartitionSpec(*(dim or None for dim in dims)))


def move(array: Any, sharding: NamedSharding, *, copy: bool = False) -> jax.Array:
    """An array in a sharding, with its own buffers if `copy`; 64-bit values keep their width."""
    with jax.enable_x64(True):
        return jax.device_put(array, sharding, may_alias=False if copy else None)
