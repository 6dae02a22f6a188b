"""The stage DP over orders of hosts, for costs that are found as its cuts use them."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa.passes.solve.stages.placement import orders
from alpa.passes.solve.stages.problem import (
    NoCutError,
    NoCutInMemoryError,
    Problem,
    Solution,
    Stage,
)
from alpa.passes.solve.stages.stage_dp import solve
from alpa.passes.stages.host_orders import HostOrders, NoFasterCutError
from test.passes.solve.stages.test_stage_dp_groups import KINDS, problems


def two_devices() -> Problem:
    """Two layers on a device of each of two kinds."""
    return Problem(
        groups=next(orders([(1, 1), (1, 1)])),
        submeshes=((1, 1), (1, 1)),
        kind_of=(0, 1),
        t=np.triu(np.ones((2, 2)))[:, :, None] * [3.0, 2.0],
        u=np.zeros((2, 2, 2)),
        max_in_flight=np.full((2, 2, 2), 64),
        c=np.zeros((2, 2, 3)),
        back=np.zeros((2, 2, 3)),
        num_micro_batches=8,
        schedule="1f1b",
    )


def best_of(problem: Problem, kinds: list[tuple[int, int]]) -> float:
    """The least objective of all orders; inf if there is no cut."""
    found = [inf]
    for groups in orders(kinds):
        try:
            found.append(solve(replace(problem, groups=groups)).objective)
        except NoCutError:
            continue
    return min(found)


@settings(max_examples=150, deadline=None)
@given(problem=problems(), share=st.floats(0.1, 1), within=st.sampled_from([0.7, 1.2, inf]))
def test_the_cut_of_found_costs_is_the_best(problem: Problem, share: float, within: float) -> None:
    kinds = next(
        kinds
        for kinds in KINDS
        if {(group.kind, group.devices_per_host) for group in problem.groups}
        == {(kind, devices) for kind, (_, devices) in enumerate(kinds)}
        and sum(group.num_devices for group in problem.groups) == sum(n * m for n, m in kinds)
    )
    best = best_of(problem, kinds)
    within *= best if best < inf else 1.0
    known = np.zeros(len(problem.submeshes), bool)
    hosts, found, first = HostOrders(orders(kinds), within), None, None

    def is_known(stages: tuple[Stage, ...]) -> bool:
        return all(known[stage.submesh] for stage in stages)

    def current() -> Problem:
        """With bounds where costs are not known."""
        even = np.where(problem.t < inf, problem.t, 1.0)
        return replace(
            problem,
            t=np.where(known, problem.t, share * even),
            max_in_flight=np.where(known, problem.max_in_flight, 10**6),
        )

    refused: float | None = None
    try:
        while found is None or not is_known(found.stages):
            if found is not None:
                known[[stage.submesh for stage in found.stages]] = True
            found = hosts.solve(current(), is_known)
            first = first or found
            if found.objective >= within:
                break
    except NoCutError:
        refused = inf
    except NoFasterCutError as error:
        refused = error.bound
    if refused is not None:
        assert within <= refused <= best * (1 + 1e-9) or refused == best
        return
    assert found is not None
    if found.objective >= within:
        assert best >= found.objective * (1 - 1e-9)
        return
    assert isinstance(first, Solution)
    assert first.objective <= best * (1 + 1e-9)
    assert found.objective == pytest.approx(best, rel=1e-9)


def test_an_order_is_followed_until_its_cut_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are only compared with that cut."""
    problem = two_devices()
    seen: list[tuple[str, tuple[int, ...]]] = []

    def solved(problem: Problem) -> Solution:
        seen.append(("solve", tuple(group.kind for group in problem.groups)))
        return solve(problem)

    def below(problem: Problem, enough: float) -> Solution | None:
        seen.append(("below", tuple(group.kind for group in problem.groups)))
        found = solve(problem)
        return found if found.objective < enough else None

    monkeypatch.setattr("alpa.passes.solve.stages.stage_dp.solve", solved)
    monkeypatch.setattr("alpa.passes.solve.stages.stage_dp.solve_below", below)
    hosts = HostOrders(orders([(1, 1), (1, 1)]), inf)
    for are_known, expected in (
        (False, [("solve", (0, 1)), ("below", (1, 0))]),
        (False, [("solve", (0, 1))]),
        (True, [("solve", (0, 1)), ("below", (1, 0))]),
    ):
        seen.clear()
        hosts.solve(problem, lambda _, are_known=are_known: are_known)
        assert seen == expected


def test_memory_is_reported_where_any_order_lacks_it() -> None:
    """Also if another order, without a plan, was refused later."""
    problem = two_devices()
    hosts = HostOrders(orders([(1, 1), (1, 1)]), inf)
    hosts.solve(problem, lambda _: False)
    full = replace(problem, max_in_flight=np.zeros((2, 2, 2), int))
    none = replace(problem, t=np.full((2, 2, 2), inf))
    problems = iter([full, none])

    def solved(_: Problem) -> Solution:
        return solve(next(problems))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("alpa.passes.solve.stages.stage_dp.solve", solved)
        with pytest.raises(NoCutInMemoryError, match="fits into memory"):
            hosts.solve(problem, lambda _: True)
