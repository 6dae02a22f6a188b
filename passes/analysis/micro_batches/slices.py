"""The dimension numbers of a gather, and of a scatter, which is the gather that undoes it."""

from __future__ import annotations

from dataclasses import dataclass

from alpa.dialects import ir, stablehlo
from alpa.passes.analysis.graph import shape
from alpa.passes.analysis.micro_batches.shapes import integer


@dataclass(frozen=True, kw_only=True)
class Slices:
    """Slices of an array `sliced`, which an op reads or writes at `indices`; `windows` holds them.

    `places` and `outer` say where dimensions are in the windows: those of the sliced array that a
    slice has, and those of the indices. `batching` gives the dimensions of the indices that have a
    row of the sliced array each, and its dimension there. The columns of the indices, along
    `vector_dim`, number the dimensions `numbered` of the sliced array; a slice has one row of the
    `collapsed` ones.
    """

    sliced: ir.Value
    indices: ir.Value
    windows: ir.Value
    places: dict[int, int]
    outer: dict[int, int]
    batching: dict[int, int]
    numbered: tuple[int, ...]
    vector_dim: int
    collapsed: frozenset[int]

    @classmethod
    def of(cls, op: ir.OpView) -> Slices:
        """Those of a gather, or of a scatter with one result."""
        if isinstance(op, stablehlo.GatherOp):
            sliced, indices, windows = *op.operands, op.results[0]
            numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
            dims, collapsed = list(numbers.offset_dims), numbers.collapsed_slice_dims
            rows, by = numbers.operand_batching_dims, numbers.start_indices_batching_dims
            numbered = numbers.start_index_map
        else:
            sliced, indices, windows = op.operands
            numbers = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
            dims, collapsed = list(numbers.update_window_dims), numbers.inserted_window_dims
            rows, by = numbers.input_batching_dims, numbers.scatter_indices_batching_dims
            numbered = numbers.scattered_dims_to_operand_dims
        gone = {*collapsed, *rows}
        kept = [d for d in range(len(shape(sliced))) if d not in gone]
        of_indices = [d for d in range(len(shape(indices))) if d != numbers.index_vector_dim]
        outer = [d for d in range(len(shape(windows))) if d not in dims]
        return cls(
            sliced=sliced,
            indices=indices,
            windows=windows,
            places=dict(zip(kept, dims, strict=True)),
            outer=dict(zip(of_indices, outer, strict=True)),
            batching=dict(zip(by, rows, strict=True)),
            numbered=tuple(numbered),
            vector_dim=numbers.index_vector_dim,
            collapsed=frozenset(collapsed),
        )

    @property
    def whole_places(self) -> dict[int, int]:
        """The `places` of dimensions of which each slice has all rows, whatever the indices are."""
        sizes, windows = shape(self.sliced), shape(self.windows)
        return {
            d: place
            for d, place in self.places.items()
            if windows[place] == sizes[d] and not (d in self.numbered and sizes[d] == 1)
        }

    @property
    def columns(self) -> list[ir.Value]:
        """What the columns of the indices were joined of, empty where that is not known."""
        owner = self.indices.owner
        if isinstance(owner, ir.Block):
            return []
        op = owner.opview
        if isinstance(op, stablehlo.ConcatenateOp) and integer(op, "dimension") == self.vector_dim:
            return list(op.operands)
        sizes = shape(self.indices)
        alone = self.vector_dim >= len(sizes) or sizes[self.vector_dim] == 1
        return [self.indices] if alone else []
