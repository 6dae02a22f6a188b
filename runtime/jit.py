"""`alpa.parallelize`: `jax.jit` for a cluster.

    @alpa.parallelize(cluster="cpu:2x4", num_micro_batches=4)
    def train_step(state, batch):
        loss, grads = alpa.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    state, loss = train_step(state, batch)

The first call traces the function, plans it for the cluster, compiles its stages and runs them.
Later calls with the same structure, shapes and static arguments only run. Results stay on their
meshes, and the next step reads them there. `runtime.step` lowers the function;
`runtime.step_roles` finds state, batch and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from pathlib import Path
from types import MethodType
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar, Unpack, cast, overload

from alpa.dialects.plan import AccumulateDtype
from alpa.passes.base import check_kind
from alpa.passes.cost.cluster import Cluster, parse_cluster
from alpa.passes.sharding.baselines import Intra
from alpa.passes.stages.remat import Remat
from alpa.runtime.calls import Parameters
from alpa.runtime.choices import read_hints
from alpa.runtime.loading import Folders, check_run_options
from alpa.runtime.option_checks import (
    check_count,
    check_count_or_auto,
    check_folders,
    schedule_text,
)
from alpa.runtime.parallelized import Method, Parallelized
from alpa.runtime.pjrt import CompilerOptions, Device
from alpa.runtime.planning import Count, Inter, Settings
from alpa.runtime.sharing import Family
from alpa.runtime.step import LossReduction, MicroBatches
from alpa.runtime.step_roles import Declared
from alpa.runtime.target import Target
from alpa.runtime.workers.options import WorkerOptions

Chosen = int | str | Iterable[int] | Iterable[str] | None
"""Arguments, by position or name."""

P = ParamSpec("P")
R = TypeVar("R")


class Options(TypedDict, total=False):
    """The keyword arguments of `alpa.parallelize`, described there."""

    cluster: str | None
    num_micro_batches: int | Literal["auto"]
    micro_batches: MicroBatches
    batch_argnums: Chosen | Mapping[int | str, int]
    state_argnums: Chosen
    donate_argnums: int | Iterable[int] | None
    donate_argnames: str | Iterable[str] | None
    static_argnums: int | Iterable[int] | None
    static_argnames: str | Iterable[str] | None
    loss_reduction: LossReduction
    schedule: str | Sequence[Sequence[str]]
    intra: Intra
    inter: Inter
    num_stages: Count
    num_layers: Count
    remat: Remat
    mesh_shape: str
    accumulate_dtype: AccumulateDtype
    force: str | Iterable[str]
    hints: str | Path | None
    executor: Literal["local", "ray"]
    devices: Sequence[Device] | None
    workers: WorkerOptions | None
    elastic: bool
    check_finite: bool
    explain_roles: bool
    max_plans: int
    compiler_options: CompilerOptions | None
    executables: Folders
    plan: str | Path | None
    like: Parallelized[..., Any] | Method[Any] | None


@overload
def parallelize(fun: Callable[P, R], **options: Unpack[Options]) -> Parallelized[P, R]: ...


@overload
def parallelize(
    fun: None = None, **options: Unpack[Options]
) -> Callable[[Callable[P, R]], Parallelized[P, R]]: ...


def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    cluster: str | None = None,
    num_micro_batches: int | Literal["auto"] = 1,
    micro_batches: MicroBatches = "exact",
    batch_argnums: Chosen | Mapping[int | str, int] = None,
    state_argnums: Chosen = None,
    donate_argnums: int | Iterable[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    static_argnums: int | Iterable[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    loss_reduction: LossReduction = "mean",
    schedule: str | Sequence[Sequence[str]] = "auto",
    intra: Intra = "auto",
    inter: Inter = "auto",
    num_stages: Count = "auto",
    num_layers: Count = "auto",
    remat: Remat = "auto",
    mesh_shape: str = "auto",
    accumulate_dtype: AccumulateDtype = "f32",
    force: str | Iterable[str] = (),
    hints: str | Path | None = None,
    executor: Literal["local", "ray"] = "local",
    devices: Sequence[Device] | None = None,
    workers: WorkerOptions | None = None,
    elastic: bool = False,
    check_finite: bool = False,
    explain_roles: bool = False,
    max_plans: int = 10,
    compiler_options: CompilerOptions | None = None,
    executables: Folders = (),
    plan: str | Path | None = None,
    like: Parallelized[..., Any] | Method[Any] | None = None,
) -> Parallelized[..., Any] | Callable[[Callable[..., Any]], Parallelized[..., Any]]:
    """Plans, compiles and runs a function on a cluster, as `jax.jit` does on one device.

    Works as a decorator, with or without arguments, and as a function. The result takes the
    function's arguments (whole batches, any trees of arrays) and returns the function's results.

    Args:
        fun: a function that `jax.jit` accepts.
        cluster: a preset with its shape (`cpu:2x4`) or the path of a TOML file.
        num_micro_batches: how often forward and backward run per step; "auto" takes the divisor of
            the batch with the shortest predicted step.
        micro_batches: "exact" computes what plain JAX computes for the whole batch, up to rounding
            and random numbers of samples, and refuses a function if this cannot be proven;
            "independent" makes each micro-batch a batch of its own, like a loop in plain JAX
            (batch norm, contrastive losses).
        batch_argnums: the arguments, by position or name, that hold the samples in the leading
            dimension of their arrays; a dictionary names another dimension (`{"x": 1}`). By
            default they are found from the program (`runtime/step_roles.py`).
        state_argnums: the arguments that the step replaces. By default, those with a new value
            among the results.
        donate_argnums, donate_argnames, static_argnums, static_argnames, compiler_options: as
            in `jax.jit`.
        loss_reduction: whether the loss is a mean or a sum over samples. Gradients and other
            returned numbers are averaged over the micro-batches or added up accordingly.
        schedule: as in `alpa-plan`, or a list of work such as "0F1" for each mesh.
        intra, inter, remat, mesh_shape: as in `alpa-plan`.
        num_stages: how many pipeline stages there are; "auto" takes the number with the shortest
            predicted step.
        num_layers: into how many layers the function is cut; stages are whole layers. "auto" cuts
            at `alpa.mark_layer_boundary()`, or by the number of matrix products. A number ignores
            the marks.
        accumulate_dtype: the narrowest type that adds up gradients and other sums or means over
            the micro-batches: "f32", "f64", or "same", the type of each value.
        force: choices that the plan must have, while the search finds the rest: arguments'
            shardings ("state.params['wte'] = [axis0, -]"), stages ("layers 0-7 on 1x8") and the
            schedule ("schedule = zb-v").
        hints: a file of such choices, as `alpa-plan --save-hints` writes it.
        executor, devices, workers, executables: as in `alpa.runtime.load`.
        elastic: whether `alpa.resume` plans for the hosts of the Ray cluster that live, up to those
            of `cluster`, instead of waiting for lost ones.
        check_finite: whether each call waits for its results and raises FloatingPointError if one
            holds NaN or infinity; the error names it.
        explain_roles: whether planning prints the role of each argument and the reason.
        max_plans: how many kinds of calls (shapes, types and static arguments) stay planned and
            compiled. Beyond that, the one that was used least recently is forgotten, with a
            warning; its next call plans again. On Ray all stay.
        plan: a saved plan to use instead of a search.
        like: another parallelised function, or a method of an object. This function takes its
            cluster, devices, workers and settings. Use it for the evaluation of a training step's
            state.

    Raises:
        TypeError, ValueError: options conflict with one another or with the function.
        ClusterError: the cluster does not exist or is invalid.
    """
    options = dict(locals())
    del options["fun"]
    if fun is None:
        return partial(parallelize, **options)
    family = None
    if like is not None:
        other = _check_like(like, options)
        settings, elastic, family = other.named, other.elastic, other.family
        executor, devices, workers = other.executor, other.devices, other.workers
    elif cluster is None:
        raise ValueError(
            'parallelize needs the cluster to plan for, such as cluster="cpu:2x4" (2 hosts x 4 '
            'devices) or cluster="h100:1x8"; or like=, another parallelised function'
        )
    else:
        check_count_or_auto("num_stages", num_stages)
        check_count_or_auto("num_layers", num_layers)
        settings = Settings(
            cluster=cluster,
            num_stages=num_stages,
            num_layers=num_layers,
            schedule=schedule_text(schedule),
            intra=intra,
            inter=inter,
            remat=remat,
            mesh_shape=mesh_shape,
            accumulate_dtype=accumulate_dtype,
            force=_forced(force, hints),
        )
    check_kind("cluster", settings.cluster, str)
    parse_cluster(settings.cluster)
    if elastic:
        Cluster.parse(settings.cluster)  # Which hosts of several kinds live is not asked.
    check_kind("mesh_shape", settings.mesh_shape, str)
    check_kind("check_finite", check_finite, bool)
    check_kind("elastic", elastic, bool)
    check_kind("explain_roles", explain_roles, bool)
    check_count("max_plans", max_plans, 1)
    check_kind("plan", plan, str, Path, type(None))
    check_run_options(executor, devices, workers, compiler_options)
    parameters = Parameters.of(fun)

    def select(option: str, *chosen: Chosen) -> frozenset[str]:
        return parameters.select(option, _each(option, *chosen))

    declared = Declared(
        donated=select("donate_argnums", donate_argnums, donate_argnames),
        batch=_batch(parameters, batch_argnums),
        state=None if state_argnums is None else select("state_argnums", state_argnums),
    )
    static = select("static_argnums", static_argnums, static_argnames)
    if both := sorted(static & declared.donated):
        raise ValueError(
            f"static_argnames and donate_argnames cannot intersect. Argument names {both} appear "
            "in both; static arguments have no buffers, so leave them out of donate_argnums"
        )
    parameters = replace(parameters, static=static)
    if elastic and (executor != "ray" or plan is not None):
        raise ValueError(
            "elastic=True plans again for the hosts of a Ray cluster that live: it needs "
            'executor="ray", and no plan= for fixed hosts'
        )
    target = Target(
        named=settings,
        elastic=elastic,
        num_micro_batches=_number(num_micro_batches),
        micro_batches=micro_batches,
        explain_roles=explain_roles,
        max_plans=max_plans,
        loss_reduction=loss_reduction,
        executor=executor,
        workers=workers,
        devices=None if devices is None else tuple(devices),
        check_finite=check_finite,
        compiler_options=compiler_options,
        executables=check_folders("executables", executables),
        saved=plan,
        family=family or Family(settings.cluster),
        leads=family is None,
    )
    return Parallelized(fun, parameters, declared, target)


_LIKE_OPTIONS: dict[str, Any] = {
    "cluster": None,
    "schedule": "auto",
    "intra": "auto",
    "inter": "auto",
    "num_stages": "auto",
    "num_layers": "auto",
    "remat": "auto",
    "mesh_shape": "auto",
    "accumulate_dtype": "f32",
    "force": (),
    "hints": None,
    "executor": "local",
    "devices": None,
    "workers": None,
    "elastic": False,
}
"""What a function takes from its `like` function, with the default value of each."""


def _check_like(like: object, options: dict[str, Any]) -> Target:
    """What the other function is planned for."""
    if isinstance(like, MethodType):
        like = like.__func__
    if not isinstance(like, Parallelized):
        raise TypeError(
            f"like= must be a function that alpa.parallelize returned, not "
            f"{type(like).__name__}; pass the parallelised training step"
        )
    for name, default in _LIKE_OPTIONS.items():
        if options[name] != default:
            raise ValueError(
                f"like= takes the cluster, settings and workers of {like.__name__}; remove {name}="
            )
    return like.target


def _batch(
    parameters: Parameters, chosen: Chosen | Mapping[int | str, int]
) -> dict[str, int] | None:
    """Returns the arguments that hold samples, by name, with the dimension of the samples."""
    if chosen is None:
        return None
    dims = dict.fromkeys(_each("batch_argnums", chosen), 0)
    if isinstance(chosen, Mapping):
        dims = cast("Mapping[int | str, int]", chosen)
    found: dict[str, int] = {}
    for one, dim in dims.items():
        if isinstance(dim, bool) or not isinstance(dim, Integral):
            raise TypeError(
                f"batch_argnums holds {dim!r} for {one!r}; expected the number of the dimension "
                "that holds the samples"
            )
        found.update(dict.fromkeys(parameters.select("batch_argnums", [one]), int(dim)))
    return found


def _forced(force: Any, hints: Any) -> tuple[str, ...]:
    """Returns the choices of both options.

    Raises:
        TypeError: an option holds another type.
        ChoiceError: the file cannot be read.
    """
    check_kind("hints", hints, str, Path, type(None))
    check_kind("force", force, str, Iterable)
    found = [force] if isinstance(force, str) else [*force]
    for text in found:
        check_kind("force", text, str)
    return (*(() if hints is None else read_hints(hints)), *found)


def _number(num_micro_batches: Any) -> int | Literal["auto"]:
    if isinstance(num_micro_batches, str) and num_micro_batches == "auto":
        return "auto"
    number = num_micro_batches
    if isinstance(number, bool) or not isinstance(number, Integral) or int(number) < 1:
        raise ValueError(
            f"num_micro_batches is {num_micro_batches!r}; expected a number of at least 1, or auto"
        )
    return int(num_micro_batches)


def _each(option: str, *chosen: Any) -> list[int | str]:
    """Returns the numbers and names in options that hold one, several or none.

    Raises:
        TypeError: an option holds another type.
    """
    found: list[int | str] = []
    for one in chosen:
        items: list[Any] = [] if one is None else [one]
        if isinstance(one, Iterable) and not isinstance(one, str):
            items = [*one]
        for item in items:
            if not isinstance(item, Integral | str):
                raise TypeError(
                    f"{option} holds {item!r}, of type {type(item).__name__}; expected positions "
                    "of arguments (int) or their names (str)"
                )
        found += items
    return found
