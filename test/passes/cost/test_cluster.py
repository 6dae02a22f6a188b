from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from alpa.passes.cost.cluster import (
    AnyCluster,
    Cluster,
    ClusterError,
    MixedCluster,
    parse_cluster,
    with_hosts,
)
from alpa.passes.cost.device import Call, Cost, Curve, Transfer
from alpa.passes.cost.presets import PRESETS

FILE = """\
hosts = 8
devices_per_host = 4
[device]
name = "V100-SXM2-16GB"
memory = "16GiB"
peak_flops = { f16 = 125e12, bf16 = 125e12, f32 = 15.7e12 }
memory_bandwidth = 900e9            # bytes/s
[intra_host]
bandwidth = 150e9                   # bytes/s per device and direction
latency = 5e-6                      # s
[inter_host]
bandwidth = 3.125e9                 # bytes/s per host (25 Gbit/s)
latency = 20e-6
"""


@pytest.fixture
def parse(tmp_path):
    def parse(text: str) -> Cluster:
        path = tmp_path / "cluster.toml"
        path.write_text(text, encoding="utf-8")
        return Cluster.parse(str(path))

    return parse


def test_file(parse):
    cluster = parse(FILE)
    assert (cluster.hosts, cluster.devices_per_host, cluster.num_devices) == (8, 4, 32)
    assert cluster.device.name == "V100-SXM2-16GB"
    assert cluster.device.memory == 16 * 2**30
    assert cluster.device.peak("f16") == 125e12
    assert cluster.device.memory_bandwidth == 900e9
    assert (cluster.intra_host.bandwidth, cluster.intra_host.latency) == (150e9, 5e-6)
    assert (cluster.inter_host.bandwidth, cluster.inter_host.latency) == (3.125e9, 20e-6)


def test_preset_is_the_file(parse):
    from_file = parse(FILE)
    preset = Cluster.parse("v100-16gb:8x4,ideal")
    assert (preset.hosts, preset.devices_per_host) == (8, 4)
    assert preset.device.memory == from_file.device.memory
    assert preset.intra_host == from_file.intra_host
    assert preset.inter_host == from_file.inter_host


REACHED = (
    FILE.replace(
        "latency = 5e-6",
        """latency = 5e-6
overlap = 0.25
collectives.all-reduce.2 = { alpha = 1e-5, beta = 3e11 }
collectives.all-reduce.8 = { alpha = 3e-5, beta = 2e11 }""",
    )
    + """\
[device.efficiency]
matrix = { f16 = [[1e9, 0.4], [1e11, 0.6]], f32 = [[1e9, 0.75]] }
memory = [[1e6, 0.5], [1e8, 0.9]]
[calibration]
date = "2026-11-24"
"""
).replace("peak_flops", "usable_memory = 0.9\nlaunch = 2e-6\npeak_flops")


def test_a_file_with_efficiencies(parse):
    cluster = parse(REACHED)
    device = cluster.device
    assert device.memory == int(0.9 * 16 * 2**30)
    assert device.launch == 2e-6
    # Between two points a share is linear in the logarithm of the size.
    for flops, share in ((1.0, 0.4), (1e9, 0.4), (1e10, 0.5), (1e11, 0.6), (1e13, 0.6)):
        assert device.seconds(flops, 0.0, "f16") == pytest.approx(flops / 125e12 / share)
    assert device.seconds(1e10, 0.0, "f64") == pytest.approx(1e10 / 7.85e12 / 0.75)
    assert device.seconds(0.0, 1e7, "f16") == pytest.approx(1e7 / 900e9 / 0.7)
    shares = np.array([1.0, 0.1])
    assert device.seconds(1e11, 0.0, "f16", shares) == pytest.approx(
        [1e11 / 125e12 / 0.6, 1e10 / 125e12 / 0.5]
    )
    assert cluster.intra_host.overlap == 0.25
    assert cluster.intra_host.collectives == {
        "all-reduce": {2: Cost(1e-5, 1 / 3e11), 8: Cost(3e-5, 1 / 2e11)}
    }


FALLING = REACHED.replace(
    "[[1e9, 0.4], [1e11, 0.6]]", "[[1e7, 0.8], [1e9, 0.4], [1e11, 0.6]]"
).replace("memory = [[1e6, 0.5], [1e8, 0.9]]", "memory = [[1e5, 0.9], [1e6, 0.5], [1e8, 0.7]]")


def test_an_even_split_of_seconds_bounds_parts_of_the_work(parse):
    device = parse(FALLING).device
    bounding = device.for_bounds
    parts = np.array([1.0, 1 / 2, 1 / 8, 1e-3])
    for flops, num_bytes in ((1e11, 0.0), (3e9, 1e3), (1e6, 3e6), (0.0, 1e8), (1e12, 1e9)):
        bound = bounding.seconds(flops, num_bytes, "f16") * parts
        assert (device.seconds(flops, num_bytes, "f16", parts) >= bound * (1 - 1e-12)).all()
    # Without a bounding device, a part of the work is faster than that part of the seconds.
    assert device.seconds(1e9, 0.0, "f16", 0.01) < 0.01 * device.seconds(1e9, 0.0, "f16")


@pytest.mark.parametrize("name", ["v100-16gb:1x8", "h100:2x8", "h100:1x8,ideal", "cpu:1x4"])
def test_presets_are_their_own_bounds(name):
    cluster = Cluster.parse(name)
    assert cluster.for_bounds is cluster


def test_transfers_between_meshes_reach_what_the_file_says(parse):
    text = REACHED.replace(
        "overlap = 0.25", "overlap = 0.25\ntransfer = { bandwidth = 3e9, latency = 1e-4 }"
    )
    cluster = parse(text)
    assert cluster.intra_host.between_meshes == Transfer(bandwidth=3e9, latency=1e-4)
    inter = cluster.inter_host
    assert inter.between_meshes == Transfer(bandwidth=inter.bandwidth, latency=inter.latency)
    with pytest.raises(ClusterError, match=r":14: \[intra_host.transfer\] lacks 'latency'"):
        parse(text.replace(", latency = 1e-4", ""))


def test_gpus_transfer_through_the_memory_of_the_hosts():
    real, ideal = Cluster.parse("h100:2x8"), Cluster.parse("h100:2x8,ideal")
    assert real.intra_host.between_meshes.bandwidth < 0.01 * real.intra_host.bandwidth
    assert real.inter_host.between_meshes.bandwidth == real.inter_host.bandwidth
    assert real.inter_host.between_meshes.latency > real.inter_host.latency
    assert ideal.intra_host.transfer is None
    assert ideal.inter_host.transfer is None


CALIBRATED = REACHED
for old, new in (
    ("{ alpha = 1e-5, beta = 3e11 }", "[[100, 1e-5], [300, 4e-5]]"),
    (
        "launch = 2e-6",
        """call = { start = 1e-4, per_argument = 2e-6, per_shard = 5e-7 }
step = { start = 3e-4 }
alone = [[2, 0.5], [8, 1.0]]""",
    ),
    (
        "memory = [[1e6, 0.5]",
        """convolution = { f32 = [[1e9, 0.2]] }
elementwise = [[1e4, 0.01], [1e6, 0.04]]
memory = [[1e6, 0.5]""",
    ),
):
    CALIBRATED = CALIBRATED.replace(old, new, 1)


def test_file_with_what_calibration_measures(parse):
    device, link = parse(CALIBRATED).device, parse(CALIBRATED).intra_host
    assert device.seconds(1e9, 0.0, "f32", 1.0, "convolution") == 1e9 / 15.7e12 / 0.2
    # An element type without shares has those of f32.
    assert device.seconds(1e9, 0.0, "f16", 1.0, "convolution") == 1e9 / 125e12 / 0.2
    assert device.seconds(1e5, 0.0, "f32", 1.0, "elementwise") == pytest.approx(
        1e5 / 15.7e12 / 0.025
    )
    assert device.call == Call(1e-4, 2e-6, 5e-7)
    assert device.call.seconds(100.0, 4) == pytest.approx(1e-4 + 100 * (2e-6 + 4 * 5e-7))
    assert device.step_call == Call(3e-4)
    assert [device.share_alone(n) for n in (1, 2, 4, 8)] == pytest.approx([0.5, 0.5, 0.75, 1.0])
    curve = link.collectives["all-reduce"][2]
    assert curve == Curve(((100.0, 1e-5), (300.0, 4e-5)))
    for num_bytes, seconds in ((1.0, 1e-5), (200.0, 2.5e-5), (300.0, 4e-5), (600.0, 8e-5)):
        assert curve.seconds(num_bytes) == pytest.approx(seconds)
    assert curve.seconds(np.array([200.0, 600.0])) == pytest.approx([2.5e-5, 8e-5])


def test_work_of_other_kinds_has_the_shares_of_matrix_products(parse):
    device = parse(REACHED).device
    for kind in ("convolution", "elementwise"):
        assert device.seconds(1e10, 0.0, "f16", 1.0, kind) == device.seconds(1e10, 0.0, "f16")
    assert device.call.seconds(100.0, 4) == 0.0
    assert device.step_call == device.call
    assert device.share_alone(1) == 1.0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("start = 1e-4, ", "", r"\[device.call\] lacks 'start'"),
        ("per_shard", "per_device", r"unknown key 'per_device' in \[device.call\]"),
        ("1e-4", "-1", r"start must not be negative"),
        ("[300, 4e-5]", "[300, 0]", r"2 must be a list of \[bytes, seconds\] .* greater than 0"),
        ("[300, 4e-5]", "[100, 4e-5]", r"the sizes of 2 must rise"),
        ("{ f32 = [[1e9, 0.2]] }", "{ f16 = [[1e9, 0.2]] }", r"convolution lacks 'f32'"),
        ("0.04", "4", r"elementwise must be a list of \[size, share\]"),
    ],
)
def test_errors_in_what_calibration_measures(parse, old, new, message):
    assert old in CALIBRATED
    with pytest.raises(ClusterError, match=message):
        parse(CALIBRATED.replace(old, new, 1))


def test_usable_memory_as_a_whole_share(parse):
    for share in ("1", "1.0"):
        text = REACHED.replace("usable_memory = 0.9", f"usable_memory = {share}")
        assert parse(text).device.memory == 16 * 2**30


def test_usable_memory_in_bytes(parse):
    text = REACHED.replace("usable_memory = 0.9", 'usable_memory = "14GiB"')
    assert parse(text).device.memory == 14 * 2**30


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("usable_memory = 0.9", "usable_memory = 1.9", r":6: usable_memory must .* at most 1"),
        (
            "usable_memory = 0.9",
            "usable_memory = 2",
            ":6: usable_memory is 2, which is 2 bytes; give",
        ),
        (
            "usable_memory = 0.9",
            'usable_memory = "9KB"',
            ":6: usable_memory is '9KB', which is 9,000",
        ),
        ("usable_memory = 0.9", 'usable_memory = "17GiB"', r":6: .* more than the device's 17,179"),
        (", f32 = [[1e9, 0.75]]", "", r":20: matrix lacks 'f32'"),
        ("0.75]]", "1.75]]", r":20: f32 must be a list of \[size, share\] .* at most 1"),
        ("[[1e9, 0.75]]", "0.75", r":20: f32 must be a list of \[size, share\]"),
        ("[1e8, 0.9]", "[1e6, 0.9]", r":21: the sizes of memory must rise"),
        ("memory = [[", "bytes = [[", r":21: unknown key 'bytes' in \[device.efficiency\]"),
        ("overlap = 0.25", "transfer_overlap = -1", r":13: transfer_overlap must be at least 0"),
        ("overlap = 0.25", "overlap = 1", r":13: overlap must be at least 0 and less than 1"),
        ("all-reduce.2", "reduce.2", r":14: unknown collective 'reduce'; known: all-gather"),
        ("all-reduce.2", "all-reduce.1", r":14: '1' is no size of a group from 2 on"),
        (", beta = 3e11", "", r":14: \[intra_host.collectives.all-reduce.2\] lacks 'beta'"),
    ],
)
def test_errors_in_efficiencies(parse, old, new, message):
    assert old in REACHED
    with pytest.raises(ClusterError, match=message):
        parse(REACHED.replace(old, new, 1))


def test_a_name_may_say_how_many_of_the_hosts(parse, tmp_path):
    less = Cluster.parse("v100-16gb:8x4,ideal,hosts=3,memory=14GiB")
    assert (less.hosts, less.devices_per_host, less.device.memory) == (3, 4, 14 * 2**30)
    parse(FILE)
    path = str(tmp_path / "cluster.toml")
    assert Cluster.parse(with_hosts(path, 2)).hosts == 2
    assert with_hosts("h100:4x8,hosts=3,memory=1GiB", 2) == "h100:4x8,hosts=2,memory=1GiB"


def test_a_name_may_say_the_memory(parse, tmp_path):
    whole = Cluster.parse("v100-16gb:8x4,ideal")
    less = Cluster.parse("v100-16gb:8x4,ideal,memory=14.5GiB")
    assert less.device.memory == 29 * 2**29
    assert replace(less, device=whole.device) == whole
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    assert Cluster.parse(f"{path},memory=1000B").device.memory == 1000


def test_clusters_are_keys():
    assert {Cluster.parse("h100:4x8"): 1}[Cluster.parse("h100:4x8")] == 1
    assert Cluster.parse("h100:4x8") != Cluster.parse("h100:8x4")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_plausible(name):
    cluster = Cluster.parse(f"{name}:2x4")
    assert cluster.device.peak("f32") <= cluster.device.peak("bf16")
    assert cluster.inter_host.bandwidth < 8 * cluster.intra_host.bandwidth
    assert cluster.inter_host.latency > cluster.intra_host.latency > 0
    ideal = Cluster.parse(f"{name}:2x4,ideal")
    assert cluster.device.memory <= ideal.device.memory
    assert cluster.intra_host.bandwidth <= ideal.intra_host.bandwidth
    assert cluster.inter_host.bandwidth <= ideal.inter_host.bandwidth
    assert cluster.device.seconds(1e12, 0, "bf16") >= ideal.device.seconds(1e12, 0, "bf16")


def test_matrix_products_grow_more_efficient():
    """Calculon's step function for A100: 0.6 of the peak for 1 GFLOP, below 0.1 for little."""
    device = Cluster.parse("a100-80gb:1x1").device

    def efficiency(flops: float) -> float:
        seconds = device.launch + device.seconds(flops, 0, "bf16")
        return flops / seconds / device.peak("bf16")

    assert efficiency(1e7) < 0.1
    assert 0.4 < efficiency(1e9) < 0.6
    assert 0.7 < efficiency(16e9) < efficiency(1e15) < 0.88


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ('"512MiB"', 2**29),
        ('"1.5GiB"', 3 * 2**29),
        ('"80GB"', 80 * 10**9),
        ('"2 TiB"', 2**41),
        ('"64KiB"', 2**16),
        ('"3KB"', 3000),
        ('"7MB"', 7 * 10**6),
        ("1048576", 2**20),
    ],
)
def test_memory_units(parse, size, expected):
    assert parse(FILE.replace('"16GiB"', size)).device.memory == expected


def test_peak_of_types_that_are_not_listed(parse):
    device = parse(FILE.replace("bf16 = 125e12, ", "")).device
    assert device.peak("bf16") == 125e12
    assert device.peak("f8E4M3FN") == 125e12
    assert device.peak("f64") == 15.7e12 / 2
    assert device.peak("complex<f64>") == 15.7e12 / 2
    assert device.peak("i32") == device.peak("i1") == 15.7e12


def test_roofline():
    device = Cluster.parse("v100-16gb:1x1,ideal").device
    assert device.seconds(125e12, 0.0, "f16") == 1.0
    assert device.seconds(1.0, 900e9, "f16") == 1.0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "memory_bandwidth",
            "memory_bandwith",
            r"cluster.toml:7: unknown key 'memory_bandwith' in \[device\]; "
            "did you mean 'memory_bandwidth'",
        ),
        ("hosts = 8", "hosts = 8\nzebra = 1", r":2: unknown key 'zebra' .* known: hosts"),
        ("latency = 20e-6\n", "", r":11: \[inter_host\] lacks 'latency'"),
        ("hosts = 8\n", "", r":1: the cluster file lacks 'hosts'"),
        (", f32 = 15.7e12", "", r":6: peak_flops lacks 'f32'"),
        ("bf16 = ", "f33 = ", r":6: unknown element type 'f33' in peak_flops; did you mean 'f32'"),
        ("f16 = 125e12, bf", "f16 = -1.0, bf", r":6: f16 must be greater than 0 .* not -1.0"),
        ("hosts = 8", "hosts = 0", r":1: hosts must be a whole number from 1 on, not 0"),
        ("hosts = 8", "hosts = 2.5", r":1: hosts must be a whole number"),
        (
            "hosts = 8",
            "hosts = 9223372036854775807",
            r":1: 9,223,372,036,854,775,807 hosts x 4 .* Alpa plans for 4,096 at most",
        ),
        ("hosts = 8", "hosts = true", r":1: hosts must be a number, not True"),
        (
            "bandwidth = 150e9",
            "bandwidth = inf",
            r":9: bandwidth must be greater than 0 and finite",
        ),
        ("latency = 5e-6", "latency = -1", r":10: latency must not be negative"),
        ("latency = 5e-6", "latency = 'low'", r":10: latency must be a number, not 'low'"),
        ('"16GiB"', "16", r":5: memory is 16 bytes, less than .* give the unit, such as \"16GiB\""),
        ('"16GiB"', '"16 gigs"', r":5: memory must be a size such as 16GiB, not '16 gigs'"),
        ('"16GiB"', '"0GiB"', r":5: memory must be a size"),
        ('name = "V100-SXM2-16GB"', "name = 100", r":4: name must be a string, not 100"),
        ("[intra_host]", "[other]", r":8: unknown key 'other' in the cluster file; known: hosts"),
        ("[intra_host]", "[[intra_host]]", r":8: intra_host is a list of 1: hosts, .* equal"),
        ("peak_flops = {", "peak_flops = 1.0 #", r":6: peak_flops must be a table, not 1.0"),
        ("hosts = 8", "hosts = = 8", r"cluster.toml:1:9: not valid TOML: "),
        ("latency = 20e-6", "latency = ", r"cluster.toml:13:11: not valid TOML: "),
        ("latency = 20e-6\n", 'latency = """', r"cluster.toml:13: not valid TOML: "),
        (
            "devices_per_host = 4",
            "devices_per_host = [4, 8]",
            r":2: devices_per_host must be one number, not \[4, 8\]: hosts, .* equal",
        ),
        (
            "[device]",
            "[[device]]",
            r"cluster.toml:3: device is a list of 1: .* write one \[device\], and plan",
        ),
    ],
)
def test_file_errors(parse, old, new, message):
    assert old in FILE
    with pytest.raises(ClusterError, match=message):
        parse(FILE.replace(old, new, 1))


def test_file_that_is_no_text(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ClusterError, match="UTF-8"):
        Cluster.parse(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h10:4x8", "unknown cluster 'h10': did you mean h100"),
        ("", "unknown cluster ''.*Presets are v100-16gb"),
        ("h100", "the shape is missing; write hosts x devices per host, as in h100:4x8"),
        ("h100:4*8", r"'4\*8' is not a shape"),
        ("h100:0x8", "'0x8' is not a shape"),
        ("nowhere.toml", "cannot read the cluster file 'nowhere.toml': No such file"),
        ("some/where", "cannot read the cluster file"),
        ("h100:4x8,memory=14", r"memory must be a size such as 16GiB, not '14'; units: KiB"),
        ("h100:4x8,memory=0GiB", "memory must be a size"),
        ("h100:4x8,hosts=5", "hosts=5: there are 4 hosts; write how many of them to take"),
        ("h100:4x8,hosts=0", "hosts=0: there are 4 hosts"),
        ("h100:4x8,hosts=", "hosts=: there are 4 hosts"),
        ("h100:1x8,hosts=2", "hosts=2: there is 1 host; write how many of them to take"),
        ("h100:4x8+", r"'h100:4x8\+' has \+ without a kind of hosts on each side"),
        (" +h100:4x8", r"' \+h100:4x8' has \+ without a kind of hosts on each side"),
    ],
)
def test_name_errors(text, message):
    with pytest.raises(ClusterError, match=message):
        Cluster.parse(text)


TWO_KINDS = """\
[[hosts]]
count = 2
devices_per_host = 4
device = "v100-16gb,ideal"

[[hosts]]
count = 1
devices_per_host = 8
device = "more.toml"
"""
LINK = "[between]\nbandwidth = 1e10\nlatency = 3e-5\n"


def mixed(path: Path, text: str = TWO_KINDS) -> AnyCluster:
    """The cluster of a file; another kind of hosts is in a file beside it."""
    (path / "more.toml").write_text(FILE.replace("V100-SXM2-16GB", "more"), encoding="utf-8")
    file = path / "cluster.toml"
    file.write_text(text, encoding="utf-8")
    return parse_cluster(str(file))


def test_hosts_of_two_kinds(tmp_path: Path) -> None:
    cluster = mixed(tmp_path)
    assert isinstance(cluster, MixedCluster)
    small, large = cluster.kinds
    assert small == Cluster.parse("v100-16gb:2x4,ideal")
    assert (large.hosts, large.devices_per_host, large.device.name) == (1, 8, "more")
    assert (cluster.hosts, cluster.num_devices, cluster.host_sizes) == (3, 16, (4, 4, 8))
    assert [cluster.host_of(device) for device in (0, 3, 4, 7, 8, 15)] == [0, 0, 1, 1, 2, 2]
    assert cluster.of([0, 1]) is small
    assert cluster.of([2]) is large


def test_links_between_kinds(tmp_path: Path) -> None:
    cluster = parse_cluster("v100-16gb:2x4,ideal+a100-40gb:1x8,ideal")
    v100, a100 = cluster.kinds
    assert cluster.between([0], [1]) is v100.inter_host
    slow = cluster.between([2], [0])
    assert (slow.bandwidth, slow.latency) == (v100.inter_host.bandwidth, v100.inter_host.latency)
    assert slow.bandwidth < a100.inter_host.bandwidth
    given = mixed(tmp_path, TWO_KINDS + LINK).between([2], [0])
    assert (given.bandwidth, given.latency) == (1e10, 3e-5)


def test_kinds_that_differ_in_the_number_of_hosts_are_one() -> None:
    assert parse_cluster("h100:1x8+h100:2x8") == Cluster.parse("h100:3x8")
    one, other = parse_cluster("h100:1x8+h100:1x4").kinds
    assert (one.device, one.devices_per_host) == (other.device, 2 * other.devices_per_host)
    assert parse_cluster("h100:1x8+h100:1x8,memory=9GiB").kinds[1].device.memory == 9 * 2**30


def test_one_kind_is_asked_for() -> None:
    message = r"'a100-40gb:1x8\+h100:1x8' has hosts of several kinds \(A100-SXM4-40GB, H100"
    with pytest.raises(ClusterError, match=message):
        Cluster.parse("a100-40gb:1x8+h100:1x8")


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("count = 2\n", "", 1, "number 1 must have count, devices_per_host, device"),
        ("count = 2", "count = 0", 1, "number 1: count must be a whole number from 1 on, not 0"),
        ("count = 2", "count = true", 1, "number 1: count must be a whole number"),
        ("= 8", "= 1.5", 6, "number 2: devices_per_host must be a whole number from 1 on, not 1.5"),
        ('"more.toml"', "3", 6, "number 2: device must be a string"),
        ('"more.toml"', '"v1000-16gb"', 6, "device: unknown cluster 'v1000-16gb"),
        ('"more.toml"', '"other.toml"', 6, "device: cannot read the cluster file"),
        ('"more.toml"', '"more.toml"\nmore = 1', 10, "unknown key 'more' in [[hosts]] number 2"),
        (TWO_KINDS, "hosts = []", 1, "hosts is an empty list; give the number of equal hosts"),
        (TWO_KINDS, "hosts = [{ count = 1, x = 1 }]", 1, "unknown key 'x' in [[hosts]] number 1"),
        (TWO_KINDS, "hosts = [3]", 1, "[[hosts]] number 1 must have count"),
        ("[[hosts]]\ncount = 2", "kind = 1\n[[hosts]]\ncount = 2", 1, "unknown key 'kind' beside"),
        ("[[hosts]]\ncount = 1", "[between]\nlatency = 1\n[[hosts]]\ncount = 1", 6, "bandwidth"),
    ],
)
def test_files_of_hosts_that_do_not_do(
    tmp_path: Path, old: str, new: str, line: int, message: str
) -> None:
    assert TWO_KINDS.count(old) == 1
    with pytest.raises(ClusterError) as raised:
        mixed(tmp_path, TWO_KINDS.replace(old, new))
    assert message in str(raised.value)
    assert raised.value.place == f"{tmp_path / 'cluster.toml'}:{line}"


def test_a_file_does_not_list_hosts_of_a_file_that_lists_hosts(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="device: the cluster file lacks 'devices_per_host'"):
        mixed(tmp_path, TWO_KINDS.replace("more.toml", "cluster.toml"))


def test_all_kinds_together_have_at_most_so_many_devices(tmp_path: Path) -> None:
    message = "all hosts have 4,104 devices; Alpa plans for 4,096 at most"
    with pytest.raises(ClusterError, match=f"cluster.toml:1: {message}"):
        mixed(tmp_path, TWO_KINDS.replace("count = 1", "count = 512"))
    with pytest.raises(ClusterError, match=message):
        parse_cluster("h100:512x8+a100-40gb:1x8")


def test_a_file_of_hosts_takes_no_suffix(tmp_path: Path) -> None:
    mixed(tmp_path)
    for suffix in (",hosts=2", ",memory=9GiB"):
        with pytest.raises(ClusterError, match="lists hosts of its own: change them there"):
            parse_cluster(f"{tmp_path / 'cluster.toml'}{suffix}")
