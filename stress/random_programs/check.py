"""One random program: planned by the pipeline, run in this process, and compared with plain jax.

Two steps are run, the second one on what the first left on the meshes; each step of plain jax
starts from the state that the planned one started from.

A result is equal if `max|a-b| <= 1e-4 max|ref|`, or 2e-2 where 16-bit floats are computed with; a
new state is asked that of its change, its own rounding apart. In 64 bits the bound is 1e-9, unless
random numbers are drawn that 32 bits round. What does not hold it is held against a run in 64
bits: the distance of all values of its kind (results, parameters, moments) to that run may be 4
times that of plain jax. Sums in another order differ in their last bits, and adaptive optimizers
and 16-bit floats make much of that.

What is refused has to be refused: the program says whether its micro-batches mix samples
(`truth.py`). A refusal names a place and what to do, and for a share of the refused programs that
is done: with one micro-batch they equal plain jax, and where each micro-batch may be a batch of its
own, they equal plain jax that goes from one to the next.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import alpa
from alpa import runtime
from alpa.dialects import ir
from alpa.dialects.attributes import MICRO_BATCHES
from alpa.passes.pipelines.clock import Clock
from alpa.passes.plan.data import Program
from alpa.runtime.calls import Call, Parameters
from alpa.runtime.comparison import difference
from alpa.runtime.executable import Executable
from alpa.runtime.planning import PlanningError, run_pass
from stress.random_programs import options
from stress.random_programs.program import RandomProgram, draw
from stress.random_programs.truth import Truth

STEPS = 2
_TIMES = 4  # the distance of plain jax to the run in 64 bits
_EXACT = 1e-9  # of what is computed in 64 bits
# Programs run twice: fewer LLVM passes compile several times as fast.
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

Load = Callable[[ir.Module], Executable]


Kind = Literal[
    "passed",
    "refused as expected",
    "refused without need",
    "wrong",
    "traceback",
    "too small to cut",
]
_TOO_SMALL = re.compile(r"cannot (cut \d+ |make \d+ stages )")
_PLACE = re.compile(r"\.py:\d+")
_REMEDIES = (
    "with 1 micro-batch",
    "num_micro_batches=1",
    'micro_batches="independent"',
    "batch_argnums",
    "write it without Python loops or branches over the size of the batch",
)
_TRIED = 3
"""One of so many refused programs is run with one micro-batch, another with independent ones."""


class RefusedError(Exception):
    """A program is refused; `message` is the sentence, with its place in front."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @property
    def is_of_size(self) -> bool:
        """Whether the program has too few ops, or layers, for the options that were drawn."""
        return _TOO_SMALL.search(self.message) is not None

    @property
    def is_documented(self) -> bool:
        """Whether the sentence names a place, or an option, and says what to do."""
        remedy = any(text in self.message for text in _REMEDIES)
        return remedy and (_PLACE.search(self.message) is not None or "batch_arg" in self.message)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a seed: its kind, and the sentence that says why."""

    seed: int
    kind: Kind
    reason: str = ""
    remedy: str = ""
    """what a refused program was run with"""
    truth: str = ""
    mode: str = ""
    features: tuple[str, ...] = ()
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


def check(seed: int, *, widen: bool = False, load: Load | None = None) -> Outcome:
    """Plans and runs the program of a seed; `widen` computes it in 64 bits.

    Without `load`, XLA compiles fast, and where a result is wrong once more as it does for users:
    at level 0 it has miscompiled a fragment (seed 1752, on CPUs).

    Needs as many devices in this process as the cluster has, 8 at most. Exceptions other than a
    refusal are not caught: they are failures.
    """
    found = _check(seed, widen, load or load_fast)
    if found.kind != "wrong" or load is not None:
        return found
    again = _check(seed, widen, runtime.load)
    if again.kind == "wrong":
        return again
    return replace(again, reason=f"{again.reason} (XLA compiles it wrongly at level 0)".strip())


def _check(seed: int, widen: bool, load: Load) -> Outcome:
    program = draw(seed).widened() if widen else draw(seed)
    chosen = options.draw(program)
    clock = Clock()
    known: dict[str, Any] = {
        "seed": seed,
        "truth": str(program.truth),
        "mode": program.features.mode,
        "features": program.features.names,
        "ops": tuple(sorted(program.kinds)),
        "program": str(program),
        "dtype": program.dtype,
        "optimizer": program.optimizer if program.training else "",
        "options": " ".join(f"{name}={value}" for name, value in chosen.items()),
        "micro_batches": program.micro_batches,
    }
    with clock.phase("all"), _width(program.dtype == "f64"):
        try:
            step = planned_step(program, chosen, load)
        except RefusedError as error:
            found, meshes = _judged(program, chosen, load, error), []
        else:
            reason = "; ".join(wrong_in(program, step))
            found = {"kind": "wrong" if reason else "passed", "reason": reason}
            meshes = step.program.meshes
    return Outcome(
        meshes=len(meshes),
        devices=sum(len(mesh.devices) for mesh in meshes),
        seconds=clock.seconds["all"],
        **found,
        **known,
    )


Run = Callable[[tuple[Any, ...]], Any]


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A planned program, a function that runs a step of it, and what is claimed of its
    micro-batches."""

    program: Program
    run: Run
    claim: str


def wrong_in(program: RandomProgram, step: PlannedStep) -> list[str]:
    """What is claimed of a planned program and not true, or differs from plain jax."""
    claims = {
        Truth.EXACT: ["exact"],
        Truth.NOISE: ["exact, random numbers per micro-batch"],
        # What mixes and is equal all the same has a claim of some kind.
        Truth.EITHER: ["exact", "exact, random numbers per micro-batch"],
        Truth.MIXED: ["exact", "exact, random numbers per micro-batch"],
    }[program.truth]
    if program.features.mode == "independent":
        claims = ["independent"]
    if program.micro_batches > 1 and step.claim not in claims:
        return [f"the plan says {step.claim!r}, and it is {' or '.join(claims)}"]
    whole = program
    if step.claim == "exact":
        # Where other arrays were taken for the samples, nothing is drawn for each micro-batch.
        whole = program.like(micro_batches=1, mode="exact")
    return differences(program, step.run, Reference.of(whole))


def _judged(
    program: RandomProgram, chosen: Mapping[str, str], load: Load, error: RefusedError
) -> dict[str, str]:
    """What a refusal is, and whether its remedy works, as fields of an outcome."""
    if error.is_of_size:
        return {"kind": "too small to cut", "reason": error.message}
    if not error.is_documented:
        text = f"refused without a place and a remedy: {error.message}"
        return {"kind": "traceback", "reason": text}
    if program.truth < Truth.EITHER:
        return {"kind": "refused without need", "reason": error.message}
    found = {"kind": "refused as expected", "reason": error.message}
    remedies = {0: program.like(micro_batches=1, mode="exact")}
    if program.features.looped:
        remedies[1] = program.like(micro_batches=program.micro_batches, mode="independent")
    other = remedies.get(program.seed % _TRIED)
    if other is None:
        return found
    number = str(other.micro_batches)
    name = "1 micro-batch" if number == "1" else "independent"
    try:
        step = planned_step(other, {**chosen, "num-micro-batches": number}, load)
    except RefusedError as again:
        if again.is_of_size or (other.truth >= Truth.EITHER and again.is_documented):
            return found
        return {**found, "kind": "wrong", "reason": f"refused with {name}, too: {again.message}"}
    wrong = wrong_in(other, step)
    if wrong:
        return {**found, "kind": "wrong", "reason": f"with {name}: {'; '.join(wrong)}"}
    return {**found, "remedy": name}


def _state_argnums(program: RandomProgram) -> Any:
    """What is said of the state: of a forward pass that there is none, where anything is said."""
    if not program.features.layout.said:
        return None
    return 0 if program.training else ()


def planned_step(
    program: RandomProgram, chosen: Mapping[str, str], load: Load = load_fast
) -> PlannedStep:
    """The planned program, and a function that runs a step of it.

    Raises:
        RefusedError: the program is refused.
    """
    function, arguments = program.function(), program.arguments(0)
    layout = program.features.layout
    parallelized = alpa.parallelize(
        function,
        cluster=chosen["cluster"],
        num_micro_batches=program.micro_batches,
        micro_batches=program.features.mode,
        batch_argnums=layout.batch_argnums,
        state_argnums=_state_argnums(program),
        donate_argnums=0 if program.training else None,
    )
    try:
        lowered = parallelized.lower(*arguments)
    except ValueError as error:
        raise RefusedError(str(error)) from error
    settings = {**chosen, "processes": "0"}
    module = lowered.compiler_ir()
    try:
        run_pass("alpa", settings, module, Clock())
    except PlanningError as error:
        raise RefusedError(str(error.diagnostics[0])) from error
    with module.context:
        said = module.operation.attributes.get(MICRO_BATCHES)
        claim = "" if said is None else ir.StringAttr(said).value
    executable = load(module)

    def run(arguments: tuple[Any, ...]) -> Any:
        call = Call.of(Parameters.of(function), arguments, {})
        return lowered.result(executable(*lowered.arguments(call)))

    return PlannedStep(program=executable.program, run=run, claim=claim)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Steps of plain jax, in the types of the program and in 64 bits."""

    plain: Callable[..., Any]
    exact: Callable[..., Any]

    @classmethod
    def of(cls, program: RandomProgram) -> Reference:
        return cls(
            plain=jax.jit(program.reference(), compiler_options=FAST_COMPILE),
            exact=jax.jit(program.widened().reference(), compiler_options=FAST_COMPILE),
        )


def differences(program: RandomProgram, run: Run, reference: Reference) -> list[str]:
    """What is wrong with the results of `run`, step by step; nothing where all is equal."""
    plain, exact = reference.plain, reference.exact
    state = program.arguments(0)[0]
    for step in range(STEPS):
        old = jax.tree.map(_host, state)
        others = program.arguments(step)[1:]
        given = jax.tree.map(_host, state) if step == 0 else state  # donated
        results = run((given, *others))
        found = _leaves(results)
        expected = _leaves(plain(old, *others))

        def wide(old: Any = old, others: Sequence[Any] = others) -> dict[str, np.ndarray]:
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
    # Random numbers are drawn in 32 bits, and rounded: only bits are the same in all programs.
    exact = program.dtype == "f64" and program.features.keys.kind == "bits"
    if exact and b.dtype.kind not in "biu":
        row = difference(a, b, old=old, relative=_EXACT)
        return row.error, row.bound + _EXACT**2
    row = difference(a, b, old=old, dtype="bfloat16" if program.narrow else None)
    return row.error, row.bound


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
    return {jax.tree_util.keystr(path): _words(leaf) for path, leaf in leaves}


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _words(leaf: Any) -> np.ndarray:
    """An array on the host; a typed key as its words."""
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _host(leaf: Any) -> Any:
    """An array on the host; a typed key as a new one of its words."""
    return jax.random.wrap_key_data(jnp.asarray(_words(leaf))) if _is_key(leaf) else _words(leaf)


def _widened(array: Any) -> Any:
    if _is_key(array):
        return array
    array = np.asarray(array)
    return array.astype(np.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array


def _width(wide: bool) -> AbstractContextManager[Any]:
    return jax.enable_x64(wide)
