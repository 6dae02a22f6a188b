"""Faults of the runtime: instructions run on wrong data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import numpy as np

from alpa.passes.plan.data import ProgramArgument, Transfer
from alpa.passes.plan.instructions import Instruction, Run
from alpa.passes.plan.versions import Key
from alpa.runtime.executable import Executable
from alpa.runtime.interpreter import Interpreter, Store
from alpa.runtime.tiles import Tiles
from stress.random_programs.faults.planting import Fault, Sound

# Tiles


class _ReversedTiles(Tiles):
    """Tiles that cross meshes arrive in the wrong order."""

    def carry(
        self, array: jax.Array | None, transfer: Transfer, *, copy: bool = False
    ) -> jax.Array | None:
        moved = super().carry(array, transfer, copy=copy)
        if moved is None or not moved.ndim or moved.dtype.kind != "f":
            return moved
        return jax.device_put(np.asarray(moved)[::-1].copy(), moved.sharding)


class _SwappedTiles(Tiles):
    """The first two devices with different tiles of one shape get each other's."""

    def carry(
        self, array: jax.Array | None, transfer: Transfer, *, copy: bool = False
    ) -> jax.Array | None:
        moved = super().carry(array, transfer, copy=copy)
        if moved is None:
            return None
        one, *others = moved.addressable_shards
        other = next((it for it in others if it.index != one.index), None)
        if other is None or one.data.shape != other.data.shape:
            return moved
        swapped = {
            one.device: jax.device_put(other.data, one.device),
            other.device: jax.device_put(one.data, other.device),
        }
        tiles = [swapped.get(it.device, it.data) for it in moved.addressable_shards]
        return jax.make_array_from_single_device_arrays(moved.shape, moved.sharding, tiles)


def _reversed(sound: Sound) -> Executable | None:
    return sound.executable(tiles=_ReversedTiles) if sound.program.transfers else None


def _swapped(sound: Sound) -> Executable | None:
    program = sound.program
    cut = any(any(program.values[step.target].dims) for step in program.transfers)
    return sound.executable(tiles=_SwappedTiles) if cut else None


# Accumulators


class _KeptSums(Interpreter):
    """A step continues with the sums of the previous one."""

    _left: Store | None = None

    def run(
        self,
        store: Store,
        instructions: Iterable[Instruction],
        after: Callable[[Instruction, Store], None] = lambda *_: None,
    ) -> None:
        instructions = tuple(instructions)
        store.update(self._left or {})
        super().run(store, instructions, after)
        self._left = {key: store[key].copy() for key in _sums(instructions)}


def _sums(instructions: Iterable[Instruction]) -> set[Key]:
    return {key for i in instructions if isinstance(i, Run) for key in i.accumulators}


def _kept(sound: Sound) -> Executable | None:
    has_sums = bool(_sums(sound.script.instructions))
    return sound.executable(interpreter=_KeptSums) if has_sums else None


# Arguments


Feed = Callable[[Any], Any]


class _Feeding(Interpreter):
    """Feeds another array in place of an argument."""

    def __init__(self, *parts: Any, chosen: ProgramArgument, other: Feed) -> None:
        super().__init__(*parts)
        self._chosen, self._other = chosen, other

    def feed(self, store: Store, argument: ProgramArgument, array: Any) -> None:
        super().feed(store, argument, self._other(array) if argument == self._chosen else array)


def _fed(
    name: str, could_be: Callable[[Sound, ProgramArgument], bool], feed: Callable[[], Feed]
) -> Fault:
    """A fault in an argument, on one of the meshes that read it."""

    def plant(sound: Sound) -> Executable | None:
        places = [a for a in sound.program.arguments if could_be(sound, a)]
        if not places:
            return None
        chosen = places[sound.draw(len(places))]
        return sound.executable(interpreter=partial(_Feeding, chosen=chosen, other=feed()))

    return Fault(name=name, where="inputs", plant=plant)


def _is_cut(sound: Sound, argument: ProgramArgument) -> bool:
    return argument.attributes.role == "batch" and sound.program.num_micro_batches > 1


def _is_sliced(sound: Sound, argument: ProgramArgument) -> bool:
    return _is_cut(sound, argument) and not _holds_keys(sound, argument)


def _has_folded_keys(sound: Sound, argument: ProgramArgument) -> bool:
    return _is_cut(sound, argument) and _holds_keys(sound, argument)


def _holds_keys(sound: Sound, argument: ProgramArgument) -> bool:
    """Whether it holds the words of keys: the programs have no other unsigned integers."""
    return sound.program.values[argument.value].dtype == "ui32"


def _is_state(_: Sound, argument: ProgramArgument) -> bool:
    return argument.attributes.role == "state"


def _late() -> Feed:
    """Slices begin one sample late, the last one at the end."""

    def feed(array: Any) -> np.ndarray:
        last = len(array) - 1
        return np.asarray(array)[np.minimum(np.arange(last + 1) + 1, last)]

    return feed


def _of_the_one_before() -> Feed:
    return lambda keys: np.roll(keys, 1, axis=0)


def _of_the_last_step() -> Feed:
    kept: list[np.ndarray] = []

    def feed(array: Any) -> Any:
        kept.append(np.array(array))  # before its buffers are donated
        return kept[-2] if kept[1:] else array

    return feed


FAULTS = (
    Fault(name="tiles arrive in the wrong order", where="transfers", plant=_reversed),
    Fault(name="two devices get each other's tile", where="transfers", plant=_swapped),
    Fault(name="accumulators are not zeroed", where="sums", plant=_kept),
    _fed("micro-batches begin a sample late", _is_sliced, _late),
    _fed("a key is folded with another number", _has_folded_keys, _of_the_one_before),
    _fed("a state is that of the last step", _is_state, _of_the_last_step),
)
