"""Tracebacks of errors about the user's program: they end where the user calls Alpa."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import jax

from alpa.runtime.planning import PlanningError

P = ParamSpec("P")
R = TypeVar("R")


def ends_at_caller(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose PlanningErrors show no frames of Alpa: they hold the place in the program.

    As with jax's own frames, `jax.config.update("jax_traceback_filtering", "off")` shows them.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except PlanningError as error:
            config: Any = jax.config  # its types know no options
            if config.jax_traceback_filtering != "off":
                error.__traceback__ = error.__cause__ = None
                error.__suppress_context__ = True
            raise  # adds no frame of this function

    return call
