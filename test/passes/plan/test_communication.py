"""What collectives and transfers take, and which op needs them."""

from __future__ import annotations

import pytest

from alpa.dialects import ir
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.collectives import LogicalMesh, all_gather, all_to_all, collective_permute
from alpa.passes.plan.communication import Communications, collective_seconds
from alpa.passes.plan.data import Program
from alpa.passes.plan.predicted_collectives import Collective
from alpa.passes.plan.report import PlanReport

WEIGHT = 64 * 64 * 4


@pytest.fixture(scope="module")
def found(two_stages: ir.Module, program: Program) -> Communications:
    return Communications.of(two_stages, program)


def test_the_costliest_come_first(found: Communications) -> None:
    seconds = [it.seconds for it in found.entries]
    assert seconds == sorted(seconds, reverse=True)
    assert min(seconds) > 0


def test_collectives_are_those_of_the_numbers(two_stages: ir.Module, found: Communications) -> None:
    def rows(entries: list[tuple[str, str, int, int]]) -> dict[tuple[str, str, int], int]:
        sums: dict[tuple[str, str, int], int] = {}
        for mesh, kind, size, count in entries:
            sums[mesh, kind, size] = sums.get((mesh, kind, size), 0) + count
        return sums

    report = PlanReport.of(two_stages)
    assert report.collectives
    assert rows([(it.mesh, it.kind, it.bytes, it.count) for it in report.collectives]) == rows(
        [(it.source, it.kind, it.bytes, it.count) for it in found.entries if not it.is_transfer]
    )


def test_transfers_are_those_of_the_numbers(two_stages: ir.Module, found: Communications) -> None:
    report = PlanReport.of(two_stages)
    mine = sorted(
        (it.source, it.target, it.bytes, it.count, it.seconds)
        for it in found.entries
        if it.is_transfer
    )
    assert mine == sorted(
        (it.source, it.target, it.bytes, 3, 3 * (it.seconds or 0.0)) for it in report.transfers
    )


def test_fragments_take_their_compute_and_their_collectives(
    program: Program, found: Communications
) -> None:
    for fragment, sent in zip(program.fragments, found.fragment_seconds, strict=True):
        assert fragment.compute_seconds is not None
        assert fragment.compute_seconds + sent <= fragment.seconds * (1 + 1e-9)
        if fragment.part == "update":
            assert sent > 0.5 * (fragment.seconds - fragment.compute_seconds)


def test_transfers_know_their_place(found: Communications) -> None:
    forward = next(it for it in found.entries if it.is_transfer and it.part == "forward")
    assert (forward.source, forward.target) == ("mesh_0", "mesh_1")
    assert (str(forward.place), forward.op) == ("model.py:7:3", "jvp(Model)/first/dot_general")


@pytest.mark.parametrize("kind", ["all-gather", "all-to-all", "collective-permute"])
def test_the_price_is_that_of_the_cost_model(kind: str) -> None:
    mesh = LogicalMesh.of(Cluster.parse("v100-16gb:1x4,ideal"), 1, 4, (2, 2), ("a", "b"))
    one = Collective(kind=kind, axes=("b",), devices=2, bytes=WEIGHT, count=3)
    price = {
        "all-gather": all_gather,
        "all-to-all": all_to_all,
        "collective-permute": collective_permute,
    }[kind]
    assert collective_seconds(one, mesh) == 3 * price(mesh, (1,), float(WEIGHT)) > 0
