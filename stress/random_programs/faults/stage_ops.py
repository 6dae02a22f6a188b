"""Faults of the passes: an op of a stage differs from the program's."""

from __future__ import annotations

from alpa.dialects import body, filled, ir, parse, stablehlo, terminator
from alpa.runtime.executable import Executable
from stress.random_programs.faults.all_reduce import DROPPED_ALL_REDUCE
from stress.random_programs.faults.at_ops import Place, at_one_op
from stress.random_programs.faults.planting import Fault, Sound, export

_FLIPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}


def _has_order(place: Place) -> bool:
    """A comparison other than the one that ends a loop."""
    op, parent = place.op, place.op.operation.parent
    ends_loop = parent is not None and parent.operation.name == "stablehlo.while"
    return isinstance(op, stablehlo.CompareOp) and _direction(op) in _FLIPPED and not ends_loop


def _flip(place: Place) -> None:
    flipped = _FLIPPED[_direction(place.op)]
    place.op.attributes["comparison_direction"] = stablehlo.ComparisonDirectionAttr.get(flipped)


def _direction(compare: ir.OpView) -> str:
    return stablehlo.ComparisonDirectionAttr(compare.attributes["comparison_direction"]).value


def _has_branches(place: Place) -> bool:
    return isinstance(place.op, stablehlo.CaseOp) and len(place.op.regions) > 1


def _swap_branches(place: Place) -> None:
    """Takes the first branch instead of the last one, and so on."""
    index = place.op.operands[0]
    last = filled(ir.RankedTensorType(index.type), len(place.op.regions) - 1)
    place.op.operands[0] = stablehlo.subtract(last, index)


def _is_counted_loop(place: Place) -> bool:
    return _bound(place) is not None


def _leave_out_last_trip(place: Place) -> None:
    compare = _bound(place)
    assert compare is not None
    with ir.InsertionPoint(compare):
        one = filled(ir.RankedTensorType(compare.operands[1].type), 1)
        compare.operands[1] = stablehlo.subtract(compare.operands[1], one)


def _bound(place: Place) -> stablehlo.CompareOp | None:
    """The comparison that decides whether a loop continues."""
    if not isinstance(place.op, stablehlo.WhileOp):
        return None
    owner = terminator(body(place.op)).operands[0].owner
    if isinstance(owner, ir.Block) or not isinstance(owner.opview, stablehlo.CompareOp):
        return None
    return owner.opview


def _has_square_weights(place: Place) -> bool:
    if not isinstance(place.op, stablehlo.DotGeneralOp):
        return False
    shape = list(ir.RankedTensorType(place.op.operands[1].type).shape)
    numbers = stablehlo.DotDimensionNumbers(place.op.dot_dimension_numbers)
    return len(shape) == 2 and shape[0] == shape[1] > 1 and not numbers.rhs_batching_dimensions


def _transpose_weights(place: Place) -> None:
    weights = place.op.operands[1]
    place.op.operands[1] = stablehlo.TransposeOp(weights, [1, 0]).result


def _is_wide_dot(place: Place) -> bool:
    if not isinstance(place.op, stablehlo.DotGeneralOp):
        return False
    element = ir.RankedTensorType(place.op.results[0].type).element_type
    return isinstance(element, ir.F32Type | ir.F64Type)


def _round(place: Place) -> None:
    (result,) = place.op.results
    type_ = ir.RankedTensorType(result.type)
    with ir.InsertionPoint.after(place.op):
        few_bits = ir.RankedTensorType.get(type_.shape, ir.BF16Type.get())
        narrow = stablehlo.ConvertOp(few_bits, result)
        wide = stablehlo.ConvertOp(type_, narrow.result)
    result.replace_all_uses_except(wide.result, narrow.operation)


def _is_mean_of_gradient(place: Place) -> bool:
    """The product with the share of a micro-batch that `export-stages` writes."""
    op, fragment = place.op, place.fragment
    if fragment.part != "update" or not isinstance(op, stablehlo.MulOp):
        return False
    gradient, factor = op.operands
    return (
        isinstance(gradient, ir.BlockArgument)
        and fragment.inputs[gradient.arg_number] in place.program.totals
        and not isinstance(factor.owner, ir.Block)
        and isinstance(factor.owner.opview, stablehlo.ConstantOp)
    )


def _average_again(place: Place) -> None:
    (result,) = place.op.results
    with ir.InsertionPoint.after(place.op):
        again = stablehlo.MulOp(result, place.op.operands[1])
    result.replace_all_uses_except(again.result, again.operation)


def _added_up(sound: Sound) -> Executable | None:
    modules = export(parse(sound.planned), "loss-reduction=sum")
    changed = {name: text for name, text in modules.items() if text != sound.modules[name]}
    return sound.with_modules(changed) if changed else None


FAULTS = (
    DROPPED_ALL_REDUCE,
    at_one_op("a comparison is flipped", where=_has_order, change=_flip),
    at_one_op("branches are swapped", where=_has_branches, change=_swap_branches),
    at_one_op("a loop ends early", where=_is_counted_loop, change=_leave_out_last_trip),
    at_one_op("weights are transposed", where=_has_square_weights, change=_transpose_weights),
    at_one_op("a dot has 16 bits", where=_is_wide_dot, change=_round),
    Fault(name="gradients are sums, not means", where="stage", plant=_added_up),
    at_one_op("a gradient is averaged twice", where=_is_mean_of_gradient, change=_average_again),
)
