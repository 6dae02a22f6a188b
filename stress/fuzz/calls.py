"""Cases of the Python interface: public functions, called with arguments that do not fit.

What a function says of them is raised by a `raise` of ours, or of JAX where the function is the
user's. An error that anything else raises was not meant for the user, and is a finding.
"""

from __future__ import annotations

import inspect
import linecache
import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import alpa
from alpa import passes, runtime
from alpa.dialects import ir
from stress.fuzz import values
from stress.fuzz.corpus import PROGRAM


def _train_step(w: Any, x: Any) -> Any:
    return w - 0.1 * jnp.ones_like(w), (x @ w).sum()


def _parallelized(**options: Any) -> Any:
    arguments = np.ones((4, 4), np.float32), np.ones((8, 4), np.float32)
    given: dict[str, Any] = {"cluster": "cpu:1x2", **options}
    return alpa.parallelize(_train_step, **given)(*arguments)


def _called(*arguments: Any) -> Any:
    return alpa.parallelize(_train_step, cluster="cpu:1x2")(*arguments)


_FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "parallelize": (
        _parallelized,
        {
            name: None
            for name in inspect.signature(alpa.parallelize).parameters
            # Ray takes seconds to start.
            if name not in ("fun", "executor", "workers", "elastic")
        },
    ),
    "a parallelised step": (_called, {"w": np.ones((4, 4)), "x": np.ones((8, 4))}),
    "passes.run": (passes.run, {"source": PROGRAM, "pipeline": "alpa{cluster=cpu:1x2}"}),
    "passes.register_sharding_rule": (
        passes.register_sharding_rule,
        {"target": "fuzz", "rule": lambda op: None},
    ),
    "save": (
        alpa.save,
        {"directory": "steps", "step": 1, "state": {"x": np.ones(4)}, "wait": True},
    ),
    "restore": (alpa.restore, {"directory": "steps", "init_fn": lambda: {"x": np.ones(4)}}),
    "latest_step": (alpa.latest_step, {"directory": "steps"}),
    "create_state": (
        alpa.create_state,
        {
            "init_fn": lambda: jnp.ones((4, 4)),
            "train_step": alpa.parallelize(_train_step, cluster="cpu:1x2"),
            "batch": np.ones((8, 4), np.float32),
        },
    ),
    "load": (runtime.load, {"planned": PROGRAM, "devices": None, "compiler_options": None}),
}
"""Public functions, and arguments that fit or, where there are none, may be left out."""


@dataclass(frozen=True, kw_only=True)
class CallCase:
    """A function, and the arguments that take the place of those that fit."""

    function: str
    arguments: dict[str, Any]

    seed = "calls"

    @property
    def label(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"{self.function}({given})"

    def run(self, folder: Path) -> int:
        """Runs in the folder, which is empty and the current one."""
        jax.config.update("jax_traceback_filtering", "off")  # to see what raises
        function, fitting = _FUNCTIONS[self.function]
        given = {name: it for name, it in fitting.items() if it is not None} | self.arguments
        positional = function in (_called, alpa.create_state)
        try:
            _ = function(*given.values()) if positional else function(**given)
        except (ir.MLIRError, OSError) as error:
            print(error, file=sys.stderr)
        except Exception as error:  # Any may be a finding; `is_said` judges it.
            if not is_said(error):
                raise
            print(error, file=sys.stderr)
        else:
            return 0
        return 1


def is_said(error: Exception) -> bool:
    """Whether an error has a sentence and comes from a `raise`."""
    frames = traceback.extract_tb(error.__traceback__)
    if any(frame.name == _train_step.__name__ for frame in frames):
        return True  # The user's function does not take such arguments.
    where = frames[-1]
    line = linecache.getline(where.filename, where.lineno or 0).strip()
    return line.startswith("raise ") and bool(str(error).strip())


def draw(number: str) -> CallCase:
    """Draws the case of a number."""
    generator = random.Random(number)
    function = generator.choice(list(_FUNCTIONS))
    names = list(_FUNCTIONS[function][1])
    chosen = generator.sample(names, generator.randint(1, min(2, len(names))))
    arguments = {name: values.argument(generator) for name in chosen}
    return CallCase(function=function, arguments=arguments)
