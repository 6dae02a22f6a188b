from __future__ import annotations

import random

from alpa.passes.solve.sharding.blame import Blame


def test_blame_is_passed_on_as_it_was_then():
    blame = Blame(range(4))
    blame.add(1, 0)
    blame.add(2, 1)
    blame.add(1, 3)
    assert blame.at(2) == {0, 1}
    assert blame.at(1) == {0, 3}
    assert blame.at(0) == set()


def test_blame_equals_sets_that_are_copied():
    for seed in range(20):
        rng = random.Random(seed)
        blame, sets = Blame(range(8)), [set[int]() for _ in range(8)]
        for _ in range(30):
            node, other = rng.sample(range(8), 2)
            blame.add(node, other)
            sets[node] |= {other, *sets[other]}
        assert [blame.at(node) for node in range(8)] == sets


def test_a_long_chain_of_blame_is_short():
    blame = Blame(range(10_000))
    for node in range(1, 10_000):
        blame.add(node, node - 1)
    assert blame.at(9_999) == {*range(9_999)}
