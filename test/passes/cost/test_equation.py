from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.collectives import (
    LogicalMesh,
    all_gather,
    all_reduce,
    all_to_all,
    collective_permute,
    reduce_scatter,
)
from alpa.passes.cost.device import Cost, Link
from alpa.passes.cost.equation import Equation, measured_epsilon, parse_epsilon

LINK = Link(bandwidth=100.0, latency=0.5)


def test_latency_grows_with_the_workers_and_transmission_with_the_message() -> None:
    equation = Equation(gamma=0.5, epsilon={"all-reduce": 0.25})
    # Equation 2: 0.5 s * 4; equation 3: 200 bytes / 100, times epsilon, times gamma if backward.
    assert equation.seconds("all-gather", LINK, 4, 200.0, backward=False) == 2.0 + 2.0
    assert equation.seconds("all-gather", LINK, 4, 200.0, backward=True) == 2.0 + 1.0
    assert equation.seconds("all-reduce", LINK, 4, 200.0, backward=False) == 2.0 + 0.5
    assert equation.seconds("all-reduce", LINK, 4, 200.0, backward=True) == 2.0 + 0.25
    assert equation.seconds("all-reduce", LINK, 1, 200.0, backward=True) == 0.0
    many = equation.seconds("all-to-all", LINK, 2, np.array([0.0, 100.0]), backward=False)
    assert many.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gamma": 0.0}, "gamma must be greater than 0 and at most 1, not 0"),
        ({"gamma": 1.5}, "gamma must be greater than 0 and at most 1, not 1.5"),
        ({"epsilon": {"all-reduce": -1.0}}, "all-reduce must be greater than 0"),
        ({"epsilon": {"broadcast": 1.0}}, "unknown collective 'broadcast'; known: all-gather"),
    ],
)
def test_coefficients_are_checked(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Equation(**wrong)  # pyright: ignore[reportArgumentType]


def test_texts_give_coefficients() -> None:
    assert parse_epsilon("") == {}
    assert parse_epsilon("all-reduce:0.5,all-gather:1") == {"all-reduce": 0.5, "all-gather": 1.0}
    with pytest.raises(ValueError, match="'all-reduce' is no coefficient of a collective"):
        parse_epsilon("all-reduce")
    with pytest.raises(ValueError, match="'half' is no number: 'all-reduce:half'"):
        parse_epsilon("all-reduce:half")


def test_measured_coefficients_are_shares_of_the_slowest_collective() -> None:
    link = replace(
        LINK,
        collectives={
            "all-reduce": {2: Cost(1.0, 9.0), 8: Cost(1.0, 2.0)},
            "all-gather": {8: Cost(0.0, 4.0)},
        },
    )
    assert measured_epsilon(link) == {"all-reduce": 0.5, "all-gather": 1.0}
    with pytest.raises(ValueError, match="no measured collectives; run alpa-calibrate"):
        measured_epsilon(LINK)


def test_a_mesh_with_an_equation_prices_all_collectives_by_it() -> None:
    equation = Equation(gamma=0.5, epsilon={"all-reduce": 0.5})
    cluster = replace(Cluster.parse("h100:2x4"), equation=equation)
    mesh = LogicalMesh.of(cluster, 2, 4, (2, 4))
    fast, slow = mesh.links[1], mesh.links[0]
    assert all_gather(mesh, 1, 1e6) == pytest.approx(4 * fast.latency + 1e6 / fast.bandwidth)
    assert reduce_scatter(mesh, 1, 1e6) == all_gather(mesh, 1, 1e6)
    assert all_to_all(mesh, 1, 1e6) == all_gather(mesh, 1, 1e6)
    assert collective_permute(mesh, (1,), 1e6) == all_gather(mesh, 1, 1e6)
    assert all_reduce(mesh, 1, 1e6) == pytest.approx(4 * fast.latency + 0.5e6 / fast.bandwidth)
    # Over both axes it is one message to all devices, over the slower link.
    assert all_reduce(mesh, (0, 1), 1e6) == pytest.approx(8 * slow.latency + 0.5e6 / slow.bandwidth)
    backward = replace(mesh, backward=True)
    assert all_reduce(backward, 1, 1e6) == pytest.approx(4 * fast.latency + 0.25e6 / fast.bandwidth)
