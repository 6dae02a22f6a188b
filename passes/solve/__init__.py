"""The solvers: each has a Problem, ``solve`` and ``verify``, and knows no IR."""
