"""The shardings of contractions: uses, axes, and columns that repeat."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from alpa import passes
from alpa.dialects import ir
from alpa.passes.pipelines.diagnostics import Place
from alpa.passes.plan.data import Program
from alpa.passes.plan.layer_shardings import Block, Contraction, blocks, layer_shardings
from alpa.passes.plan.reader import read_planned


def test_data_parallelism_cuts_the_batch(two_stages: ir.Module, program: Program) -> None:
    (stages,) = layer_shardings(two_stages, program)  # The two stages are alike.
    assert stages.meshes == ("mesh_0", "mesh_1")
    assert stages.axes == (("axis0", 2),)
    ((block),) = stages.blocks
    ((contraction),) = block.contractions
    assert (block.repeats, contraction.op) == (1, "dot_general")
    assert contraction.name == "jvp(Model)/first/dot_general"
    assert str(contraction.place) == "model.py:7:3"
    x, weight, y = contraction.tensors
    assert (x.use, x.in_words, x.local_bytes) == ("input", "8/axis0 x 64", 4 * 64 * 4)
    assert (weight.use, weight.dims) == ("parameter", ((), ()))
    assert (y.use, y.in_words, y.unreduced) == ("activation", "8/axis0 x 64", ())


def named(letters: str) -> list[Contraction]:
    """Contractions that are equal where their letters are."""
    return [
        Contraction(op=letter, tensors=(), name=str(number), place=Place("file", number))
        for number, letter in enumerate(letters)
    ]


def text(found: list[Block]) -> str:
    return " ".join(
        f"{block.repeats}*{''.join(it.op for it in block.contractions)}" for block in found
    )


def test_columns_that_repeat_are_shown_once() -> None:
    assert text(blocks(named("abcabcabc"))) == "3*abc"
    assert text(blocks(named("xababy"))) == "1*x 2*ab 1*y"
    assert text(blocks(named("abc"))) == "1*abc"
    assert text(blocks(named("aaab"))) == "3*a 1*b"
    assert text(blocks(named("aabaab"))) == "2*aab"
    assert blocks([]) == []


@given(st.text("ab", max_size=12))
def test_blocks_hold_all_columns(letters: str) -> None:
    found = blocks(named(letters))
    assert (
        "".join(block.repeats * "".join(it.op for it in block.contractions) for block in found)
        == letters
    )


def test_without_a_batch_all_operands_are_inputs() -> None:
    module = passes.run(
        "func.func public @main(%x: tensor<64x8xf32>, %w: tensor<8x8xf32>) -> tensor<64x8xf32> {\n"
        "  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]\n"
        "    : (tensor<64x8xf32>, tensor<8x8xf32>) -> tensor<64x8xf32>\n"
        "  return %y : tensor<64x8xf32>\n}",
        "alpa{cluster=cpu:1x2}",
    )
    (stage,) = layer_shardings(module, read_planned(module))
    ((contraction,),) = (block.contractions for block in stage.blocks)
    assert [it.use for it in contraction.tensors] == ["input", "input", "activation"]
