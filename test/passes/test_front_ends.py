"""What other front ends write is planned, and computes what it does on one device."""

from __future__ import annotations

import pytest

from alpa import passes
from alpa.dialects import parse
from alpa.runtime.compare_programs import compare_programs

_T = "tensor<8x8xf32>"
_DOT = f"stablehlo.dot_general %x, %x, contracting_dims = [1] x [0] : ({_T}, {_T}) -> {_T}"
_PLACED = '{mhlo.frontend_attributes = {_xla_buffer_placement = "device"}}'
_INNER = f"""
func.func private @inner(%a: {_T}) -> {_T} {{
  %0 = stablehlo.tanh %a : {_T}
  return %0 : {_T}
}}"""

PROGRAMS = {
    "constant of Shardy": f"""
      %0 = {_DOT}
      %c = sdy.constant dense<2.0> : {_T}
      %r = stablehlo.multiply %0, %c : {_T}""",
    "composite": f"""
      %0 = {_DOT}
      %r = stablehlo.composite "my.tanh" %0 {{decomposition = @inner}} : ({_T}) -> {_T}""",
    "placement on the device": f"""
      %0 = {_DOT}
      %r = stablehlo.custom_call @annotate_device_placement(%0) {_PLACED} : ({_T}) -> {_T}""",
    "manual region of one device": f"""
      %0 = stablehlo.custom_call @Sharding(%x) {{mhlo.sharding = "{{replicated}}"}} : ({_T}) -> {_T}
      %1 = stablehlo.custom_call @SPMDFullToShardShape(%0) {{mhlo.sharding = "{{manual}}"}}
        : ({_T}) -> {_T}
      %2 = {_DOT}
      %3 = stablehlo.add %1, %2 : {_T}
      %r = stablehlo.custom_call @SPMDShardToFullShape(%3) {{mhlo.sharding = "{{replicated}}"}}
        : ({_T}) -> {_T}""",
    "shard_map of GSPMD": f"""
      %0 = {_DOT}
      %1 = stablehlo.custom_call @Sharding(%0) {{mhlo.sharding = "{{devices=[1,2]<=[2]}}"}}
        : ({_T}) -> {_T}
      %2 = stablehlo.custom_call @SPMDFullToShardShape(%1) {{mhlo.sharding = "{{manual}}"}}
        : ({_T}) -> tensor<8x4xf32>
      %id = stablehlo.partition_id : tensor<ui32>
      %f = stablehlo.convert %id : (tensor<ui32>) -> tensor<f32>
      %b = stablehlo.broadcast_in_dim %f, dims = [] : (tensor<f32>) -> tensor<8x4xf32>
      %3 = stablehlo.add %2, %b : tensor<8x4xf32>
      %4 = "stablehlo.all_reduce"(%3) <{{
        channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
        replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, use_global_device_ids}}> ({{
      ^bb0(%p: tensor<f32>, %q: tensor<f32>):
        %s = stablehlo.maximum %p, %q : tensor<f32>
        stablehlo.return %s : tensor<f32>
      }}) : (tensor<8x4xf32>) -> tensor<8x4xf32>
      %5 = stablehlo.subtract %4, %2 : tensor<8x4xf32>
      %r = stablehlo.custom_call @SPMDShardToFullShape(%5)
        {{mhlo.sharding = "{{devices=[1,2]<=[2]}}"}} : (tensor<8x4xf32>) -> {_T}""",
    "one op": f"%r = stablehlo.tanh %x : {_T}",
    "no op": "",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_planned_and_equals_one_device(name: str) -> None:
    result = "%r" if PROGRAMS[name] else "%x"
    source = parse(
        f"{_INNER}\nfunc.func public @main(%x: {_T}) -> {_T} "
        f"{{\n{PROGRAMS[name]}\nreturn {result} : {_T}\n}}"
    )
    planned = passes.run(str(source), "alpa{cluster=cpu:1x2}", on_remark=lambda *_: None)
    assert not compare_programs(source, planned).is_fault
