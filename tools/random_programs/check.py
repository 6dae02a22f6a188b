"""One random program: planned by the pipeline, run in this process, and held against plain jax.

Two steps are run, the second one on what the first left on the meshes; each step of plain jax
starts from the state that the planned one started from.

A result is equal if `max|a-b| <= 1e-4 max|ref|`, or 2e-2 where 16-bit floats are computed with; a
new state is asked that of its change, its own rounding apart. In 64 bits the bound is 1e-9. What
does not hold it is held against a run in 64 bits: the distance of all values of its kind (results,
parameters, moments) to that run may be 4 times that of plain jax. Sums in another order differ in
their last bits, and adaptive optimizers and 16-bit floats make much of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import alpa
from alpa import runtime
from alpa.dialects import ir
from alpa.passes.analysis.planned import Program
from alpa.runtime.calls import Call, Parameters
from alpa.runtime.executable import Executable
from alpa.runtime.planning import Clock, PlanningError
from alpa.runtime.reference import compare
from alpa.tools.random_programs import options
from alpa.tools.random_programs.program import RandomProgram, draw
from alpa.tools.run_file import plan

STEPS = 2
_TIMES = 4  # the distance of plain jax to the run in 64 bits
_EXACT = 1e-9  # of what is computed in 64 bits
# Programs run twice: fewer LLVM passes compile several times as fast.
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

Load = Callable[[ir.Module], Executable]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a seed. `kind` is `passed`, `refused` or `failed`, `reason` its sentence."""

    seed: int
    kind: str
    reason: str = ""
    ops: tuple[str, ...] = ()
    program: str = ""
    dtype: str = ""
    optimizer: str = ""
    options: str = ""
    meshes: int = 0
    devices: int = 0
    micro_batches: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def load_fast(planned: ir.Module) -> Executable:
    """The executable of a planned module, soon compiled."""
    return runtime.load(planned, compiler_options=FAST_COMPILE)


def check(seed: int, *, widen: bool = False, load: Load = load_fast) -> Outcome:
    """Plans and runs the program of a seed; `widen` computes it in 64 bits.

    Needs as many devices in this process as the cluster has, 8 at most. Exceptions other than a
    refusal of the compiler are not caught: they are failures.
    """
    program = draw(seed).widened() if widen else draw(seed)
    chosen = options.draw(program)
    clock = Clock()
    known: dict[str, Any] = {
        "seed": seed,
        "ops": tuple(sorted(program.kinds)),
        "program": str(program),
        "dtype": program.dtype,
        "optimizer": program.optimizer if program.training else "",
        "options": " ".join(f"{name}={value}" for name, value in chosen.items()),
        "micro_batches": program.micro_batches,
    }
    with clock.phase("all"), _width(program.dtype == "f64"):
        try:
            planned, run = planned_step(program, chosen, load)
        except PlanningError as error:
            kind, reason, meshes = "refused", error.diagnostics[0].message, []
        else:
            reason = "; ".join(differences(program, run, Reference.of(program)))
            kind, meshes = "failed" if reason else "passed", planned.meshes
    return Outcome(
        kind=kind,
        reason=reason,
        meshes=len(meshes),
        devices=sum(len(mesh.devices) for mesh in meshes),
        seconds=clock.seconds["all"],
        **known,
    )


Run = Callable[[tuple[Any, ...]], Any]


def planned_step(
    program: RandomProgram, chosen: Mapping[str, str], load: Load = load_fast
) -> tuple[Program, Run]:
    """The planned program, and a function that runs a step of it.

    Raises:
        PlanningError: the compiler refuses the program.
    """
    function, arguments = program.function(), program.arguments(0)
    parallelized = alpa.parallelize(
        function,
        cluster=chosen["cluster"],
        num_micro_batches=program.micro_batches,
        batch_argnums=1,
        state_argnums=0 if program.training else None,
        donate_argnums=0 if program.training else None,
    )
    lowered = parallelized.lower(*arguments)
    module = plan(lowered.compiler_ir(), {**chosen, "processes": "0"}, Clock())
    executable = load(module)

    def run(arguments: tuple[Any, ...]) -> Any:
        call = Call.of(Parameters.of(function), arguments, {})
        return lowered.result(executable(*lowered.arguments(call)))

    return executable.program, run


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Steps of plain jax, in the types of the program and in 64 bits."""

    plain: Callable[..., Any]
    exact: Callable[..., Any]

    @classmethod
    def of(cls, program: RandomProgram) -> Reference:
        return cls(
            plain=jax.jit(program.looped_function(), compiler_options=FAST_COMPILE),
            exact=jax.jit(program.widened().looped_function(), compiler_options=FAST_COMPILE),
        )


def differences(program: RandomProgram, run: Run, reference: Reference) -> list[str]:
    """What is wrong with the results of `run`, step by step; nothing where all is equal."""
    plain, exact = reference.plain, reference.exact
    state, *others = program.arguments(0)
    for step in range(STEPS):
        old = jax.tree.map(np.asarray, state)
        others[0] = program.batch(step)
        given = old if step == 0 else state
        results = run((given, *others))
        found = _leaves(results)
        expected = _leaves(plain(old, *others))

        def wide(old: Any = old, others: Sequence[Any] = tuple(others)) -> dict[str, np.ndarray]:
            with jax.enable_x64(True):
                return _leaves(exact(*jax.tree.map(_widened, (old, *others))))

        before = _leaves([old]) if program.training else {}
        wrong = _compared(program, found, expected, before, wide)
        if wrong:
            return [f"step {step}: {one}" for one in wrong]
        if program.training:
            state = results[0]
    return []


def _compared(
    program: RandomProgram,
    found: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    before: Mapping[str, np.ndarray],
    exact: Callable[[], Mapping[str, np.ndarray]],
) -> list[str]:
    if found.keys() != expected.keys():
        return [f"the results are {', '.join(found)}, not {', '.join(expected)}"]
    wrong: dict[str, str] = {}
    for name, b in expected.items():
        a = found[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return [f"{name} is {a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"]
        if b.dtype.kind != "b" and not np.all(np.isfinite(b.astype(np.float64))):
            return [f"{name} of plain jax is not finite: the program is none to compare"]
        error, bound = _error(program, a, b, before.get(name))
        if not error <= bound:
            wrong[name] = f"{name} differs by {error:.3g}, allowed is {bound:.3g}"
    # Integers, and what is computed in 64 bits, have no excuse.
    if not wrong or program.dtype == "f64":
        return list(wrong.values())
    if any(expected[name].dtype.kind in "biu" for name in wrong):
        return list(wrong.values())
    true = exact()
    still: list[str] = []
    for kind in dict.fromkeys(_kind(name) for name in wrong):
        names = [n for n in expected if _kind(n) == kind and expected[n].dtype.kind not in "biu"]
        ours, theirs = (_distance(side, true, names) for side in (found, expected))
        if not ours <= _TIMES * theirs:
            still += [text for name, text in wrong.items() if _kind(name) == kind]
            still.append(f"distance to 64 bits {ours:.3g}, of plain jax {theirs:.3g}")
    return still


def _error(
    program: RandomProgram, a: np.ndarray, b: np.ndarray, old: np.ndarray | None
) -> tuple[float, float]:
    """max|a-b| and what it may be; of a new state that of its change."""
    rounding = 0.0
    if old is not None and b.dtype.kind not in "biu":
        rounding = float(jnp.finfo(b.dtype).eps * np.max(np.abs(b), initial=0))
        a, b, old = (array.astype(np.float64) for array in (a, b, old))
        a, b = a - old, b - old
    row = compare([a], [b], "bfloat16" if program.narrow else None)[0]
    bound = row.bound
    if program.dtype == "f64" and b.dtype.kind not in "biu":
        bound = _EXACT * float(np.max(np.abs(b), initial=0)) + _EXACT**2
    return row.error, bound + rounding


def _distance(
    side: Mapping[str, np.ndarray], true: Mapping[str, np.ndarray], names: Sequence[str]
) -> float:
    """Of several arrays together to the true ones, each counted relative to its size."""
    parts: list[float] = []
    for name in names:
        scale = float(np.max(np.abs(true[name]), initial=0)) or 1.0
        error = np.abs(side[name].astype(np.float64) - true[name]) / scale
        parts.append(float(np.sum(error**2)))
    return float(np.sqrt(sum(parts)))


def _kind(name: str) -> str:
    """Parameters, moments, and each other result, as they are judged together."""
    return "".join(name.split("]")[:2])


def _leaves(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def _widened(array: Any) -> np.ndarray:
    array = np.asarray(array)
    return array.astype(np.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array


def _width(wide: bool) -> AbstractContextManager[Any]:
    return jax.enable_x64(wide)
