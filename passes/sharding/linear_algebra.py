"""Sharding rules of LAPACK's and cuSOLVER's routines, as JAX calls them through XLA's FFI.

A routine solves each matrix of a batch by itself, and reads from the shapes how many there are. So
batch dimensions may be split. The dimensions of a matrix, and of the vectors and numbers that are
found for it, are needed whole. Older calls have other names, or a text in `backend_config`. They
hold the size of the batch as a number, and cannot be split.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import count

from alpa.dialects.sharding import ShardingRule

_Shape = tuple[int, ...]
_LIBRARY = r"(?:lapack|cusolver|cublas|hipsolver|hipblas)_[sdcz]?"
_OF_MATRICES = re.compile(
    _LIBRARY + r"(?:gee[sv]|gehrd|geqp3|geqrf|gesdd|gesvd[jp]?|getrf|(?:or|un)gqr|potrf|"
    r"(?:he|sy)ev[dj]|(?:he|sy)trd|trsm)(?:_batched)?_ffi"
)
_OF_VECTORS = re.compile(rf"{_LIBRARY}gtsv2?_ffi|(?:cu|hip)_lu_pivots_to_permutation")
"""Their first operand is a vector for each system of the batch."""


@lru_cache(maxsize=1024)
def linear_algebra_rule(
    target: str, operands: tuple[_Shape, ...], results: tuple[_Shape, ...]
) -> ShardingRule | None:
    """The rule of an FFI call of a routine; None for other targets.

    Args:
        target: the name that is called.
        operands, results: their shapes.
    """
    if _OF_MATRICES.fullmatch(target):
        batch = operands[0][:-2]
    elif _OF_VECTORS.fullmatch(target):
        batch = operands[0][:-1]
    else:
        return None
    sizes, numbers = list(batch), count(len(batch))

    def factors(shape: _Shape) -> tuple[tuple[int, ...], ...]:
        shared = len(batch) if shape[: len(batch)] == batch else 0
        sizes.extend(shape[shared:])
        own = ((next(numbers),) for _ in shape[shared:])
        return (*((dim,) for dim in range(shared)), *own)

    given, made = tuple(map(factors, operands)), tuple(map(factors, results))
    whole = frozenset(range(len(batch), len(sizes)))
    return ShardingRule(tuple(sizes), given, made, need_replication=whole)
