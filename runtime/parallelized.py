"""A function that runs on a cluster: finds the planned step that serves a call, or makes one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Hashable, Sequence
from functools import update_wrapper
from types import MethodType
from typing import Any, Generic, Literal, ParamSpec, Protocol, Self, TypeVar, cast, overload

from alpa.dialects.plan import AccumulateDtype
from alpa.passes.sharding.baselines import Intra
from alpa.passes.stages.remat import Remat
from alpa.runtime.calls import SETTINGS, Call, LeafType, Parameters
from alpa.runtime.executable import Executable
from alpa.runtime.option_checks import check_literal
from alpa.runtime.planning import Inter
from alpa.runtime.prepared import Prepared
from alpa.runtime.step import LossReduction, Lowered, MicroBatches, Step
from alpa.runtime.step_plan import StepPlan
from alpa.runtime.step_roles import Declared
from alpa.runtime.target import Target
from alpa.runtime.tracebacks import ends_at_caller

_logger = logging.getLogger("alpa")

P = ParamSpec("P")
R = TypeVar("R")


class Method(Protocol[R]):
    """A parallelised function as the method of an object; at run time a `types.MethodType`."""

    @property
    def __func__(self) -> Parallelized[..., R]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Runs one step with the object as its first argument."""
        ...


class Parallelized(Generic[P, R]):
    """A function that runs on a cluster, returned by `parallelize`.

    As a context manager, it closes itself at the end.
    """

    __name__: str

    def __init__(
        self,
        fun: Callable[P, R],
        parameters: Parameters,
        declared: Declared,
        target: Target,
    ) -> None:
        update_wrapper(self, fun)
        self.__name__ = getattr(fun, "__name__", "the function")
        self._fun = fun
        self._parameters = parameters
        self._declared = declared
        self._target = target
        _check_literals(target)
        self._steps: dict[Hashable, Prepared] = {}
        """by what a call is served by, in the order of their last use"""
        self._last: Prepared | None = None
        self._previous: tuple[Any, Prepared] | None = None
        """what served the call before, and how such a call is recognised"""

    @property
    def target(self) -> Target:
        """The cluster, settings and workers that its steps are planned for."""
        return self._target

    @ends_at_caller
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs one step. The first call of a kind also plans and compiles it.

        Raises:
            TypeError, ValueError: the function cannot run with these arguments.
            PlanningError: there is no plan for the function on this cluster.
        """
        call = self._call(args, kwargs)
        return self._prepared(call).run(call)

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Method[R]: ...

    def __get__(self, instance: object, owner: type | None = None) -> Self | Method[R]:
        """Makes a method of a function that is defined in a class, as `jax.jit` does."""
        return self if instance is None else cast("Method[R]", MethodType(self, instance))

    @ends_at_caller
    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Returns the step as StableHLO at the size of one micro-batch; accepts shapes."""
        prepared = self._prepared(self._call(args, kwargs))
        number = self._target.num_micro_batches
        return (
            prepared.lowered if number == "auto" or self._target.saved else prepared.lower(number)
        )

    @ends_at_caller
    def plan(self, *args: Any, **kwargs: Any) -> StepPlan:
        """Prints the plan's table and returns the plan. Nothing runs.

        Arguments may be shapes (`jax.ShapeDtypeStruct`).
        """
        plan = self.prepare(*args, **kwargs).plan
        sys.stdout.write(str(plan))
        return plan

    @ends_at_caller
    def executable(self, *args: Any, **kwargs: Any) -> Executable:
        """Returns the compiled step, as `runtime.load` does; accepts shapes."""
        return self.prepare(*args, **kwargs).executable

    @ends_at_caller
    def prepare(self, *args: Any, **kwargs: Any) -> Prepared:
        """Returns the step that serves calls like this one; accepts shapes."""
        return self._prepared(self._call(args, kwargs))

    def place_batch(self, batch: Any) -> Any:
        """Returns a batch with its arrays placed on the meshes that read them; see `prefetch`.

        Args:
            batch: the argument that holds samples, or a tuple of such arguments in their order.

        A batch of other shapes than those that the function is planned for is returned as it is.
        Arrays that are placed already stay.

        Raises:
            TypeError: there are several such arguments, and the batch is no tuple of them.
            ValueError: it is unknown which arguments hold samples.
        """
        for prepared in reversed(list(self._steps.values())):
            if prepared.settings == self._target.settings:  # It may be for hosts that are lost.
                placed = prepared.place(batch)
                if placed is not None:
                    return placed
        return batch

    def close(self) -> None:
        """Ends the workers of all plans of the function, if there are any.

        Arrays on the workers are lost. The plans stay: a later call compiles them again and starts
        new workers. So does a function that is `like` this one and used its workers. Executables
        that `executable` returned are closed.
        """
        for prepared in set(self._steps.values()):
            prepared.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepared_for(self, names: Sequence[str], types: Sequence[LeafType]) -> Prepared | None:
        """Returns the latest step whose arguments of these names hold arrays of these types."""
        for prepared in reversed(self._steps.values()):
            arrays = prepared.step.call.arrays
            held = [leaf.type for name in names for leaf in arrays if leaf.argument == name]
            if [None if type_ is None else type_.strong for type_ in held] == list(types):
                # It may have been planned for hosts that are lost.
                return self._prepared(prepared.step.call)
        return None

    def parameter(self, number: int) -> str:
        """Returns the name of a positional argument."""
        return self._parameters.name(number)

    def call(self, *args: Any, **kwargs: Any) -> Call:
        """Returns the arguments of a call by name, with their leaves."""
        return self._call(args, kwargs)

    def _call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
        return Call.of(self._parameters, args, kwargs)

    def _prepared(self, call: Call) -> Prepared:
        cluster = self._target.family.cluster
        same = cluster, call.positional, call.trees, call.static, call.settings, call.marks
        if self._previous is not None and self._previous[0] == same:
            return self._previous[1]
        key = cluster, call.key()
        prepared = self._steps.pop(key, None)
        if prepared is None:
            # A step may return strongly typed what was weakly typed, such as a number of Python.
            # The other way round, the plan would widen what the function does not.
            prepared = self._served(call) or self._new(call)
        self._steps[key] = prepared  # The one that was used last is the last.
        self._previous = same, prepared
        self._forget_others()
        return prepared

    def _forget_others(self) -> None:
        """Forgets the steps that were used least recently, beyond `max_plans`.

        Not those on Ray: their actors hold states that other steps read.
        """
        most = self._target.max_plans
        if self._target.executor == "ray" or len(set(self._steps.values())) <= most:
            return
        _, oldest = next(iter(self._steps.items()))
        self._steps = {key: it for key, it in self._steps.items() if it is not oldest}
        _logger.warning(
            "%s was called in more than %d ways: the plan of the one that was used least recently "
            "is forgotten; raise max_plans if it comes again",
            self.__name__,
            most,
        )

    def _served(self, call: Call) -> Prepared | None:
        """Returns a step for a call that differs only in state that lost its weak types."""
        for prepared in self._steps.values():
            strong, known = prepared.step.state, prepared.step.call
            is_same = call.key(strong) == known.key(strong)
            pairs = zip(call.types, known.types, strict=True) if is_same else ()
            was_strong = any(mine and known and mine.weak > known.weak for mine, known in pairs)
            if is_same and not was_strong and prepared.settings == self._target.settings:
                return prepared
        return None

    def _new(self, call: Call) -> Prepared:
        last = self._last
        if last is not None and last.settings == self._target.settings:
            difference = _difference(last.step.call, call)
            _logger.warning("%s is planned again: %s", self.__name__, difference)
        self._target.join()
        call = call.abstract()
        several = self._target.num_micro_batches != 1 or self._target.saved is not None
        step = Step.of(
            self._fun,
            call,
            self._declared,
            several=several,
            micro_batches=self._target.micro_batches,
        )
        self._last = Prepared(step, self._target)
        return self._last


def _difference(old: Call, new: Call) -> str:
    """Describes the first difference between two calls, for the message about a new plan."""
    before = {leaf.path: leaf for leaf in old.leaves}
    after = {leaf.path: leaf for leaf in new.leaves}
    changed = [f"{leaf.label} is new" for path, leaf in after.items() if path not in before]
    changed += [f"{leaf.label} is missing" for path, leaf in before.items() if path not in after]
    if not changed:
        changed = [
            f"a static part of {name} has changed, such as a function that was defined again"
            for (name, tree), (_, other) in zip(new.trees, old.trees, strict=False)
            if tree != other
        ]
    changed += [
        f"{leaf.label} was {before[path].type}, is {leaf.type}"
        for path, leaf in after.items()
        if path in before and before[path].type != leaf.type
    ]
    changed += [
        f"{name} was {was}, is {now}"
        for name, was, now in zip(SETTINGS, old.settings, new.settings, strict=True)
        if was != now
    ]
    return (changed or ["a static argument or a function has changed"])[0]


def _check_literals(target: Target) -> None:
    """Raises ValueError if an option has an invalid value."""
    settings = target.named
    for name, value, kind in (
        ("executor", target.executor, Literal["local", "ray"]),
        ("intra", settings.intra, Intra),
        ("inter", settings.inter, Inter),
        ("remat", settings.remat, Remat),
        ("accumulate_dtype", settings.accumulate_dtype, AccumulateDtype),
        ("loss_reduction", target.loss_reduction, LossReduction),
        ("micro_batches", target.micro_batches, MicroBatches),
    ):
        check_literal(name, value, kind)
