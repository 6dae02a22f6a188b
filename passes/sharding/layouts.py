"""Shardings, which name mesh axes, as layouts, which number them, and back."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from alpa.dialects import ir
from alpa.dialects.sharding import AxisRef, Sharding
from alpa.passes.base import PassError
from alpa.passes.cost.collectives import LogicalMesh
from alpa.passes.cost.reshard import Layout
from alpa.passes.sharding.sums import unreduced_axes


def layout_of(op: ir.OpView, sharding: Sharding, mesh: LogicalMesh) -> Layout:
    """A sharding by numbers of axes; `op` is where an error points to.

    Raises:
        PassError: it uses an axis that the mesh does not have, or a part of one.
    """
    numbers = {name: axis for axis, name in enumerate(mesh.axis_names)}
    dims = (*sharding.dims, *((sharding.unreduced,) if sharding.unreduced else ()))
    for axis in (axis for dim in dims for axis in dim):
        if axis.name not in numbers or axis.sub is not None:
            part = "" if axis.sub is None else "a part of "
            raise PassError(
                op,
                f"a sharding over {part}axis {axis.name} on @{sharding.mesh}, which has the "
                f"axes {', '.join(mesh.axis_names)} to be used whole",
            )
    return tuple(tuple(numbers[axis.name] for axis in dim) for dim in dims)


@lru_cache(maxsize=4096)
def sharding_of(mesh: str, names: tuple[str, ...], layout: Layout, rank: int) -> Sharding:
    """The layout of a tensor of this rank as a sharding of a mesh whose axes have these names."""
    dims = tuple(tuple(names[a] for a in axes) for axes in layout[:rank])
    unreduced = tuple(AxisRef(names[axis]) for axis in unreduced_axes(layout, rank))
    return replace(Sharding.of(mesh, dims), unreduced=unreduced)
