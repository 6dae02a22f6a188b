"""What a solver says when its own answer fails its check."""

from __future__ import annotations


class VerificationError(RuntimeError):
    """A solution breaks a constraint, or does not cost what is said: a bug of the solver.

    It is no ``ValueError``, which says that a problem has no solution, so that nobody takes one for
    the other.
    """
