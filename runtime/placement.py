"""Places the values of a program: JAX meshes, shardings and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from alpa.passes.plan.data import DeviceMesh, Program, Value
from alpa.runtime.pjrt import Device


def jax_mesh(mesh: DeviceMesh, devices: Mapping[int, Device]) -> Mesh:
    """A mesh over its share of the devices."""
    chosen = np.array([devices[number] for number in mesh.devices], dtype=object)
    abstract = abstract_mesh(mesh)
    return Mesh(
        chosen.reshape(abstract.axis_sizes), abstract.axis_names, axis_types=abstract.axis_types
    )


def abstract_mesh(mesh: DeviceMesh) -> AbstractMesh:
    """A mesh's axes, without devices."""
    sizes = tuple(size for _, size in mesh.axes)
    names = tuple(name for name, _ in mesh.axes)
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The program's meshes on devices, or one of them.

    `devices` are the cluster's in the order of `alpa.meshes`. With `mesh`, they are that mesh's
    own, in its row-major order, and the other meshes are in other processes.
    """

    program: Program
    devices: tuple[Device, ...]
    mesh: str | None = None

    @property
    def platform(self) -> str:
        """The devices' platform: `cpu`, `gpu` or `tpu`."""
        return self.devices[0].platform

    @cached_property
    def device_of(self) -> dict[int, Device]:
        """The devices by their numbers in the cluster."""
        if self.mesh is None:
            return dict(enumerate(self.devices))
        (numbers,) = (it.devices for it in self.program.meshes if it.name == self.mesh)
        return dict(zip(numbers, self.devices, strict=True))

    @cached_property
    def meshes(self) -> dict[str, Mesh]:
        """The jax meshes by name."""
        if self.mesh is not None:
            (here,) = (it for it in self.program.meshes if it.name == self.mesh)
            return {here.name: jax_mesh(here, self.device_of)}
        needed = 1 + max(number for mesh in self.program.meshes for number in mesh.devices)
        if needed > len(self.devices):
            raise ValueError(
                f"the plan needs {needed} devices, and {len(self.devices)} are there. On a CPU, "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={needed} makes virtual ones; "
                "set it before JAX starts"
            )
        used = (self.devices[number] for mesh in self.program.meshes for number in mesh.devices)
        kinds = sorted({device.device_kind for device in used})
        if len(kinds) > 1:
            raise ValueError(
                f"the plan is for equal devices, these are {' and '.join(kinds)}; pass devices "
                "of one kind, and plan for their number"
            )
        return {mesh.name: jax_mesh(mesh, self.device_of) for mesh in self.program.meshes}

    def mesh_devices(self, name: str) -> list[Device]:
        """The devices of a mesh in row-major order."""
        return list(self.meshes[name].devices.flat)

    def has(self, number: int) -> bool:
        """Whether a value's mesh is in this process."""
        return self.program.values[number].mesh in self.meshes

    @cached_property
    def shardings(self) -> dict[int, NamedSharding]:
        """The shardings of the values on the meshes in this process."""
        values = enumerate(self.program.values)
        return {
            i: sharding_of(value, self.meshes[value.mesh])
            for i, value in values
            if value.mesh in self.meshes
        }


def sharding_of(value: Value, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The sharding of a value on its mesh. Raises ValueError for shardings of fragments only."""
    if value.sharding is None:
        return NamedSharding(mesh, PartitionSpec())
    axes = [axis for dim in value.sharding.dims for axis in dim]
    if any(axis.sub for axis in axes) or value.sharding.unreduced:
        raise ValueError(
            f"a value of shape {value.shape} on {value.mesh} is sharded over a part of an axis "
            "or unreduced, which is possible only inside a fragment"
        )
    dims = value.sharding.axis_names
    return NamedSharding(mesh, PartitionSpec(*(dim or None for dim in dims)))


def move(array: Any, sharding: NamedSharding, *, copy: bool = False) -> jax.Array:
    """Puts an array in a sharding, with its own buffers if `copy`; 64-bit values keep their width.

    On a mesh of several processes, each of them calls this with the same array.
    """
    # This check is much faster than `device_put`, which would have nothing to do.
    if not copy and isinstance(array, jax.Array) and array.sharding == sharding:
        return array
    with jax.enable_x64(True):
        if not sharding.is_fully_addressable:
            if not isinstance(array, jax.Array):
                return jax.make_array_from_callback(array.shape, sharding, lambda at: array[at])
            return jax.jit(jnp.copy, out_shardings=sharding)(array)
        # JAX keeps buffers that are already in place. So does device_put(may_alias=False) when it
        # moves an array to other devices, or a numpy array to several (0.10.2).
        if copy and not isinstance(array, jax.Array):
            array = np.array(array)
        moved = jax.device_put(array, sharding)
        return moved.copy() if copy and isinstance(array, jax.Array) else moved


def rows(array: Any, dim: int, start: int, stop: int) -> Any:
    """The rows of an array from `start` to `stop` along a dimension, as a slice.

    Along a dimension that is split over axes of type `Explicit`, JAX slices only into a sharding
    that is given. `jax.make_mesh` makes such axes. So they are taken for axes of type `Auto`. JAX
    refuses this under `jax.set_mesh`, so callers hide that mesh.
    """
    sharding = array.sharding if isinstance(array, jax.Array) else None
    if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
        mesh = cast("Mesh", sharding.mesh)  # that of an array has devices
        automatic = Mesh(
            mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names)
        )
        array = move(array, sharding.update(mesh=automatic))
    return array[(*[slice(None)] * dim, slice(start, stop))]
