"""How a solver ends without a solution for a reason that is not the problem's."""

from __future__ import annotations


class VerificationError(RuntimeError):
    """A solution breaks a constraint, or its cost is not the stated one: a bug of the solver.

    It is not a ``ValueError``, which says that a problem has no solution.
    """


class SolverFailedError(RuntimeError):
    """The solver, or its process, gave neither a solution nor a proof that there is none."""
