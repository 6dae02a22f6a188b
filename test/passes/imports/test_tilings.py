"""GSPMD's shardings and those of Shardy over the mesh that is made of them cut arrays alike."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa.dialects.sharding import Mesh, Sharding
from alpa.passes.imports.tilings import Tiling, mesh_of, sharding_over

SIZES = st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=3)


def parts(sharding: Sharding, mesh: Mesh) -> np.ndarray:
    """[devices, rank]: which part of each dimension a device has."""
    places = np.indices(mesh.sizes).reshape(len(mesh.sizes), -1)
    names = [name for name, _ in mesh.axes]
    found = np.zeros((mesh.size, len(sharding.dims)), int)
    for d, dim in enumerate(sharding.dims):
        for axis in dim:
            found[:, d] = found[:, d] * mesh.axis_size(axis) + places[names.index(axis.name)]
    return found


@st.composite
def tilings(draw: st.DrawFn, sizes: list[int]) -> tuple[str, np.ndarray]:
    """A sharding over a mesh as XLA prints it, and the part of each dimension on each device."""
    order = draw(st.permutations(range(len(sizes))))
    ends = sorted(draw(st.lists(st.integers(0, len(sizes)), min_size=2, max_size=2)))
    dims = [order[: ends[0]], order[ends[0] : ends[1]], order[ends[1] :]]
    tiles = [prod(sizes[axis] for axis in dim) for dim in dims]
    ids = np.arange(prod(sizes)).reshape(sizes).transpose(order)
    expected = np.zeros((prod(sizes), 2), int)
    for place in np.ndindex(*tiles):
        expected[ids.reshape(tiles)[place]] = place[:2]
    shape = ",".join(map(str, tiles))
    if draw(st.booleans()):
        devices = f"<=[{','.join(map(str, sizes))}]T({','.join(map(str, order))})"
    else:
        devices = ",".join(map(str, ids.ravel()))
    return f"{{devices=[{shape}]{devices} last_tile_dim_replicate}}", expected


@given(data=st.data(), sizes=SIZES)
def test_devices_have_the_same_parts(data: st.DataObject, sizes: list[int]) -> None:
    drawn = [data.draw(tilings(sizes)) for _ in range(3)]
    read = [Tiling.parse(text) for text, _ in drawn]
    mesh = mesh_of(read, prod(sizes))
    assert mesh.size == prod(sizes)
    assert len(mesh.axes) <= len(sizes)
    for tiling, (_, expected) in zip(read, drawn, strict=True):
        assert tiling.num_devices == prod(sizes)
        np.testing.assert_array_equal(parts(sharding_over(tiling, 2, "m", mesh), mesh), expected)


def test_replicated_over_a_mesh_of_one_axis() -> None:
    tiling = Tiling.parse("{replicated}")
    mesh = mesh_of([tiling], 6)
    assert mesh.axes == (("axis0", 6),)
    assert sharding_over(tiling, 2, "m", mesh).dims == ((), ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{manual}", "does not cut an array into tiles"),
        ("{devices=[2,2]<=[8]}", "has 8 devices for 4 tiles"),
        ("{devices=[4]0,1,3,2}", "are in an order that no mesh has"),
        ("{devices=[4]1,0,3,2}", "are in an order that no mesh has"),
        ("{devices=[2,2]0,1,1,0}", "are in an order that no mesh has"),
        ("{devices=[2,2]0,0,1,1}", "are in an order that no mesh has"),
    ],
)
def test_other_shardings_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tiling.parse(text)
