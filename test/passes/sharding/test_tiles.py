from __future__ import annotations

from itertools import permutations, product
from math import prod

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa.passes.sharding.tiles import TiledMesh, Traffic, traffic

SIZES = st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (1, 3), (2, 3), (2, 2, 2)])


@st.composite
def meshes(draw: st.DrawFn, rank: int, first: int = 0, per_host: int = 2) -> TiledMesh:
    """A mesh of devices from `first` on; its axes lie on dimensions in any order."""
    sizes = draw(SIZES)
    dims: list[tuple[int, ...]] = [()] * rank
    for axis in draw(st.permutations(range(len(sizes)))):
        dim = draw(st.sampled_from([None, *range(rank)]))
        if dim is not None:
            dims[dim] = (*dims[dim], axis)
    devices = tuple(range(first, first + prod(sizes)))
    return TiledMesh(devices=devices, devices_per_host=per_host, sizes=sizes, dims=tuple(dims))


def held_by(mesh: TiledMesh, shape: tuple[int, ...]) -> dict[int, np.ndarray]:
    """Which elements each device holds."""
    held = {}
    for device, box in mesh.tiles(shape).items():
        held[device] = np.zeros(shape, dtype=bool)
        held[device][tuple(slice(*bounds) for bounds in box)] = True
    return held


def simulate(
    source: TiledMesh, target: TiledMesh, shape: tuple[int, ...], itemsize: int
) -> tuple[Traffic, np.ndarray]:
    """Moves single elements; also how often each one entered the host that it entered most."""
    at: dict[int, np.ndarray] = {}
    for device, mask in held_by(source, shape).items():
        host = source.host(device)
        at[host] = at.get(host, np.zeros(shape, dtype=bool)) | mask
    slow = fast = 0
    entered: dict[int, np.ndarray] = {}
    for device, mask in held_by(target, shape).items():
        host = target.host(device)
        there = at.setdefault(host, np.zeros(shape, dtype=bool))
        new = mask & ~there
        slow += int(new.sum()) * itemsize
        fast += int((mask & there).sum()) * itemsize
        entered[host] = entered.get(host, np.zeros(shape, dtype=int)) + new
        there |= mask
    most = np.max([*entered.values()], axis=0)
    return Traffic(slow_bytes=slow, fast_bytes=fast), most


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_traffic_equals_a_simulation_of_single_elements(data):
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 8]), max_size=3)))
    per_host = data.draw(st.sampled_from([1, 2, 3, 4]))
    source = data.draw(meshes(len(shape), 0, per_host))
    target = data.draw(meshes(len(shape), len(source.devices), per_host))
    expected, most = simulate(source, target, shape, 4)
    assert traffic(source, target, shape, 4) == expected
    assert np.max(most, initial=0) <= 1


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_slow_bytes_are_what_the_hosts_lack(data):
    """No plan can do with less; every destination device gets its tile, no more."""
    shape = tuple(data.draw(st.lists(st.sampled_from([2, 4, 6, 8]), min_size=1, max_size=2)))
    source = data.draw(meshes(len(shape), 0))
    target = data.draw(meshes(len(shape), len(source.devices)))
    here, there = held_by(source, shape), held_by(target, shape)
    lacking = 0
    for host in {target.host(d) for d in there}:
        wanted = np.any([m for d, m in there.items() if target.host(d) == host], axis=0)
        at_home = [m for d, m in here.items() if source.host(d) == host]
        lacking += int((wanted & ~np.any([np.zeros(shape, bool), *at_home], axis=0)).sum())
    moved = traffic(source, target, shape, 2)
    assert moved.slow_bytes == 2 * lacking
    assert moved.slow_bytes + moved.fast_bytes == 2 * sum(int(m.sum()) for m in there.values())


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_tiles_cover_the_tensor(data):
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 5, 8]), max_size=3)))
    mesh = data.draw(meshes(len(shape)))
    count = np.sum([*held_by(mesh, shape).values()], axis=0)
    used = {axis for axes in mesh.dims for axis in axes}
    copies = prod(size for axis, size in enumerate(mesh.sizes) if axis not in used)
    assert (count == copies).all()
    assert mesh.has_replicas == (copies > 1)


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (2, 2, 2)])
def test_tiles_are_those_of_jax(sizes):
    names = ("a", "b", "c")[: len(sizes)]
    devices = jax.devices()[: prod(sizes)]
    jax_mesh = Mesh(np.array(devices).reshape(sizes), names)
    shape = (8, 16)
    for axes in permutations(range(len(sizes))):
        for on in product([None, 0, 1], repeat=len(sizes)):
            pairs = list(zip(axes, on, strict=True))
            dims = tuple(tuple(a for a, d in pairs if d == dim) for dim in range(2))
            mesh = TiledMesh(
                devices=tuple(range(len(devices))), devices_per_host=2, sizes=sizes, dims=dims
            )
            spec = PartitionSpec(*(tuple(names[a] for a in dim) for dim in dims))
            index = NamedSharding(jax_mesh, spec).devices_indices_map(shape)
            expected = {
                number: tuple(s.indices(n)[:2] for s, n in zip(index[device], shape, strict=True))
                for number, device in enumerate(devices)
            }
            assert mesh.tiles(shape) == expected


def mesh_of(first: int, dims: tuple[tuple[int, ...], ...], per_host: int = 2) -> TiledMesh:
    return TiledMesh(
        devices=tuple(range(first, first + 4)), devices_per_host=per_host, sizes=(2, 2), dims=dims
    )


@pytest.mark.parametrize(
    ("source", "target", "slow", "fast"),
    [
        # Each device its own quarter, from another host.
        (((0, 1),), ((0, 1),), 32, 0),
        # Both devices of a host want the same half: it enters once.
        (((0, 1),), ((0,),), 32, 32),
        # Each host wants everything, once; three more copies go inside the hosts.
        (((),), ((),), 64, 64),
        # The halves lie across the hosts: each host gets both, one per device.
        (((0,),), ((1,),), 64, 0),
    ],
)
def test_two_hosts_to_two_others(source, target, slow, fast):
    assert traffic(mesh_of(0, source), mesh_of(4, target), (8,), 4) == Traffic(
        slow_bytes=slow, fast_bytes=fast
    )


def test_inside_one_host_nothing_is_slow():
    moved = traffic(mesh_of(0, ((0,),), 8), mesh_of(4, ((0, 1),), 8), (8,), 4)
    assert moved == Traffic(slow_bytes=0, fast_bytes=32)


def test_a_host_that_two_meshes_share_keeps_its_part():
    # Devices 0-2 and 3-5 with three per host would not touch; with four per host, device 3 is at
    # home with the source.
    source = TiledMesh(devices=(0, 1, 2), devices_per_host=4, sizes=(3,), dims=((0,),))
    target = TiledMesh(devices=(3, 4, 5), devices_per_host=4, sizes=(3,), dims=((0,),))
    assert traffic(source, target, (9,), 1) == Traffic(slow_bytes=6, fast_bytes=3)


def test_uneven_tiles_are_padded_at_the_end():
    mesh = TiledMesh(devices=(0, 1, 2, 3), devices_per_host=4, sizes=(4,), dims=((0,),))
    assert [*mesh.tiles((5,)).values()] == [((0, 2),), ((2, 4),), ((4, 5),), ((5, 5),)]
