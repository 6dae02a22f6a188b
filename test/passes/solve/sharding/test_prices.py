from __future__ import annotations

from math import inf

import numpy as np

from alpa.passes.solve.sharding.prices import Plane, next_prices


def test_without_planes_the_bound_is_what_is_enough():
    found = next_prices([], [0, 1], 10.0, np.array([0.5, 0.0]), 3.0, 7.0, 100.0)
    assert found is not None
    assert found[0] == 7.0
    assert next_prices([], [0, 1], 10.0, np.array([0.5, 0.0]), 3.0, inf, 100.0) is None


def test_without_planes_and_times_the_bound_is_what_is_enough():
    found = next_prices([], [], 10.0, np.array([]), 3.0, 7.0, 100.0)
    assert found is not None
    assert (found[0], found[1].size) == (7.0, 0)
    assert next_prices([], [], 10.0, np.array([]), 3.0, inf, 100.0) is None


def test_the_prices_are_where_the_planes_cross():
    """v(price) <= min(2 + 4 price, 8 - 2 price): highest, 6, at a price of 1."""
    planes = [Plane(2.0, np.array([14.0])), Plane(8.0, np.array([8.0]))]
    found = next_prices(planes, [0], 10.0, np.array([0.0]), 2.0, inf, 100.0)
    assert found is not None
    upper, prices = found
    assert abs(upper - 6.0) < 1e-6
    assert 0.8 < prices[0] <= 1.0 + 1e-6  # The level is a part of what the planes promise.
