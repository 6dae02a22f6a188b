from __future__ import annotations

import pytest

from alpa.dialects import parse
from alpa.dialects.checks import CheckError, check_planned

GOOD = """
!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x4xf32>, sharding=<@mesh_0, [{"a"}, {}]>>
!y = !mpmd.mesh_tensor<"mesh_1", tensor<8x4xf32>, sharding=<@mesh_1, [{}, {"a"}]>>
!z = !mpmd.mesh_tensor<"mesh_1", tensor<6x8xf32>, sharding=<@mesh_1, [{}, {"a"}]>>
module {
  sdy.mesh @mesh_0 = <["a"=2, "b"=2]>
  sdy.mesh @mesh_1 = <["a"=4]>
  func.func public @main(%x: !x, %unread: !z) -> (!y, !z) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=2, "b"=2]>>, <"mesh_1" : <["a"=4]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1, 2, 3>,
                      logical_shape = array<i64: 2, 2>},
                     {name = "mesh_1", hosts = array<i64: 0>, devices = array<i64: 4, 5, 6, 7>,
                      logical_shape = array<i64: 4>}]} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0)]> (%x) {alpa.part = "forward"}
        (%a: tensor<8x4xf32>) {
      %1 = stablehlo.tanh %a
        {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"b"}, {}]>]>} : tensor<8x4xf32>
      mpmd.return %1 : tensor<8x4xf32>
    } : (!x) -> !x
    %1 = mpmd.transfer %0 : (!x) -> !y
    return %1, %unread : !y, !z
  }
}
"""


def test_a_planned_module_passes() -> None:
    check_planned(parse(GOOD))


# The text to replace, its replacement, the line of the error, and the message.
CASES = {
    "meshes_left_out": (
        '{name = "mesh_1", hosts',
        '{name = "mesh_2", hosts',
        "func.func",
        "the topology names mesh_0, mesh_1, alpa.meshes mesh_0, mesh_2",
    ),
    "logical_shape": (
        "logical_shape = array<i64: 2, 2>",
        "logical_shape = array<i64: 4>",
        "func.func",
        "mesh_0 has logical_shape (4,) in alpa.meshes and axes of sizes (2, 2)",
    ),
    "number_of_devices": (
        "array<i64: 4, 5, 6, 7>",
        "array<i64: 4, 5, 6>",
        "func.func",
        "mesh_1 of shape (4,) needs 4 devices, alpa.meshes gives it 3",
    ),
    "a_device_twice": (
        "array<i64: 4, 5, 6, 7>",
        "array<i64: 4, 5, 6, 3>",
        "func.func",
        "device 3 is in mesh_0 and again in mesh_1",
    ),
    "devices_of_unequal_hosts": (
        '{name = "mesh_1", hosts = array<i64: 0>',
        '{name = "mesh_1", hosts = array<i64: 0, 1, 2>',
        "func.func",
        "mesh_1 has 4 devices on hosts [0, 1, 2], but each of its hosts must have equally many",
    ),
    "a_device_below_0": (
        "array<i64: 4, 5, 6, 7>",
        "array<i64: 4, 5, 6, -1>",
        "func.func",
        "mesh_1 has hosts [0] and devices [4, 5, 6, -1]; they must be numbers of at least 0",
    ),
    "a_name_that_is_none": (
        '{name = "mesh_1", hosts',
        "{name = 1 : i64, hosts",
        "func.func",
        "name of alpa.meshes is 1 : i64; expected a string",
    ),
    "mesh_symbol": (
        'sdy.mesh @mesh_0 = <["a"=2, "b"=2]>',
        'sdy.mesh @mesh_0 = <["a"=4, "b"=2]>',
        "sdy.mesh @mesh_0",
        'sdy.mesh @mesh_0 has axes ["a"=4, "b"=2], mesh_0 in the topology ["a"=2, "b"=2]',
    ),
    "mesh_of_an_op": (
        '<@mesh_0, [{"b"}, {}]>',
        '<@mesh_1, [{"a"}, {}]>',
        "stablehlo.tanh",
        "result 0 of stablehlo.tanh is sharded over @mesh_1 but lives on mesh_0",
    ),
    "mesh_of_an_argument": (
        '<"mesh_1", tensor<6x8xf32>, sharding=<@mesh_1, [{}, {"a"}]>>',
        '<"mesh_7", tensor<6x8xf32>>',
        "func.func",
        "argument 1 is on mesh_7; the topology has mesh_0, mesh_1",
    ),
    "other_mesh_in_a_sharding": (
        '<"mesh_1", tensor<6x8xf32>, sharding=<@mesh_1, [{}, {"a"}]>>',
        '<"mesh_1", tensor<6x8xf32>, sharding=<@mesh_0, [{}, {"a"}]>>',
        "func.func",
        "argument 1 is sharded over @mesh_0 but lives on mesh_1",
    ),
    "uneven": (
        "6x8xf32",
        "8x6xf32",
        "func.func",
        "argument 1 has 6 elements in dimension 1, cut into 4 shards",
    ),
    "rank_of_a_sharding": (
        '<"mesh_1", tensor<6x8xf32>, sharding=<@mesh_1, [{}, {"a"}]>>',
        '<"mesh_1", tensor<6x8xf32>, sharding=<@mesh_1, [{}]>>',
        "func.func",
        "argument 1 of type tensor<6x8xf32> has a sharding of rank 1",
    ),
    "axis": (
        '<"mesh_1", tensor<6x8xf32>, sharding=<@mesh_1, [{}, {"a"}]>>',
        '<"mesh_1", tensor<6x8xf32>, sharding=<@mesh_1, [{}, {"b"}]>>',
        "func.func",
        'argument 1 is sharded over axis "b"; mesh_1 has ["a"=4]',
    ),
    "axis_twice": (
        '<"mesh_1", tensor<6x8xf32>, sharding=<@mesh_1, [{}, {"a"}]>>',
        '<"mesh_1", tensor<6x8xf32>, sharding=<@mesh_1, [{"a"}, {"a"}]>>',
        "func.func",
        'argument 1 is sharded over axis "a" twice',
    ),
    "plain_tensor": (
        '!z = !mpmd.mesh_tensor<"mesh_1", tensor<6x8xf32>, sharding=<@mesh_1, [{}, {"a"}]>>',
        "!z = tensor<6x8xf32>",
        "func.func",
        "argument 1: expected an !mpmd.mesh_tensor, got tensor<6x8xf32>",
    ),
    "mesh_without_values": (
        "%1 = mpmd.transfer",
        """mpmd.fragment<mesh="mesh_9", origin=[]> () {alpa.part = "forward"} () {
      mpmd.return
    } : () -> ()
    %1 = mpmd.transfer""",
        'mesh="mesh_9"',
        "the fragment is on mesh_9; the topology has mesh_0, mesh_1",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_errors_say_where_and_what(case: str) -> None:
    old, new, line, message = CASES[case]
    assert old in GOOD
    text = GOOD.replace(old, new)
    with pytest.raises(CheckError) as error:
        check_planned(parse(text))
    assert message in error.value.message
    number = next(n for n, t in enumerate(text.splitlines(), start=1) if line in t)
    assert error.value.location.start_line == number


def test_a_module_without_a_public_function() -> None:
    with pytest.raises(CheckError, match="no public function"):
        check_planned(parse("module {}"))


def test_a_module_that_is_not_planned() -> None:
    text = "func.func @main(%x: tensor<f32>) -> tensor<f32> { return %x : tensor<f32> }"
    with pytest.raises(CheckError, match="it is not planned yet"):
        check_planned(parse(text))
