"""Portable artifacts: what can be written, and errors at the ops that cannot."""

from __future__ import annotations

import pytest

from alpa.dialects import parse, write_portable
from alpa.dialects.checks import CheckError
from alpa.dialects.portable import is_portable_version, portable_versions

SHARDED = """\
module {
  sdy.mesh @mesh = <["a"=2]>
  func.func @main(%x: tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}]>})
      -> tensor<4xf32> {
    %0 = sdy.sharding_constraint %x <@mesh, [{}]> : tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}
"""
TAN = """\
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.tan %x : tensor<4xf32>
  return %0 : tensor<4xf32>
}
"""
PLAN = """\
!x = !mpmd.mesh_tensor<"m", tensor<4xf32>>
func.func @main(%x: !x) -> !x attributes {topology = #mpmd.topology<<"m" : <["a"=2]>>>} {
  %0 = mpmd.fragment<mesh="m", origin=["layer_0"]> (%x) (%y: tensor<4xf32>) {
    mpmd.return %y : tensor<4xf32>
  } : (!x) -> !x
  return %0 : !x
}
"""


def test_what_is_written_is_read_again_and_the_module_stays() -> None:
    for text in (SHARDED, TAN):
        module = parse(text)
        before = str(module)
        assert str(parse(write_portable(module))) == before
        assert str(module) == before


def test_versions() -> None:
    oldest, newest = portable_versions()
    assert all(is_portable_version(version) for version in (oldest, "1.0.0", newest))
    assert not any(map(is_portable_version, ("0.1.0", "99.0.0", "1.0", "current", "1.0.0\n", "")))
    with pytest.raises(
        ValueError, match=rf"StableHLO 0\.1\.0 cannot be written; {oldest} to {newest}"
    ):
        write_portable(parse(TAN), "0.1.0")


@pytest.mark.parametrize(
    ("text", "version", "line", "message"),
    [
        (TAN, "1.0.0", 2, "this stablehlo.tan cannot be written in StableHLO 1.0.0; write a later"),
        (
            TAN.replace("stablehlo.tan", "chlo.square").replace(
                ": tensor<4xf32>\n  return", ": tensor<4xf32> -> tensor<4xf32>\n  return"
            ),
            None,
            2,
            "chlo.square is not StableHLO; run func.func(chlo-legalize-to-stablehlo) first",
        ),
        (PLAN, None, 3, "mpmd.fragment is not StableHLO: a plan is no portable program"),
    ],
)
def test_an_op_that_cannot_be_written_is_named(
    text: str, version: str | None, line: int, message: str
) -> None:
    with pytest.raises(CheckError) as caught:
        write_portable(parse(text), version)
    assert caught.value.message.startswith(message)
    assert f'"-":{line}:' in str(caught.value.location)
