"""Cases of the runtime: a broken plan, as text, given to `load` or to `parallelize(plan=...)`."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path

import jax

from alpa.dialects import ir
from alpa.passes.pipelines.diagnostics import format_error
from alpa.runtime import LoadError, load
from alpa.runtime.prepared import PlanMismatchError
from stress.fuzz.corpus import Corpus, batch, init, training_step
from stress.fuzz.mutations import mutate, mutate_attribute


@dataclass(frozen=True, kw_only=True)
class PlanCase:
    """A plan to load; an error must be one that `load` or `parallelize` documents."""

    seed: str
    data: bytes
    by: str

    @property
    def label(self) -> str:
        return f'{self.by}("plan.mlir")'

    def run(self, folder: Path) -> int:
        """Runs in the folder, which is empty and the current one."""
        path = folder / "plan.mlir"
        path.write_bytes(self.data)
        try:
            if self.by == "load":
                load(Path(path.name))
            else:
                state = jax.eval_shape(lambda: init(1))
                _ = training_step(Path(path.name)).executable(state, batch())
        except ir.MLIRError as error:
            print(format_error(error), file=sys.stderr)
        except (LoadError, PlanMismatchError) as error:
            print(error, file=sys.stderr)
        except ValueError as error:
            # The error for too few devices has no class of its own.
            if not str(error).startswith("the plan needs "):
                raise
            print(error, file=sys.stderr)
        except jax.errors.JaxRuntimeError as error:
            print("XLA:", error, file=sys.stderr)
        else:
            return 0
        return 1


def draw(number: str, by: str, corpus: Corpus) -> PlanCase:
    """Draws the case of a number; `by` is load or parallelize."""
    generator = random.Random(number)
    seeds = corpus.of("plan")
    own = [seed for seed in seeds if seed.name == "plan.mlir"]
    chosen = generator.choice(own if by == "parallelize" or generator.random() < 0.5 else seeds)
    if generator.random() < 0.5:
        text = mutate_attribute(chosen.text, generator)
    else:
        text = mutate(chosen.text, [seed.text for seed in seeds], generator, most=2)
    return PlanCase(seed=chosen.name, data=text.encode(errors="replace"), by=by)
