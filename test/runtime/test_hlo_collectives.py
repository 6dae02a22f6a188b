"""Collectives read from HLO text, with every notation of groups, loops and shapes."""

from __future__ import annotations

import pytest

from alpa.runtime.hlo_collectives import real_collectives
from alpa.runtime.hlo_text import HloError, parse_hlo, shape_bytes

ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""


def program(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"""HloModule m, num_partitions=8
{ADD}
ENTRY %main (p: f32[8,16]) -> f32[8,16] {{
  %p = f32[8,16]{{1,0}} parameter(0)
{body}
}}
"""


def found(*lines: str) -> list[tuple[str, int, int, int]]:
    return [(c.kind, c.devices, c.bytes, c.count) for c in real_collectives(program(*lines), 8)]


GROUPS = {
    "lists": ("{{0,1},{2,3},{4,5},{6,7}}", 2),
    "iota": ("[2,4]<=[8]", 4),
    "iota, transposed": ("[4,2]<=[2,4]T(1,0)", 2),
    "all": ("{}", 8),
    "axes of a mesh": ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", 4),
    "several axes": ("mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", 8),
    "a part of an axis": ("mesh['axis_0'=2,'axis_1'=4] {'axis_1':(1)2}", 2),
    "axes of a permuted mesh": (
        "mesh['axis_0'=2,'axis_1'=1,'axis_2'=4], device_ids=([2,4]T(1,0)) {'axis_0'}",
        2,
    ),
}


@pytest.mark.parametrize(("groups", "size"), GROUPS.values(), ids=GROUPS)
def test_groups(groups: str, size: int) -> None:
    line = (
        f"ROOT %a = f32[8,16]{{1,0}} all-reduce(%p), channel_id=1, replica_groups={groups}, "
        'use_global_device_ids=true, to_apply=%add, metadata={op_name="dot[3,4]<=[9]"}'
    )
    assert found(line) == [("all-reduce", size, 8 * 16 * 4, 1)]


def test_a_group_of_one_is_nothing() -> None:
    line = "ROOT %a = f32[8,16]{1,0} all-reduce(%p), replica_groups=[8,1]<=[8], to_apply=%add"
    assert found(line) == []


def test_groups_that_cannot_be_read() -> None:
    with pytest.raises(HloError, match="the groups of a cannot be read"):
        found("ROOT %a = f32[8,16]{1,0} all-reduce(%p), replica_groups=new, to_apply=%add")


def test_bytes_by_kind() -> None:
    assert found(
        "%g = f32[8,64]{1,0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={1}",
        "%s = f32[2,16]{1,0} reduce-scatter(%p), replica_groups=[2,4]<=[8], dimensions={0}",
        "%t = (f32[4,16]{1,0}, f32[4,16]{1,0}) all-to-all(%p, %p), replica_groups=[4,2]<=[8]",
        "ROOT %c = f32[8,16]{1,0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}",
    ) == [
        ("all-gather", 4, 8 * 64 * 4, 1),
        ("all-to-all", 2, 8 * 16 * 4, 1),
        ("collective-permute", 2, 8 * 16 * 4, 1),
        ("reduce-scatter", 4, 8 * 16 * 4, 1),
    ]


def test_started_collectives_count_what_is_received() -> None:
    groups = "replica_groups=[2,4]<=[8]"
    assert found(
        f"%g = (f32[8,16], f32[8,64]) all-gather-start(%p), {groups}, dimensions={{1}}",
        f"%s = ((f32[8,16]), f32[2,16]) reduce-scatter-start(%p), {groups}, dimensions={{0}}",
        f"%t = ((f32[4,16], f32[4,16]), (f32[4,16], f32[4,16])) all-to-all-start(%p, %p), {groups}",
        f"%a = f32[8,16] all-reduce-start(%p), {groups}, to_apply=%add",
        "%c = (f32[8,16], f32[8,16], u32[], u32[]) collective-permute-start(%p), "
        "source_target_pairs={{0,1},{1,0}}",
        "ROOT %d = f32[8,16] all-reduce-done(%a)",
    ) == [
        ("all-gather", 4, 8 * 64 * 4, 1),
        ("all-reduce", 4, 8 * 16 * 4, 1),
        ("all-to-all", 4, 8 * 16 * 4, 1),
        ("collective-permute", 2, 8 * 16 * 4, 1),
        ("reduce-scatter", 4, 8 * 16 * 4, 1),
    ]


def test_a_permute_that_moves_nothing() -> None:
    line = "ROOT %c = f32[8,16] collective-permute(%p), source_target_pairs={{0,0},{1,1}}"
    assert found(line) == []


REDUCE = "%a = f32[8,16]{1,0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add"
ZERO = "%z = s32[] constant(0)"


def cut(name: str, of: str, shape: str) -> str:
    return f"%{name} = f32[{shape}] dynamic-slice(%{of}, %z, %z), dynamic_slice_sizes={{{shape}}}"


def test_a_sum_that_is_cut_is_reduce_scattered() -> None:
    lines = [REDUCE, ZERO, "%k = f32[8,16] copy(%a)", f"ROOT {cut('s', 'k', '2,16')}"]
    assert found(*lines) == [("reduce-scatter", 4, 512, 1)]


def test_a_sum_that_is_cut_less_than_its_group() -> None:
    assert found(REDUCE, ZERO, f"ROOT {cut('s', 'a', '4,16')}") == [
        ("all-reduce", 2, 256, 1),
        ("reduce-scatter", 2, 512, 1),
    ]


def test_a_sum_that_is_used_whole_as_well() -> None:
    lines = [REDUCE, ZERO, cut("s", "a", "2,16"), "ROOT %n = f32[8,16] negate(%a)"]
    assert found(*lines) == [("all-reduce", 4, 512, 1)]
    assert found(REDUCE.replace("%a", "ROOT %a")) == [("all-reduce", 4, 512, 1)]


def looped(limit: str, *, start: str = "constant(2)", extra: str = "") -> str:
    return f"""HloModule m
{ADD}
%body (v: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {{
  %v = (s32[], f32[8,16]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%v), index=0
  %three = s32[] constant(3)
  %j = s32[] add(%i, %three)
  %x = f32[8,16]{{1,0}} get-tuple-element(%v), index=1
  %a = f32[8,16]{{1,0}} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %r = (s32[], f32[8,16]{{1,0}}) tuple(%j, %a)
}}

%condition (w: (s32[], f32[8,16])) -> pred[] {{
  %w = (s32[], f32[8,16]{{1,0}}) parameter(0)
  %n = s32[] get-tuple-element(%w), index=0
  %limit = s32[] {limit}
  ROOT %less = pred[] compare(%n, %limit), direction=LT
}}

ENTRY %main (p: f32[8,16]) -> f32[8,16] {{
  %p = f32[8,16]{{1,0}} parameter(0)
  %c = s32[] {start}
  %t = (s32[], f32[8,16]{{1,0}}) tuple(%c, %p)
  %l = (s32[], f32[8,16]{{1,0}}) while(%t), condition=%condition, body=%body{extra}
  ROOT %r = f32[8,16]{{1,0}} get-tuple-element(%l), index=1
}}
"""


LOOPS = {
    "counted: 2, 5, 8": (looped("constant(10)"), 3),
    "counted, as jaxlib 0.12 prints it": (
        looped("constant(10)")
        .replace("add(%i,", "add(%v#0,")
        .replace("compare(%n,", "compare(%w#0,"),
        3,
    ),
    "never": (looped("constant(1)"), 0),
    "known to XLA": (
        looped("partition-id()", extra=', backend_config={"known_trip_count":{"n":"7"}}'),
        7,
    ),
    "unknown": (looped("partition-id()"), 8),
}


@pytest.mark.parametrize(("text", "trips"), LOOPS.values(), ids=LOOPS)
def test_loops(text: str, trips: int) -> None:
    assert sum(c.count for c in real_collectives(text, 8)) == trips


def test_shapes_and_parts_of_a_line() -> None:
    assert shape_bytes("(bf16[3,5]{1,0}, pred[7], /*index=5*/c64[2], f8e4m3fn[4], token[])") == 57
    computations, entry = parse_hlo(program("ROOT %n = f32[8,16] negate(%p), metadata={a={b}}"))
    assert (entry, computations[entry].root) == ("main", "n")
    assert computations[entry].instructions["n"].operands == ("p",)
    with pytest.raises(HloError, match="no ENTRY"):
        parse_hlo(ADD)
