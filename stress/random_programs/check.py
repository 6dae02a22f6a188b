"""Plans one random program, runs it in this process, and compares it with plain JAX.

Two steps run; the second uses the state that the first left on the meshes. Each step of plain JAX
starts from the state of the planned step.

A result is equal if `max|a-b| <= 1e-4 max|ref|`, or 2e-2 if the program computes in 16 bits. For a
new state, the bound applies to its change, without its own rounding. In 64 bits the bound is 1e-9,
unless the program draws random numbers, which 32 bits round. Results beyond the bound are compared
with a run in 64 bits: the distance of all values of their kind (results, parameters, moments) to
that run may be 4 times that of plain JAX. Sums in another order differ in their last bits, and
adaptive optimizers and 16-bit floats amplify this.

Refusals must be justified: the program says whether its micro-batches mix samples (`truth.py`). A
refusal must name a place and a remedy, and for a share of the refused programs the remedy is tried.
With one micro-batch they must equal plain JAX. Where each micro-batch may be a batch of its own,
they must equal a loop of plain JAX over the micro-batches.
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
from stress.random_programs.draw import draw
from stress.random_programs.program import RandomProgram
from stress.random_programs.truth import Truth

STEPS = 2
_TIMES = 4  # the distance of plain JAX to the run in 64 bits
_EXACT = 1e-9  # the bound in 64 bits
# Programs run only twice, and with fewer LLVM passes they compile several times as fast.
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
"""One in so many refused programs runs with one micro-batch, another with independent ones."""


class RefusedError(Exception):
    """A program is refused; `message` is the error with its place."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @property
    def is_of_size(self) -> bool:
        """Whether the program has too few ops, or layers, for the drawn options."""
        return _TOO_SMALL.search(self.message) is not None

    @property
    def is_documented(self) -> bool:
        """Whether the message names a place, or an option, and a remedy."""
        remedy = any(text in self.message for text in _REMEDIES)
        return remedy and (_PLACE.search(self.message) is not None or "batch_arg" in self.message)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a seed: its kind, and a sentence with the reason."""

    seed: int
    kind: Kind
    reason: str = ""
    remedy: str = ""
    """the remedy that a refused program ran with"""
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
    """The executable of a planned module, compiled quickly."""
    return runtime.load(planned, compiler_options=FAST_COMPILE)


def check(seed: int, *, widen: bool = False, load: Load | None = None) -> Outcome:
    """Plans and runs the program of a seed; `widen` computes it in 64 bits.

    Without `load`, XLA compiles at level 0. After a wrong result, it compiles again as for users,
    because level 0 has miscompiled a fragment (seed 1752, on CPUs).

    Needs as many devices in this process as the cluster has, at most 8. Exceptions other than a
    refusal are failures and are not caught.
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
    """A planned program, a function that runs a step of it, and the claim about its
    micro-batches."""

    program: Program
    run: Run
    claim: str


def wrong_in(program: RandomProgram, step: PlannedStep) -> list[str]:
    """Lists false claims of a planned program, and differences from plain JAX."""
    claims = {
        Truth.EXACT: ["exact"],
        Truth.NOISE: ["exact, random numbers per micro-batch"],
        # A program that mixes samples but is equal can have any of these claims.
        Truth.EITHER: ["exact", "exact, random numbers per micro-batch"],
        Truth.MIXED: ["exact", "exact, random numbers per micro-batch"],
    }[program.truth]
    if program.features.mode == "independent":
        claims = ["independent"]
    if program.micro_batches > 1 and step.claim not in claims:
        return [f"the plan says {step.claim!r}, but it is {' or '.join(claims)}"]
    whole = program
    if step.claim == "exact":
        # If other arrays were taken for the samples, nothing is drawn per micro-batch.
        whole = program.like(micro_batches=1, mode="exact")
    return differences(program, step.run, Reference.of(whole))


def _judged(
    program: RandomProgram, chosen: Mapping[str, str], load: Load, error: RefusedError
) -> dict[str, str]:
    """Classifies a refusal and tries its remedy; returns fields of an outcome."""
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
    kept = {**chosen, "num-micro-batches": number}
    if number == "1":  # Not every schedule admits it.
        kept.pop("schedule", None)
    try:
        step = planned_step(other, kept, load)
    except RefusedError as again:
        if again.is_of_size or (other.truth >= Truth.EITHER and again.is_documented):
            return found
        return {**found, "kind": "wrong", "reason": f"refused with {name}, too: {again.message}"}
    wrong = wrong_in(other, step)
    if wrong:
        return {**found, "kind": "wrong", "reason": f"with {name}: {'; '.join(wrong)}"}
    return {**found, "remedy": name}


def _state_argnums(program: RandomProgram) -> Any:
    """The declared state; for a forward pass with declarations, that there is none."""
    if not program.features.layout.said:
        return None
    return 0 if program.training else ()


def planned_step(
    program: RandomProgram, chosen: Mapping[str, str], load: Load = load_fast
) -> PlannedStep:
    """Plans the program; returns it with a function that runs a step of it.

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
    """Steps of plain JAX, in the types of the program and in 64 bits."""

    plain: Callable[..., Any]
    exact: Callable[..., Any]

    @classmethod
    def of(cls, program: RandomProgram) -> Reference:
        return cls(
            plain=jax.jit(program.reference(), compiler_options=FAST_COMPILE),
            exact=jax.jit(program.widened().reference(), compiler_options=FAST_COMPILE),
        )


def differences(program: RandomProgram, run: Run, reference: Reference) -> list[str]:
    """Lists what is wrong with the results of `run`, step by step; empty if all are equal."""
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
            return [f"{name} of plain JAX is not finite: the program cannot be compared"]
        error, bound = _error(program, a, b, before.get(name))
        if not error <= bound:
            wrong[name] = f"{name} differs by {error:.3g}, allowed is {bound:.3g}"
    # Integers and 64-bit results must be within the bound.
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
            still.append(f"distance to 64 bits {ours:.3g}, of plain JAX {theirs:.3g}")
    return still


def _error(
    program: RandomProgram, a: np.ndarray, b: np.ndarray, old: np.ndarray | None
) -> tuple[float, float]:
    """max|a-b| and its bound; for a new state, those of its change."""
    # Random numbers are drawn in 32 bits, and rounded: only the bits are the same in all programs.
    exact = program.dtype == "f64" and program.features.keys.kind == "bits"
    if exact and b.dtype.kind not in "biu":
        row = difference(a, b, old=old, relative=_EXACT)
        return row.error, row.bound + _EXACT**2
    row = difference(a, b, old=old, dtype="bfloat16" if program.narrow else None)
    return row.error, row.bound


def _distance(
    side: Mapping[str, np.ndarray], true: Mapping[str, np.ndarray], names: Sequence[str]
) -> float:
    """The distance of several arrays together to the true ones, each relative to its size."""
    parts: list[float] = []
    for name in names:
        scale = float(np.max(np.abs(true[name]), initial=0)) or 1.0
        error = np.abs(side[name].astype(np.float64) - true[name]) / scale
        parts.append(float(np.sum(error**2)))
    return float(np.sqrt(sum(parts)))


def _kind(name: str) -> str:
    """The group of a result that is judged together: parameters, moments, or the result itself."""
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
    """An array on the host; a typed key is made again from its words."""
    return jax.random.wrap_key_data(jnp.asarray(_words(leaf))) if _is_key(leaf) else _words(leaf)


def _widened(array: Any) -> Any:
    if _is_key(array):
        return array
    array = np.asarray(array)
    return array.astype(np.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array


def _width(wide: bool) -> AbstractContextManager[Any]:
    return jax.enable_x64(wide)
