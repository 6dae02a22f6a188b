from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from math import ceil, prod

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.collectives import LogicalMesh, all_gather
from alpa.passes.cost.device import Link, Transfer
from alpa.passes.cost.reshard import enumerate_layouts
from alpa.passes.solve.errors import VerificationError
from alpa.passes.solve.transfers.cross_mesh import (
    Problem,
    Solution,
    Traffic,
    candidates,
    lower_bound,
    of_method,
    solve,
    verify,
)
from alpa.passes.solve.transfers.messages import Message, Messages
from alpa.passes.solve.transfers.senders import Demands, balance
from alpa.passes.solve.transfers.tiles import TiledMesh, as_on

SLOW = Link(bandwidth=1e9, latency=20e-6)
FAST = Link(bandwidth=100e9, latency=5e-6)
SIZES = st.sampled_from(
    [(1,), (2,), (3,), (4,), (8,), (2, 2), (1, 3), (2, 3), (4, 2), (2, 4), (2, 2, 2)]
)


@st.composite
def meshes(draw: st.DrawFn, rank: int, first: int, per_host: int) -> TiledMesh:
    """Devices from `first` on, in some order; axes split dimensions in any order."""
    sizes = draw(SIZES)
    dims: list[tuple[int, ...]] = [()] * rank
    for axis in draw(st.permutations(range(len(sizes)))):
        dim = draw(st.sampled_from([None, *range(rank)]))
        if dim is not None:
            dims[dim] = (*dims[dim], axis)
    devices = tuple(range(first, first + prod(sizes)))
    if draw(st.booleans()):
        devices = tuple(draw(st.permutations(devices)))
    hosts = tuple(device // per_host for device in devices)
    return TiledMesh(devices=devices, hosts=hosts, sizes=sizes, dims=tuple(dims))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """1 to 8 devices on 1 to 4 hosts on either side, apart, on common hosts or overlapping."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 12]), max_size=3)))
    per_host = draw(st.sampled_from([2, 3, 4, 8]))
    source = draw(meshes(len(shape), 0, per_host))
    after = len(source.devices)
    first = draw(st.sampled_from([after, after, after, after // 2, 8 * per_host]))
    target = draw(meshes(len(shape), first, per_host))
    landing = as_on(source, target)
    stays = landing not in (None, target.dims) and elements_of_hosts(
        replace(target, dims=landing), shape
    ) == elements_of_hosts(target, shape)
    return Problem(
        shape=shape,
        itemsize=draw(st.sampled_from([1, 2, 4])),
        source=source,
        target=target,
        landings=((landing, draw(st.floats(0, 1e-4))),) if stays else (),
        slow=draw(st.sampled_from([SLOW, replace(SLOW, latency=0.0)])),
        fast=draw(st.sampled_from([FAST, replace(FAST, latency=0.0)])),
        readers=draw(st.integers(0, 2)),
    )


def shards(mesh: TiledMesh, shape: tuple[int, ...]) -> dict[int, np.ndarray]:
    """The numbers of the elements that each device holds: pads, splits evenly, drops the padding.

    It uses no boxes and applies the axes one by one.
    """
    held = {}
    elements = np.arange(prod(shape)).reshape(shape)
    ways = [prod(mesh.sizes[a] for a in axes) for axes in mesh.dims]
    pads = [(0, ceil(n / w) * w - n) for n, w in zip(shape, ways, strict=True)]
    padded = np.pad(elements, pads, constant_values=-1) if shape else elements
    for device, at in zip(
        mesh.devices, product(*(range(size) for size in mesh.sizes)), strict=True
    ):
        part = padded
        for dim, axes in enumerate(mesh.dims):
            for axis in axes:
                part = np.split(part, mesh.sizes[axis], axis=dim)[at[axis]]
        held[device] = part[part >= 0]
    return held


def elements_of_hosts(mesh: TiledMesh, shape: tuple[int, ...]) -> dict[int, set[int]]:
    """The numbers of the elements that the devices of each host hold together."""
    held: dict[int, set[int]] = {}
    for host, part in zip(mesh.hosts, shards(mesh, shape).values(), strict=True):
        held.setdefault(host, set()).update(part.tolist())
    return held


def execute(problem: Problem, solution: Solution) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """Sends values, and gathers.

    Returns the values that each device then has, and how often an element entered the host that it
    entered most often by a transfer.
    """
    count = prod(problem.shape)
    values = np.random.default_rng(0).normal(size=problem.shape)
    numbers = np.arange(count).reshape(problem.shape)
    has: dict[int, np.ndarray] = {}
    for device, held in shards(problem.source, problem.shape).items():
        has[device] = np.full(count, np.nan)
        has[device][held] = values.ravel()[held]
    got = {device: np.full(count, np.nan) for device in problem.target.devices}
    entered = {host: np.zeros(count, dtype=int) for host in problem.target.hosts}
    for number, step in enumerate(solution.steps):
        before = has if number == 0 else {device: data.copy() for device, data in got.items()}
        for transfer in step:
            box = numbers[tuple(slice(*bounds) for bounds in transfer.box)].ravel()
            sent = before[transfer.source][box]
            assert not np.isnan(sent).any()
            assert np.isnan(got[transfer.target][box]).all()
            got[transfer.target][box] = sent
            if problem.hosts[transfer.source] != problem.hosts[transfer.target]:
                entered[problem.hosts[transfer.target]][box] += 1
    landed = shards(replace(problem.target, dims=solution.landing), problem.shape)
    for device, elements in landed.items():
        assert np.flatnonzero(~np.isnan(got[device])).tolist() == sorted(elements.tolist())
    gathered = {}
    for device, elements in shards(problem.target, problem.shape).items():
        gathered[device] = np.full(count, np.nan)
        for other, theirs in landed.items():
            mine = np.isin(theirs, elements)
            if mine.all() or solution.method == "local_reshard":
                gathered[device][theirs[mine]] = got[other][theirs[mine]]
        np.testing.assert_array_equal(gathered[device][elements], values.ravel()[elements])
        assert np.isnan(np.delete(gathered[device], elements)).all()
    most = np.max([*entered.values()], axis=0)
    return gathered, most


def said(solution: Solution) -> tuple[object, ...]:
    """All that a solution says."""
    steps = [[*step] for step in solution.steps]
    return solution.method, solution.landing, steps, solution.transfers, solution.gathers


def together(messages: Sequence[Message]) -> Messages:
    """At least one message."""
    return Messages(
        sources=np.array([it.source for it in messages]),
        targets=np.array([it.target for it in messages]),
        boxes=np.array([it.box for it in messages]),
    )


def lacking(problem: Problem) -> int:
    """Bytes that destination hosts need and lack, element by element."""
    here = shards(problem.source, problem.shape)
    there = shards(problem.target, problem.shape)
    total = 0
    for host in set(problem.target.hosts):
        wanted = {e for d, part in there.items() if problem.hosts[d] == host for e in part.tolist()}
        held = {e for d, part in here.items() if problem.hosts[d] == host for e in part.tolist()}
        total += len(wanted - held)
    return total * problem.itemsize


@settings(max_examples=80, deadline=None)
@given(problem=problems())
def test_every_method_gives_each_device_what_it_wants(problem):
    for method, landing in candidates(problem):
        solution = of_method(problem, method, landing)
        execute(problem, solution)
        assert solution.total.slow_bytes >= lower_bound(problem)
        if method in ("local_all_gather", "local_reshard"):
            assert landing != problem.target.dims


@settings(max_examples=80, deadline=None)
@given(problem=problems())
def test_slow_links_carry_what_the_hosts_lack_and_no_more(problem):
    solution = solve(problem)
    least = lacking(problem)
    assert lower_bound(problem) == least
    assert solution.total.slow_bytes == least
    broadcast = of_method(problem, "broadcast", problem.target.dims)
    assert broadcast.transfers.slow_bytes == least
    for each in (solution, broadcast):
        _, most = execute(problem, each)
        assert np.max(most, initial=0) <= 1


@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_the_cheapest_of_least_slow_bytes_is_taken(problem):
    all_ = [of_method(problem, method, landing) for method, landing in candidates(problem)]
    best = solve(problem)
    least = min(s.total.seconds for s in all_ if s.total.slow_bytes == lower_bound(problem))
    assert best.total.seconds == least
    assert said(solve(problem)) == said(best)
    if problem.readers == 0:
        assert best.landing == problem.target.dims


@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_each_device_receives_its_tile_over_links_or_has_it(problem):
    solution = of_method(problem, "send_recv", problem.target.dims)
    size = problem.itemsize * sum(
        len(part) for part in shards(problem.target, problem.shape).values()
    )
    kept = sum(
        int(problem.bytes_of(step.boxes[step.sources == step.targets]).sum())
        for step in solution.steps
    )
    moved = solution.transfers
    assert moved.slow_bytes + moved.fast_bytes + kept == size
    for transfer in solution.steps[0] if solution.steps else ():
        # A sender on the same host is taken wherever there is one.
        if problem.hosts[transfer.source] != problem.hosts[transfer.target]:
            for device, box in problem.source.tiles(problem.shape).items():
                near = problem.hosts[device] == problem.hosts[transfer.target]
                assert not (near and box == problem.source.tiles(problem.shape)[transfer.source])


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
            mesh = mesh_of(0, dims, sizes=sizes)
            spec = PartitionSpec(*(tuple(names[a] for a in dim) for dim in dims))
            index = NamedSharding(jax_mesh, spec).devices_indices_map(shape)
            expected = {
                number: tuple(s.indices(n)[:2] for s, n in zip(index[device], shape, strict=True))
                for number, device in enumerate(devices)
            }
            assert mesh.tiles(shape) == expected


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_layout_with_the_tiles_of_another_mesh(data):
    source, target = (data.draw(meshes(2, first, 4)) for first in (0, 8))
    found, ways = as_on(source, target), source.ways
    every = enumerate_layouts(len(target.sizes), 2, any_order=True)
    alike = [dims for dims in every if replace(target, dims=dims).ways == ways]
    if found is None:
        assert not alike
    else:
        assert replace(target, dims=found).ways == ways
        if source.sizes == target.sizes:
            assert found == source.dims


@pytest.mark.parametrize(
    ("axes", "crosses"), [((0,), True), ((1,), False), ((2,), False), ((1, 2), False), ((), False)]
)
def test_axes_that_cross_hosts(axes, crosses):
    mesh = mesh_of(0, (), per_host=4, sizes=(2, 2, 2))
    assert mesh.crosses_hosts(axes) == crosses


def test_uneven_tiles_are_padded_at_the_end():
    mesh = mesh_of(0, ((0,),), sizes=(4,))
    assert [*mesh.tiles((5,)).values()] == [((0, 2),), ((2, 4),), ((4, 5),), ((5, 5),)]


def mesh_of(
    first: int,
    dims: tuple[tuple[int, ...], ...],
    per_host: int = 2,
    sizes: tuple[int, ...] = (2, 2),
) -> TiledMesh:
    devices = tuple(range(first, first + prod(sizes)))
    hosts = tuple(device // per_host for device in devices)
    return TiledMesh(devices=devices, hosts=hosts, sizes=sizes, dims=dims)


def problem_of(
    shape: tuple[int, ...], source: TiledMesh, target: TiledMesh, readers: int = 1
) -> Problem:
    return Problem(
        shape=shape,
        itemsize=4,
        source=source,
        target=target,
        slow=SLOW,
        fast=FAST,
        readers=readers,
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
def test_a_broadcast_between_two_hosts_and_two_others(source, target, slow, fast):
    problem = problem_of((8,), mesh_of(0, source), mesh_of(4, target))
    moved = of_method(problem, "broadcast", target).transfers
    assert (moved.slow_bytes, moved.fast_bytes) == (slow, fast)


def test_transfers_reach_what_their_links_say():
    here, there = (mesh_of(first, ((0, 1),), per_host=8) for first in (0, 4))
    problem = problem_of((MIB,), here, there)
    link = of_method(problem, "send_recv", ((0, 1),)).transfers
    slower = replace(FAST, transfer=Transfer(bandwidth=3e9, latency=1e-4))
    through_host = of_method(replace(problem, fast=slower), "send_recv", ((0, 1),)).transfers
    assert through_host.fast_bytes == link.fast_bytes
    assert link.seconds == pytest.approx(5e-6 + MIB / 100e9)
    assert through_host.seconds == pytest.approx(1e-4 + MIB / 3e9)


def test_a_host_that_two_meshes_share_keeps_its_part():
    source = mesh_of(0, ((0,),), per_host=4, sizes=(3,))
    target = mesh_of(3, ((0,),), per_host=4, sizes=(3,))
    solution = solve(problem_of((9,), source, target))
    assert (solution.method, solution.total.slow_bytes) == ("send_recv", 24)
    assert solution.transfers.fast_bytes == 12


@pytest.mark.parametrize("dims", [((0,), (1,)), ((1, 0), ()), ((), (0,)), ((), ())])
@pytest.mark.parametrize("per_host", [1, 2, 4])
def test_equal_meshes_are_point_to_point(dims, per_host):
    problem = problem_of((8, 8), mesh_of(0, dims, per_host), mesh_of(4, dims, per_host))
    solution = of_method(problem, "send_recv", dims)
    (step,) = solution.steps
    pairs = [(t.source, t.target) for t in step]
    if dims == ((), ()):  # All hold all: each sends to one.
        assert sorted(source for source, _ in pairs) == [0, 1, 2, 3]
    else:
        assert pairs == [(d, d + 4) for d in range(4)]
    if not problem.target.free_axes or per_host == 1:
        assert said(solve(problem)) == said(solution)


def test_a_tile_of_several_sources_is_sent_once():
    # Four sources hold everything, the paper's original sends from each of them.
    problem = problem_of((64,), mesh_of(0, ((),)), mesh_of(4, ((0, 1),)))
    solution = solve(problem)
    assert solution.method == "send_recv"
    assert solution.total.slow_bytes == 4 * 64
    assert sorted(t.source for t in solution.steps[0]) == [0, 1, 2, 3]


MIB = 2**20


def test_replicas_inside_hosts_are_gathered_there():
    # Each of two hosts wants 4 MiB for its two devices. Over all four devices the gather itself
    # would cross: 4 MiB + 2 of 6 MiB.
    problem = problem_of((MIB,), mesh_of(0, ((0, 1),)), mesh_of(4, ((),)))
    solution = solve(problem)
    assert (solution.method, solution.landing) == ("local_all_gather", ((1,),))
    assert solution.transfers.slow_bytes == 8 * MIB
    assert solution.gathers.slow_bytes == 0
    assert solution.gathers.fast_bytes == 8 * MIB
    whole = of_method(problem, "local_all_gather", ((0, 1),))
    assert whole.transfers.slow_bytes == 4 * MIB
    assert whole.gathers.slow_bytes == 6 * MIB
    assert whole.gathers.fast_bytes == 6 * MIB


def test_gathers_of_two_dimensions_are_counted_in_the_worst_order():
    # Across the hosts first, 4 devices would exchange quarters; last, they exchange halves.
    problem = problem_of((8, MIB), mesh_of(0, ((0,), (1,))), mesh_of(4, ((), ())))
    gathers = of_method(problem, "local_all_gather", ((0,), (1,))).gathers
    quarter = 8 * MIB
    assert (gathers.slow_bytes, gathers.fast_bytes) == (8 * quarter, 4 * quarter)
    across = 20e-6 + 2 * 2 * quarter / 1e9
    assert gathers.seconds == pytest.approx(5e-6 + quarter / 100e9 + across)


def test_replicas_take_what_is_near_and_keep_what_they_have():
    # Devices 1 to 4, of which 1 and 2 are the source's, want what 0 to 3 hold; 2 and 3 are on a
    # host, as are 0 and 1.
    problem = problem_of((8,), mesh_of(0, ((0, 1),)), mesh_of(1, ((),), sizes=(4,)))
    solution = of_method(problem, "broadcast", ((),))
    received, passed_on = solution.steps
    boxes = [((2 * k, 2 * k + 2),) for k in range(4)]
    assert {(t.source, t.target, t.box) for t in received} == {
        *((k, 1, boxes[k]) for k in range(4)),
        *((k, 2, boxes[k]) for k in range(4)),
        *((k, 3, boxes[k]) for k in (2, 3)),
        *((k, 4, boxes[k]) for k in range(4)),
    }
    assert [(t.source, t.target, t.box) for t in passed_on] == [(2, 3, boxes[k]) for k in (0, 1)]
    # Of 8 bytes each: 2 pieces enter the first host, 2 the second, 4 the third. Device 1 takes one
    # from device 0; 2 and 3 take one from each other and 3 two more from 2.
    assert solution.transfers.slow_bytes == 8 * 8
    assert solution.transfers.fast_bytes == 8 * 5


def test_a_device_of_both_meshes_sends_itself_nothing():
    source, target = mesh_of(0, ((),), 4), mesh_of(0, ((0,),), 4)
    problem = problem_of((8,), source, replace(target, devices=(3, 2, 1, 0)))
    solution = solve(problem)
    assert solution.total == Traffic()
    assert [(t.source, t.target) for t in solution.steps[0]] == [(d, d) for d in (3, 2, 1, 0)]


def test_one_host_spreads_over_four_of_one_device():
    # The source's link is the narrow one: 4 MiB leave it once, the others exchange their parts.
    source = TiledMesh(devices=(0,), hosts=(0,), sizes=(1,), dims=((),))
    target = TiledMesh(devices=(1, 2, 3, 4), hosts=(1, 2, 3, 4), sizes=(4,), dims=((),))
    problem = problem_of((MIB,), source, target)
    solution = solve(problem)
    assert solution.method == "local_all_gather"
    assert solution.transfers.slow_bytes == 4 * MIB
    assert solution.gathers.slow_bytes == 12 * MIB
    by_hand = (4 * 20e-6 + 4 * MIB / 100e9, 20e-6 + 4 * MIB / 1e9)
    assert solution.transfers.seconds == pytest.approx(max(by_hand))
    assert solution.gathers.seconds == pytest.approx(3 * 20e-6 + 3 * MIB / 1e9)
    other = solve(replace(problem, readers=0))
    assert other.method == "send_recv"
    assert other.total.seconds == pytest.approx(20e-6 + 16 * MIB / 1e9)


def test_what_cannot_be_gathered_is_broadcast():
    source, target = mesh_of(0, ((),), 4), mesh_of(4, ((),), 4)
    for shape, readers in (((3,), 1), ((MIB,), 0), ((8,), 3)):
        problem = problem_of(shape, source, target, readers)
        solution = solve(problem)
        assert solution.method == "broadcast"
        assert [len(step) for step in solution.steps] == [1, 1, 2]
        size = 4 * shape[0]
        assert solution.transfers.slow_bytes == size
        assert solution.transfers.fast_bytes == 3 * size
        assert solution.total.seconds == pytest.approx(
            (20e-6 + size / 1e9) + 2 * (5e-6 + size / 100e9)
        )
    scalar = replace(
        problem_of((), source, target), source=mesh_of(0, (), 4), target=mesh_of(4, (), 4)
    )
    assert solve(scalar).method == "broadcast"


def test_inside_one_host_replicas_are_sent_side_by_side():
    problem = problem_of((MIB,), mesh_of(0, ((),), 8), mesh_of(4, ((),), 8))
    solution = solve(problem)
    assert solution.method == "send_recv"
    assert solution.total == Traffic(
        slow_bytes=0, fast_bytes=16 * MIB, seconds=5e-6 + 4 * MIB / 100e9
    )


def test_one_device_of_a_host_serves_replicas_one_after_the_other():
    source = TiledMesh(devices=(0,), hosts=(0,), sizes=(1,), dims=((),))
    problem = problem_of((MIB,), source, mesh_of(1, ((),), 8))
    solution = solve(problem)
    assert solution.method == "local_all_gather"
    assert solution.transfers.seconds == pytest.approx(4 * 5e-6 + 4 * MIB / 100e9)


@pytest.mark.parametrize(
    ("hosts", "per_host", "sizes"),
    [(1, 4, (4,)), (2, 2, (4,)), (2, 2, (2, 2)), (4, 1, (4,)), (2, 4, (4, 2)), (2, 4, (2, 4))],
)
def test_gathers_take_what_the_collectives_model_says(hosts, per_host, sizes):
    cluster = replace(Cluster.parse("v100-16gb:4x8"), inter_host=SLOW, intra_host=FAST)
    view = LogicalMesh.of(replace(cluster, devices_per_host=per_host), hosts, per_host, sizes)
    source = TiledMesh(devices=(99,), hosts=(99,), sizes=(1,), dims=((),))
    for axis in range(len(sizes)):
        target = mesh_of(0, ((),), per_host, sizes)
        problem = problem_of((MIB,), source, target, readers=3)
        solution = of_method(problem, "local_all_gather", ((axis,),))
        assert solution.gathers.seconds == pytest.approx(3 * all_gather(view, axis, 4.0 * MIB))


def test_meshes_of_a_cluster():
    mesh = TiledMesh.of(Cluster.parse("h100:4x8"), (6, 7, 8, 9), (2, 2), ((0,),))
    assert mesh.hosts == (0, 0, 1, 1)
    assert mesh.free_axes == (1,)


@dataclass(frozen=True)
class Demand:
    num_bytes: int
    senders: tuple[int, ...]
    slow: bool


def senders_of(demands: list[Demand], hosts: list[int]) -> list[int]:
    """Chosen by `balance`."""
    every = [sender for demand in demands for sender in demand.senders]
    of_all = Demands(
        num_bytes=np.array([demand.num_bytes for demand in demands], np.int64),
        slow=np.array([demand.slow for demand in demands], bool),
        senders=np.array(every, np.int64),
        ends=np.cumsum([len(demand.senders) for demand in demands], dtype=np.int64),
    )
    return balance(of_all, np.array(hosts)).tolist()


HOSTS = [0, 0, 1, 1, 2]


@st.composite
def demand_lists(draw: st.DrawFn) -> list[Demand]:
    """Up to 6 demands on 5 devices of 3 hosts."""
    sets = st.lists(st.sampled_from(range(5)), min_size=1, max_size=5, unique=True)
    return [
        Demand(draw(st.integers(0, 12)), tuple(draw(sets)), draw(st.booleans()))
        for _ in range(draw(st.integers(0, 6)))
    ]


def peak(demands: list[Demand], hosts: list[int], senders: Sequence[int]) -> tuple[int, int]:
    """(most bytes that a host sends over slow links, most bytes that a device sends)."""
    by_host: Counter[int] = Counter()
    by_device: Counter[int] = Counter()
    for demand, sender in zip(demands, senders, strict=True):
        by_device[sender] += demand.num_bytes
        by_host[hosts[sender]] += demand.num_bytes * demand.slow
    return max(by_host.values(), default=0), max(by_device.values(), default=0)


def least_peak(demands: list[Demand], hosts: list[int]) -> tuple[int, int]:
    choices = product(*(demand.senders for demand in demands))
    return min(peak(demands, hosts, choice) for choice in choices)


@settings(max_examples=80, deadline=None)
@given(demands=demand_lists())
def test_senders_hold_what_they_send(demands):
    senders = senders_of(demands, HOSTS)
    assert all(s in d.senders for s, d in zip(senders, demands, strict=True))
    assert peak(demands, HOSTS, senders) >= least_peak(demands, HOSTS)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=7), count=st.integers(1, 3))
def test_senders_are_near_the_optimum_where_every_host_holds_all(sizes, count):
    hosts = [*range(count)]
    demands = [Demand(size, tuple(hosts), slow=True) for size in sizes]
    chosen, _ = peak(demands, hosts, senders_of(demands, hosts))
    exact, _ = least_peak(demands, hosts)
    assert exact <= chosen <= (4 / 3 - 1 / (3 * count)) * exact


def test_many_demands_are_balanced():
    hosts = [device // 8 for device in range(64)]
    demands = [Demand(3 + k % 7, tuple(range(64)), slow=True) for k in range(1000)]
    by_host, by_device = peak(demands, hosts, senders_of(demands, hosts))
    total = sum(demand.num_bytes for demand in demands)
    assert by_host <= total / 8 + 9
    assert by_device <= total / 64 + 9


def test_of_equal_senders_the_first_one_is_taken():
    demands = [Demand(4, (3, 1, 2), slow=False), Demand(4, (3, 1), slow=False)]
    assert senders_of(demands, HOSTS) == [1, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (8, -1)}, "invalid tensor"),
        ({"itemsize": 0}, "invalid tensor"),
        ({"readers": -1}, "has no -1 readers"),
        ({"shape": (8,)}, "is no layout of shape"),
        ({"source": mesh_of(0, ((0,), (0,)))}, "each axis once"),
        ({"source": mesh_of(0, ((0,), (2,)))}, "refers to axes that the source"),
        ({"target": mesh_of(2, ((0,), ()), per_host=3)}, "device 2 is on host 1 and on host 0"),
        ({"target": replace(mesh_of(4, ((), ())), hosts=(1, 1))}, "the target of sizes"),
        ({"target": replace(mesh_of(4, ((), ())), devices=(4, 4, 5, 6))}, "the target of sizes"),
    ],
)
def test_invalid_problems_are_refused(change, message):
    problem = problem_of((8, 8), mesh_of(0, ((0,), ())), mesh_of(4, ((), (1,))))
    with pytest.raises(ValueError, match=message):
        solve(replace(problem, **change))


def test_verify_finds_what_is_wrong():
    problem = problem_of((8, 8), mesh_of(0, ((0,), ())), mesh_of(4, ((1,), (0,))))
    good = solve(problem)
    verify(problem, good)
    (step,) = good.steps
    first, *rest = step
    gets = "gets .*, which is not each element of .* once"
    wrong = [
        (gets, replace(good, steps=(together(rest),))),
        (gets, replace(good, steps=(together([first, *step]),))),
        (gets, replace(good, steps=(together([replace(first, target=3), *step]),))),
        (
            "the sender does not have it",
            replace(good, steps=(together([replace(first, source=3), *rest]),)),
        ),
        ("are stated", replace(good, transfers=Traffic(slow_bytes=1))),
        ("cannot land as", replace(good, method="local_all_gather")),
    ]
    for message, solution in wrong:
        with pytest.raises(VerificationError, match=message):
            verify(problem, solution)
    columns = problem_of((8, 8), mesh_of(0, ((0,), ())), mesh_of(4, ((), (0, 1))))
    good = of_method(columns, "send_recv", ((), (0, 1)))
    verify(columns, good)
    (step,) = good.steps
    first, *rest = step
    (other,) = (it for it in rest if it.target == first.target)
    as_many_bytes = together([first if it == other else it for it in step])
    with pytest.raises(VerificationError, match=gets):
        verify(columns, replace(good, steps=(as_many_bytes,)))
    replicas = problem_of((8, 8), mesh_of(0, ((0,), ())), mesh_of(4, ((), ())))
    twice = of_method(replicas, "send_recv", ((), ()))
    with pytest.raises(VerificationError, match="slow bytes, 512 are enough"):
        verify(replicas, twice)
    passed = of_method(replicas, "broadcast", ((), ()))
    verify(replicas, passed)
    received, given = passed.steps
    early = replace(passed, steps=(given, received))
    with pytest.raises(VerificationError, match="in step 0: the sender does not have it"):
        verify(replicas, early)
    half = together([replace(it, box=(it.box[0], (0, 4))) for it in received])
    late = replace(passed, steps=(half, given))
    with pytest.raises(VerificationError, match="in step 1: the sender does not have it"):
        verify(replicas, late)


def test_a_tensor_of_many_dimensions():
    """A box has 2^16 corners, of which two dimensions matter."""
    shape, whole = (8, 8, *(1,) * 14), ((),) * 14
    source = mesh_of(0, ((0,), (1,), *whole), per_host=8, sizes=(8, 8))
    target = mesh_of(64, ((1, 0), (), *whole), per_host=8, sizes=(8, 8))
    solution = solve(problem_of(shape, source, replace(target, dims=((1,), (0,), *whole))))
    assert len(solution.steps[0]) == 64
