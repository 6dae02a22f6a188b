"""Searches a mesh's shardings as TAPAS does: what `solve/tapas` needs of a program, and its report.

GraphNodes are the nodes of the mesh's problem: a heavy op with the ops that follow it, or a tensor.
Decisions are the parameters with at least two dimensions: ranked candidates shard some of them
differently.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from alpa.dialects import ir
from alpa.dialects.mpmd_types import MeshTensor
from alpa.dialects.plan import SolverReport
from alpa.passes.base import NoRoomError, PassError, Remark
from alpa.passes.cost.device import size_text
from alpa.passes.sharding.mesh_problem import MeshProblem
from alpa.passes.sharding.shard_graph import SCALAR
from alpa.passes.solve.errors import SolverFailedError
from alpa.passes.solve.sharding.problem import InfeasibleError
from alpa.passes.solve.tapas.results import Found, NoCandidateFitsError
from alpa.passes.solve.tapas.settings import Settings
from alpa.passes.solve.tapas.widen import NotProvenError
from alpa.passes.workers import Workers

Answer = Callable[[Remark], tuple[list[int], SolverReport]]
"""Waits for the end of a search; gives a mesh's assignment, and what is proven about it."""
_MATRIX = 2
"""Dimensions of the least parameter whose sharding is a decision."""


def search(
    mesh: MeshProblem, settings: Settings, *, time_limit: float, gap: float, workers: Workers
) -> Answer:
    """Starts the search."""
    from alpa.passes.solve.tapas.search import solve  # noqa: PLC0415 - costs start-up time

    call = partial(
        solve,
        mesh.problem,
        decisions=decisions(mesh),
        tensors=tensors(mesh),
        settings=settings,
        time_limit=time_limit,
        gap=gap,
    )
    pending = workers.share(call)
    return partial(_answer, mesh, settings, pending)


def decisions(mesh: MeshProblem) -> list[int]:
    """The nodes of the mesh's parameters with at least two dimensions."""
    placed = mesh.graph.placed
    return sorted(
        {
            placed[value].node
            for value, kind in mesh.tensors().states.items()
            if kind == "parameter" and _rank(value) >= _MATRIX
        }
        - {SCALAR}
    )


def tensors(mesh: MeshProblem) -> list[int]:
    """The nodes that are no ops."""
    return sorted({placed.node for placed in mesh.graph.tensors.values()} - {SCALAR})


def _rank(value: ir.Value) -> int:
    return MeshTensor.from_type(value.type).type.rank


def _answer(
    mesh: MeshProblem, settings: Settings, pending: Future[Found], remark: Remark
) -> tuple[list[int], SolverReport]:
    try:
        found = pending.result()
    except NoCandidateFitsError as error:
        device = mesh.graph.cluster.device
        raise NoRoomError(
            mesh.function,
            f"none of {error.ranked} ranked candidates fits on {mesh.name}: the smallest needs "
            f"{size_text(error.needed)} per device, {device.name} has {size_text(error.limit)}; "
            "intra=auto searches for shardings within the memory",
            missing=error.needed / error.limit - 1,
        ) from error
    except NotProvenError as error:
        raise PassError(
            mesh.function,
            f"the exhaustive search of {mesh.name} proves no ranked list: {error}; raise "
            "time-limit if time ended, or take tapas-variant=pruned, or intra=auto with its gap",
        ) from error
    except (InfeasibleError, SolverFailedError) as error:
        raise PassError(mesh.function, f"no sharding for {mesh.name}: {error}") from error
    remark(mesh.function.location, f"{mesh.name}: {text(found, settings)}")
    solution = found.solution
    tied = found.searched_nodes < len(solution.choice)
    report = mesh.report("tapas", solution, is_whole=not tied, folded=solution if tied else None)
    return list(solution.choice), report


def text(found: Found, settings: Settings) -> str:
    """The statistics of a search: its mining, and the branches of its decision trees."""
    rank = [one.choice for one in found.ranked].index(found.solution.choice) + 1
    counts = found.counts
    return (
        f"tapas took candidate {rank} of {len(found.ranked)} for {found.searched_nodes} nodes of "
        f"{_searched(found, settings)}; {counts.candidates} candidates, {counts.valid} valid, "
        f"{counts.pruned} pruned"
    )


def _searched(found: Found, settings: Settings) -> str:
    mined = found.mined
    if mined is None:
        return f"the whole problem, proven with a width of {found.width}"
    of = (
        f"{mined.num_unique} unique subgraphs, mined in {found.mining_seconds:.2g} s with "
        f"min-support={mined.min_support}"
    )
    if settings.min_support == "auto" and mined.missed_ends:
        of += f" ({mined.layers} layers, but the first and the last one differ from the others)"
    return of
