"""Numbers the updates of a scatter sample by sample, where JAX numbers those of the whole batch.

The gradient of `x.at[i].set(y)` is zero for elements of `y` that others replace. To find them, JAX
numbers all elements of `y` from 1, writes the numbers in the same way as `y`, reads them back, and
compares::

    numbers = iota + 1
    written = scatter(zeros, i, numbers)
    stays = gather(written, i) == numbers

The numbers have no meaning beyond this: any positive numbers that differ do. If each sample writes
to places of its own, it is enough that they differ within a sample. These are the same for all
samples, while numbers in the batch differ from those in a micro-batch.

If samples may write to the same places, the program means something else after this rewrite. The
proof that micro-batches are exact (`combine-micro-batches`) then refuses it: it follows what a
scatter writes only if each sample has places of its own.

**Before**::

    %0 = stablehlo.iota dim = 0 {alpa.whole = {types = [tensor<16xui32>]}} : tensor<8xui32>
    %1 = stablehlo.reshape %0 {alpa.whole = {types = [tensor<8x2xui32>]}} : … -> tensor<4x2xui32>

**After**::

    %0 = stablehlo.iota dim = 0 : tensor<2xui32>
    %1 = stablehlo.reshape %0 : (tensor<2xui32>) -> tensor<1x2xui32>
    %2 = stablehlo.broadcast_in_dim %1, dims = [0, 1] {alpa.whole = {types = [tensor<8x2xui32>]}}
      : (tensor<1x2xui32>) -> tensor<4x2xui32>
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from alpa.dialects import func, ir, ops_where, stablehlo
from alpa.dialects.attributes import WHOLE
from alpa.dialects.records import entries
from alpa.passes.analysis.graph import shape, splat
from alpa.passes.analysis.micro_batches.indexing import replaces


def number_updates_by_sample(main: func.FuncOp) -> None:
    """Numbers the updates of scatters sample by sample, in all blocks of a function.

    Args:
        main: the program of one micro-batch, whose ops have `alpa.whole`. It is exact for the whole
            batch only as far as `combine-micro-batches` proves that.
    """
    for op in ops_where(main, lambda op: op.name == "stablehlo.iota"):
        readers = [user for user, _ in _uses(op.results[0])]
        reshaped = len(readers) == 1 and isinstance(readers[0], stablehlo.ReshapeOp)
        maker = readers[0] if reshaped else op
        numbers = maker.results[0]
        whole = entries(ir.DictAttr(maker.attributes[WHOLE])) if WHOLE in maker.attributes else {}
        if "types" not in whole or not (reshaped or len(shape(numbers)) == 1):
            continue
        (type_,) = ir.ArrayAttr(whole["types"])
        sizes = zip(
            shape(numbers), ir.RankedTensorType(ir.TypeAttr(type_).value).shape, strict=True
        )
        grown = [d for d, (size, other) in enumerate(sizes) if size != other]
        if len(grown) == 1 and _tell_apart(numbers):
            with ir.InsertionPoint(maker), maker.location:
                numbers.replace_all_uses_with(_same_for_all(numbers, grown[0], whole))


def _tell_apart(numbers: ir.Value) -> bool:
    """Whether numbers from 0 are read only to tell updates of scatters apart."""
    uses = list(_uses(numbers))
    return bool(uses) and all(
        _tell_apart(user.results[0])
        if isinstance(user, stablehlo.BroadcastInDimOp)
        else isinstance(user, stablehlo.AddOp)
        and _is_filled(user.operands[1 - n], 1)
        and _are_labels(user.results[0])
        for user, n in uses
    )


def _are_labels(labels: ir.Value) -> bool:
    """Whether positive numbers are only written, read back and compared."""
    compared, found = set[ir.Value](), set[ir.Value]()
    for user, n in _uses(labels):
        if isinstance(user, stablehlo.CompareOp):
            compared.add(user.operands[1 - n])
            if not _is_equality(user):
                return False
        elif not (isinstance(user, stablehlo.ScatterOp) and _writes(user, n)):
            return False
        else:
            for reader, m in _uses(user.results[0]):
                if isinstance(reader, stablehlo.GatherOp) and m == 0:
                    found.add(reader.results[0])
                elif not _is_compared_with_zero(reader, m):
                    return False
    return compared <= found and all(
        isinstance(user, stablehlo.CompareOp)
        and _is_equality(user)
        and user.operands[1 - n] == labels
        for value in found
        for user, n in _uses(value)
    )


def _writes(scatter: stablehlo.ScatterOp, operand: int) -> bool:
    """Whether a scatter writes this operand, as it is, into zeros."""
    return (
        len(scatter.results) == 1
        and operand == 2
        and _is_filled(scatter.operands[0], 0)
        and replaces(scatter)
    )


def _is_compared_with_zero(op: ir.OpView, operand: int) -> bool:
    return (
        isinstance(op, stablehlo.CompareOp)
        and _is_equality(op)
        and _is_filled(op.operands[1 - operand], 0)
    )


def _is_filled(value: ir.Value, number: int) -> bool:
    """Whether all elements are this constant, in a micro-batch and in the whole batch."""
    maker = value.owner
    if isinstance(maker, stablehlo.BroadcastInDimOp):
        maker = maker.operands[0].owner
    if splat(value) != number or isinstance(maker, ir.Block):
        return False
    whole = maker.attributes.get(WHOLE)
    return whole is None or "value" not in entries(ir.DictAttr(whole))


def _is_equality(op: stablehlo.CompareOp) -> bool:
    direction = stablehlo.ComparisonDirectionAttr(op.attributes["comparison_direction"])
    return direction.value == "EQ"


def _same_for_all(numbers: ir.Value, dim: int, whole: dict[str, ir.Attribute]) -> ir.Value:
    """Numbers from 0 of the elements of each sample, of the shape and type of `numbers`."""
    type_ = ir.RankedTensorType(numbers.type)
    sizes = [1 if d == dim else size for d, size in enumerate(type_.shape)]
    element = type_.element_type
    own = stablehlo.iota(ir.RankedTensorType.get([math.prod(sizes)], element), 0)
    own = stablehlo.reshape(ir.RankedTensorType.get(sizes, element), own)
    dims = ir.DenseI64ArrayAttr.get(range(len(sizes)))
    found = stablehlo.BroadcastInDimOp(type_, own, dims)
    found.attributes[WHOLE] = ir.DictAttr.get({"types": whole["types"]})
    return found.result


def _uses(value: ir.Value) -> Iterator[tuple[ir.OpView, int]]:
    for use in value.uses:
        yield (
            use.owner.opview if isinstance(use.owner, ir.Operation) else use.owner,
            use.operand_number,
        )
