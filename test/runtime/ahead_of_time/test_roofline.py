from __future__ import annotations

from dataclasses import replace

import pytest

from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.device import Device, Link
from alpa.runtime.ahead_of_time.roofline import Spent, spent
from alpa.runtime.hlo_text import HloError

DEVICE = Device(
    name="test", memory=2**30, peak_flops={"f32": 1e6, "bf16": 4e6}, memory_bandwidth=1e3
)
CLUSTER = Cluster(
    hosts=1,
    devices_per_host=8,
    device=DEVICE,
    intra_host=Link(bandwidth=100.0, latency=0.5),
    inter_host=Link(bandwidth=10.0, latency=2.0),
)


def entry(lines: str, before: str = "") -> str:
    """A program whose entry has two arguments and these instructions."""
    return (
        f"HloModule test\n\n{before}\n\nENTRY %main (a: f32[8,4], b: f32[4,2]) -> f32[8,2] {{\n"
        f"  %a = f32[8,4]{{1,0}} parameter(0)\n  %b = f32[4,2]{{1,0}} parameter(1)\n{lines}\n}}\n"
    )


def run(text: str, cluster: Cluster = CLUSTER, hosts: int = 1) -> Spent:
    return spent(text, cluster, hosts, 8 // hosts)


DOT = "  ROOT %dot = f32[8,2]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def test_a_product_takes_the_longer_of_its_flops_and_its_bytes() -> None:
    moved = 4 * (8 * 4 + 4 * 2 + 8 * 2)
    assert run(entry(DOT)).memory == pytest.approx(moved / 1e3)
    slow = replace(CLUSTER, device=replace(DEVICE, peak_flops={"f32": 100.0}))
    assert run(entry(DOT), slow).products == pytest.approx(2 * 8 * 2 * 4 / 100)


def test_products_have_the_peak_of_their_element_type() -> None:
    slow = replace(CLUSTER, device=replace(DEVICE, peak_flops={"f32": 1.0, "bf16": 4.0}))
    text = entry(DOT.replace("f32", "bf16")).replace("f32", "bf16")
    assert run(text, slow).products == pytest.approx(2 * 8 * 2 * 4 / 4)


FUSION = """\
%fused (p0: f32[8,4], p1: f32[4,2]) -> f32[8,2] {
  %p0 = f32[8,4]{1,0} parameter(0)
  %p1 = f32[4,2]{1,0} parameter(1)
  %dot.1 = f32[8,2]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %neg = f32[8,2]{1,0} negate(%dot.1)
}"""


def test_a_fusion_is_one_kernel_with_the_products_in_it() -> None:
    text = entry("  ROOT %f = f32[8,2]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused", FUSION)
    launched = replace(CLUSTER, device=replace(DEVICE, launch=7.0, peak_flops={"f32": 100.0}))
    found = run(text, launched)
    assert (found.launches, found.memory) == (7.0, 0.0)
    assert found.products == pytest.approx(2 * 8 * 2 * 4 / 100)


SLICED = """\
%sliced (p0: f32[8,4], p1: s32[]) -> f32[1,4] {
  %p0 = f32[8,4]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %row = f32[1,4]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,4}
}"""

UPDATED = """\
%updated (p0: f32[8,4], p1: f32[1,4], p2: s32[]) -> f32[8,4] {
  %p0 = f32[8,4]{1,0} parameter(0)
  %p1 = f32[1,4]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %new = f32[8,4]{1,0} dynamic-update-slice(%p0, %p1, %p2, %zero)
}"""


def test_a_fusion_reads_only_the_slices_that_it_takes() -> None:
    lines = (
        "  %i = s32[] constant(3)\n"
        "  ROOT %f = f32[1,4]{1,0} fusion(%a, %i), kind=kLoop, calls=%sliced"
    )
    assert run(entry(lines, SLICED)).memory == pytest.approx((16 + 4 + 16) / 1e3)


def test_a_fusion_that_updates_in_place_writes_the_update() -> None:
    lines = (
        "  %i = s32[] constant(3)\n  %row = f32[1,4]{1,0} constant({{1,2,3,4}})\n"
        "  ROOT %f = f32[8,4]{1,0} fusion(%a, %row, %i), kind=kLoop, calls=%updated"
    )
    assert run(entry(lines, UPDATED)).memory == pytest.approx((16 + 4 + 16) / 1e3)


def test_several_results_are_all_written() -> None:
    fused = """\
%both (p0: f32[8,4]) -> (f32[8,4], f32[8,4]) {
  %p0 = f32[8,4]{1,0} parameter(0)
  %neg = f32[8,4]{1,0} negate(%p0)
  ROOT %t = (f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%neg, /*index=1*/%p0)
}"""
    lines = "  ROOT %f = (f32[8,4]{1,0}, f32[8,4]{1,0}) fusion(%a), kind=kLoop, calls=%both"
    assert run(entry(lines, fused)).memory == pytest.approx(3 * 128 / 1e3)


def test_what_moves_nothing_is_free() -> None:
    lines = (
        "  %t = (f32[8,4]{1,0}, f32[4,2]{1,0}) tuple(%a, %b)\n"
        "  %g = f32[8,4]{1,0} get-tuple-element(%t), index=0\n"
        "  ROOT %r = f32[32]{0} bitcast(%g)"
    )
    launched = replace(CLUSTER, device=replace(DEVICE, launch=7.0))
    assert run(entry(lines), launched) == Spent()


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul"])
def test_a_library_product_computes_what_it_contracts(target: str) -> None:
    config = (
        '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["0"]}}}'
    )
    lines = (
        "  ROOT %c = (f32[8,2]{1,0}, s8[4096]{0}) custom-call(%a, %b), "
        f'custom_call_target="{target}", backend_config={config}'
    )
    assert run(entry(lines)).memory == pytest.approx(4 * (32 + 8 + 16) / 1e3)
    slow = replace(CLUSTER, device=replace(DEVICE, peak_flops={"f32": 1.0}))
    assert run(entry(lines), slow).products == pytest.approx(2 * 8 * 2 * 4)


IMAGE, KERNEL, OUTPUT = "f32[2,6,6,3]", "f32[3,3,3,5]", "f32[2,4,4,5]"
CONVOLVED = 2 * (2 * 4 * 4 * 5) * (3 * 3 * 3)


@pytest.mark.parametrize(
    ("target", "operands", "result"),
    [
        ("__cudnn$convForward", (IMAGE, KERNEL), OUTPUT),
        ("__cudnn$convBackwardInput", (OUTPUT, KERNEL), IMAGE),
        ("__cudnn$convBackwardFilter", (IMAGE, OUTPUT), KERNEL),
    ],
)
def test_each_direction_of_a_convolution_computes_the_same(
    target: str, operands: tuple[str, str], result: str
) -> None:
    lines = (
        f"  %x = {operands[0]} parameter(2)\n  %y = {operands[1]} parameter(3)\n"
        f"  ROOT %c = ({result}, u8[64]{{0}}) custom-call(%x, %y), window={{size=3x3}}, "
        f'dim_labels=b01f_01io->b01f, custom_call_target="{target}"'
    )
    slow = replace(CLUSTER, device=replace(DEVICE, peak_flops={"f32": 1.0}))
    assert run(entry(lines), slow).products == pytest.approx(CONVOLVED)


def test_a_convolution_outside_of_a_library() -> None:
    lines = (
        f"  %x = {IMAGE} parameter(2)\n  %y = {KERNEL} parameter(3)\n"
        f"  ROOT %c = {OUTPUT} convolution(%x, %y), window={{size=3x3}}, "
        "dim_labels=b01f_01io->b01f"
    )
    slow = replace(CLUSTER, device=replace(DEVICE, peak_flops={"f32": 1.0}))
    assert run(entry(lines), slow).products == pytest.approx(CONVOLVED)


LOOP = """\
%cond (c: (s32[], f32[8,4])) -> pred[] {
  %c = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

%body (s: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %s = (s32[], f32[8,4]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%s), index=1
  %y = f32[8,4]{1,0} negate(%x)
  ROOT %next = (s32[], f32[8,4]{1,0}) tuple(%n, %y)
}"""


def test_a_loop_runs_as_often_as_it_says() -> None:
    lines = (
        "  %n = s32[] constant(0)\n  %s = (s32[], f32[8,4]{1,0}) tuple(%n, %a)\n"
        "  ROOT %w = (s32[], f32[8,4]{1,0}) while(%s), condition=%cond, body=%body, "
        'backend_config={"known_trip_count":{"n":"5"}}'
    )
    assert run(entry(lines, LOOP)).memory == pytest.approx(5 * 2 * 128 / 1e3)


BRANCHES = """\
%short (p: f32[8,4]) -> f32[8,4] {
  ROOT %p = f32[8,4]{1,0} parameter(0)
}

%long (q: f32[8,4]) -> f32[8,4] {
  %q = f32[8,4]{1,0} parameter(0)
  ROOT %neg = f32[8,4]{1,0} negate(%q)
}"""


def test_the_longest_branch_counts() -> None:
    lines = (
        "  %n = s32[] constant(0)\n"
        "  ROOT %c = f32[8,4]{1,0} conditional(%n, %a, %a), "
        "branch_computations={%short, %long}"
    )
    assert run(entry(lines, BRANCHES)).memory == pytest.approx(2 * 128 / 1e3)


ALL = "replica_groups={}, to_apply=%add"
ROWS = "replica_groups=[2,4]<=[8], to_apply=%add"


@pytest.mark.parametrize(
    ("opcode", "shape", "operand", "groups", "seconds"),
    [
        ("all-reduce", "f32[8,4]", "a", ALL, 2 * (7 * 0.5 + 7 / 8 * 128 / 100)),
        ("all-reduce-start", "f32[8,4]", "a", ROWS, 2 * (3 * 0.5 + 3 / 4 * 128 / 100)),
        ("all-gather", "f32[32,4]", "a", ROWS, 3 * 0.5 + 3 / 4 * 512 / 100),
        ("reduce-scatter", "f32[2,4]", "a", ROWS, 3 * 0.5 + 3 / 4 * 128 / 100),
        ("all-to-all", "f32[8,4]", "a", ROWS, 3 * 0.5 + 3 / 4 * 128 / 100),
        ("all-gather-start", "(f32[8,4], f32[32,4])", "a", ROWS, 3 * 0.5 + 3 / 4 * 512 / 100),
        ("all-reduce", "f32[8,4]", "a", "replica_groups={{0},{1}}", 0.0),
    ],
)
def test_collectives(opcode: str, shape: str, operand: str, groups: str, seconds: float) -> None:
    found = run(entry(f"  ROOT %c = {shape} {opcode}(%{operand}), {groups}"))
    assert found.collectives == pytest.approx(seconds)
    assert found.seconds == pytest.approx(seconds)


def test_a_permute_is_one_message() -> None:
    pairs = "source_target_pairs={{0,1},{1,0}}"
    found = run(entry(f"  ROOT %c = f32[8,4] collective-permute(%a), {pairs}"))
    assert found.collectives == pytest.approx(0.5 + 128 / 100)


HOSTS = replace(CLUSTER, hosts=2, devices_per_host=4)


@pytest.mark.parametrize(
    ("groups", "latency", "bandwidth"),
    [
        ("[2,4]<=[8]", 0.5, 100.0),  # each group in a host
        ("[4,2]<=[2,4]T(1,0)", 2.0, 10.0 / 4),  # four groups share the network
        ("{{0,4},{1,5},{2,6},{3,7}}", 2.0, 10.0 / 4),
    ],
)
def test_groups_over_hosts_use_the_network(groups: str, latency: float, bandwidth: float) -> None:
    text = entry(f"  ROOT %c = f32[8,4] reduce-scatter(%a), replica_groups={groups}")
    size = 4 if groups.startswith("[2") else 2
    sent = (size - 1) / size * size * 128 / bandwidth
    assert run(text, HOSTS, 2).collectives == pytest.approx((size - 1) * latency + sent)


def test_uneven_groups_over_hosts_are_refused() -> None:
    text = entry("  ROOT %c = f32[8,4] all-reduce(%a), replica_groups={{0,1,4},{2,3,5}}")
    with pytest.raises(HloError, match=r"not evenly spaced: \[0, 1, 4\]"):
        run(text, HOSTS, 2)
