"""Shortens tracebacks of errors about the user's program: they end at the user's call of Alpa."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import jax

from alpa.runtime.planning import PlanningError

P = ParamSpec("P")
R = TypeVar("R")


def ends_at_caller(function: Callable[P, R]) -> Callable[P, R]:
    """Hides Alpa's frames in the PlanningErrors of a function: they hold the place in the program.

    `jax.config.update("jax_traceback_filtering", "off")` shows them, as it shows JAX's frames.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except PlanningError as error:
            config: Any = jax.config  # its type has no options
            if config.jax_traceback_filtering != "off":
                error.__traceback__ = error.__cause__ = None
                error.__suppress_context__ = True
            raise  # adds no frame of this function

    return call
