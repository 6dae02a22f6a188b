"""Gives the buffers of old states to the new ones.

An update may write a new state over the old one if nothing reads the old one afterwards. That is
decided in program order. Updates run after all forward and backward parts, so it holds in every
schedule. With one micro-batch, so may any other fragment that waits for all other readers: a
decoder that extends its cache, or a backward part that an update is merged with.

**Before**::

    !w = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(%w: !w {alpa.role = "state"}) -> (!w {alpa.result = "state:0"})
        attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
      %n = mpmd.fragment<mesh="mesh_0", origin=["update_0"]> (%w)
          {alpa.module = @update, alpa.part = "update"} (%a: tensor<8xf32>) {
        mpmd.return %a : tensor<8xf32>
      } : (!w) -> !w
      return %n : !w
    }
    module @update {
      sdy.mesh @mesh_0 = <["a"=2]>
      func.func public @main(
          %w: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>})
          -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) {
        return %w : tensor<8xf32>
      }
    }

**After**::

    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(…) -> … {
      %n = mpmd.fragment<mesh="mesh_0", origin=["update_0"]> (%w)
          {alpa.donated = array<i64: 0>, alpa.module = @update, alpa.part = "update"} …
    }
    module @update {
      sdy.mesh @mesh_0 = <["a"=2]>
      func.func public @main(
          %w: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>,
                             tf.aliasing_output = 0 : i32})
          -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) {
        return %w : tensor<8xf32>
      }
    }

**Requires**: modules as `outline-fragments` leaves them, or later.

**Ensures**: `alpa.donated` of a fragment are the numbers of the operands whose buffers it takes,
and `tf.aliasing_output` says for which result. Both values have the same type and sharding.

**Options**: none.

**Fails when** the micro-batches cannot be run as the plan says, or a fragment has no module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from alpa.dialects import ir
from alpa.dialects.attributes import ALIASING_OUTPUT
from alpa.passes.base import Pass, Remark
from alpa.passes.plan import data
from alpa.passes.plan.data import Fragment, Program, Transfer
from alpa.passes.plan.fragment_modules import fragment_modules
from alpa.passes.plan.reader import read_planned


@dataclass(frozen=True, kw_only=True)
class DonateStates(Pass):
    """Gives the buffers of old states to the new ones."""

    name: ClassVar[str] = "donate-states"

    def run(self, module: ir.Module, remark: Remark) -> None:
        program = read_planned(module)
        readers = _readers(program)
        i32 = ir.IntegerType.get_signless(32)
        for fragment, nested in zip(program.fragments, fragment_modules(module), strict=True):
            aliases = _aliases(program, fragment, readers)
            for argument, result in aliases.items():
                nested.arguments[argument][ALIASING_OUTPUT] = ir.IntegerAttr.get(i32, result)
            nested.write_signature()
            nested.write_numbers(data.DONATED, sorted(aliases))


def _readers(program: Program) -> dict[int, list[Fragment | Transfer | None]]:
    """The steps that read each value, in program order; None if the program returns the value."""
    readers: dict[int, list[Fragment | Transfer | None]] = {}
    for step in program.steps:
        for value in dict.fromkeys(step.inputs if isinstance(step, Fragment) else (step.source,)):
            readers.setdefault(value, []).append(step)
    for result in program.results:
        readers.setdefault(result.value, []).append(None)
    return readers


def _made_from(program: Program, values: Iterable[int]) -> set[int]:
    """The values that these are made from, with themselves."""
    found = set(values)
    for step in reversed(program.steps):
        outputs = step.outputs if isinstance(step, Fragment) else (step.target,)
        if not found.isdisjoint(outputs):
            found.update(step.inputs if isinstance(step, Fragment) else (step.source,))
    return found


def _aliases(
    program: Program,
    fragment: Fragment,
    readers: Mapping[int, Sequence[Fragment | Transfer | None]],
) -> dict[int, int]:
    """Operand -> result of a fragment that may be written over it.

    The operand is a state argument that nothing reads afterwards. The result is its new state, of
    the same type and sharding.
    """
    aliases: dict[int, int] = {}
    is_update = fragment.part == "update"
    if not is_update and program.num_micro_batches > 1:
        return aliases
    made_from = set[int]() if is_update else _made_from(program, fragment.inputs)

    def waits_for(other: Fragment | Transfer | None, old: int) -> bool:
        if isinstance(other, Fragment):
            return not made_from.isdisjoint(other.outputs)
        # States that do not vary are moved first of all.
        return other is not None and old not in program.varying

    for operand, old in enumerate(fragment.inputs):
        *others, last = readers[old]
        if last is not fragment or fragment.inputs.count(old) != 1:
            continue
        if is_update:
            is_last = old not in program.varying
        else:
            is_last = all(waits_for(other, old) for other in others)
        if not is_last:
            continue
        for new in program.new_states.get(old, ()):
            if new in fragment.outputs and program.values[old] == program.values[new]:
                number = fragment.outputs.index(new)
                if number not in aliases.values():
                    aliases[operand] = number
                    break
    return aliases
