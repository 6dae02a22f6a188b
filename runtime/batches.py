"""Batches of a function whose arrays lie already where its step reads them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import jax

from alpa.runtime.argument_checks import Placed
from alpa.runtime.calls import Call, LeafType, Parameters
from alpa.runtime.step import Step


def placed_batch(step: Step, batch: Any, place: Callable[[int, Any], Any]) -> Any | None:
    """Returns a batch with its arrays placed; None if the step is for batches of other types.

    Args:
        step: what takes the batch.
        batch: its argument that holds samples, or a tuple of such arguments in their order. Arrays
            that are placed already stay.
        place: places an array as the argument of this number.

    Raises:
        TypeError: there are several such arguments, and the batch is no tuple of them.
        ValueError: it is unknown which arguments hold samples.
    """
    names = _arguments(step)
    if len(names) > 1 and not (isinstance(batch, tuple) and len(batch) == len(names)):
        raise TypeError(
            f"{step.name} takes samples in {', '.join(names)}; a batch is a tuple of these "
            f"{len(names)} arguments, not {_shown(batch)}"
        )
    call = Call.of(
        Parameters(names=names, rest="argument"), batch if len(names) > 1 else (batch,), {}
    )
    mine = step.call
    if call.trees != tuple((name, tree) for name, tree in mine.trees if name in names):
        return None
    numbers = [n for n, leaf in enumerate(mine.arrays) if leaf.argument in names]
    if [type_ for type_ in call.types if type_] != [mine.arrays[n].type for n in numbers]:
        return None

    def placed(value: Any, type_: LeafType | None) -> Any:
        if type_ is None:
            return value
        number = next(left)
        # Keys are passed as other arguments, and a Python number would lose its weak type.
        stays = isinstance(value, Placed) or type_.is_typed_key or type_.weak
        return value if stays or number not in step.batch else place(number, value)

    left = iter(numbers)
    leaves = iter([*map(placed, call.values, call.types)])
    trees = [tree for _, tree in call.trees]
    found = tuple(jax.tree.unflatten(it, islice(leaves, it.num_leaves)) for it in trees)
    return found if len(names) > 1 else found[0]


def _arguments(step: Step) -> tuple[str, ...]:
    """The arguments that hold samples, in their order."""
    arrays = step.call.arrays
    names = tuple(dict.fromkeys(arrays[n].argument for n in sorted(step.batch)))
    if not names:
        raise ValueError(
            f"it is unknown which arguments of {step.name} hold samples; name them in "
            "batch_argnums of alpa.parallelize"
        )
    return names


def _shown(batch: Any) -> str:
    kind = type(batch).__name__
    return f"a tuple of {len(batch)}" if isinstance(batch, tuple) else f"of type {kind}"
