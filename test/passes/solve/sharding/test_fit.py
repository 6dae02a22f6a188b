from __future__ import annotations

import numpy as np
import pytest

from alpa.passes.solve.sharding.fit import without_oversized
from alpa.passes.solve.sharding.problem import OutOfMemoryError, Problem, Usage


def two(first: list[float], second: list[float], limit: float) -> Problem:
    """Two nodes whose buffers are live at the same time; the second is also live earlier, alone."""
    return Problem(
        node_costs=(np.zeros(len(first)), np.zeros(len(second))),
        edges=(),
        usages=(
            Usage(nodes=(0,), bytes=np.array(first), start=2, stop=4),
            Usage(nodes=(1,), bytes=np.array(second), start=0, stop=3),
        ),
        memory_limit=limit,
    )


def test_what_does_not_fit_beside_the_least_of_the_others_is_forbidden():
    smaller = without_oversized(two([1.0, 4.0, 9.0], [2.0, 5.0, 6.0], 6.0))
    np.testing.assert_array_equal(np.isfinite(smaller.node_costs[0]), [True, True, False])
    np.testing.assert_array_equal(np.isfinite(smaller.node_costs[1]), [True, True, False])


def test_several_usages_of_a_node_count_together():
    problem = Problem(
        node_costs=(np.zeros(2),),
        edges=(),
        usages=tuple(
            Usage(nodes=(0,), bytes=np.array([1.0, 3.0]), start=k, stop=4) for k in range(3)
        ),
        memory_limit=8.0,
    )
    np.testing.assert_array_equal(np.isfinite(without_oversized(problem).node_costs[0]), [1, 0])


def test_too_little_for_the_least_of_all_is_out_of_memory():
    with pytest.raises(OutOfMemoryError) as error:
        without_oversized(two([3.0, 4.0], [2.0, 5.0], 4.0))
    assert error.value.needed == 5.0
    assert error.value.time == 2
