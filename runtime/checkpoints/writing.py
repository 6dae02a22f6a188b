"""Writes a state as an Orbax checkpoint; each process writes its own shards.

Orbax does the work of one process here. It writes the folder of a step under another name and
renames it when it is complete, and it writes the description of the tree. To save `jax.Array`s from
several processes, Orbax needs one world of `jax.distributed` that all of them have joined, with
barriers between them. The workers of a plan have no such world: each mesh is a world of its own, so
that other meshes survive when one is lost. Therefore the arrays are written below Orbax by
tensorstore. This process writes each array's description, and the processes with shards write their
chunks (`stored_array`). For Orbax this is a `TypeHandler`. The result is an Orbax checkpoint, zarr
3 without OCDBT, which `orbax.checkpoint.PyTreeCheckpointer().restore(folder)` reads without Alpa.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from alpa.runtime import keepers
from alpa.runtime.checkpoints.manifest import Entry, Manifest, type_text
from alpa.runtime.checkpoints.stored_array import Shape, Write, chunk_shape
from alpa.runtime.keepers import Keeper
from alpa.runtime.mesh_array import MeshArray


@dataclass(frozen=True, kw_only=True)
class StateLeaf:
    """An array of a state as it is stored; for a random key, its words."""

    type: str
    array: Any

    @classmethod
    def of(cls, type_: Any, array: Any) -> StateLeaf:
        """The array as it is stored: typed keys as words, numpy arrays in JAX's type."""
        if type_.is_typed_key:
            array = jax.random.key_data(array)
        elif not isinstance(array, jax.Array | MeshArray):
            array = np.asarray(array, type_.dtype)  # as JAX converts it
        return cls(type=type_text(type_), array=array)


def write(folder: Path, step: int, leaves: Mapping[str, StateLeaf]) -> None:
    """Writes a checkpoint: completely, or without anything that `latest_step` would find.

    Raises:
        CheckpointError: it cannot be written.
        RuntimeError: an array was deleted, or the step that makes it has failed.
    """
    arrays = _ArrayHandler()
    handler = _StateHandler(
        lambda: Manifest(step=step, arrays=arrays.entries),
        use_ocdbt=False,
        use_zarr3=True,
        type_handler_registry=type_handlers.create_type_handler_registry(
            (StateLeaf, arrays),
            # Not used: Orbax asks it where the descriptions of jax.Arrays are kept.
            (jax.Array, type_handlers.ArrayHandler(array_metadata_store=None)),
        ),
    )
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder, args=_StateSave(dict(leaves)))


class _StateHandler(ocp.PyTreeCheckpointHandler):
    def __init__(self, manifest: Callable[[], Manifest], **options: Any) -> None:
        super().__init__(**options)
        self._manifest = manifest

    def finalize(self, directory: Any) -> None:
        """Writes the manifest after all arrays; there is no OCDBT to merge."""
        self._manifest().write(Path(directory))


# Orbax finds the handler by the class of its arguments.
@ocp.args.register_with_handler(_StateHandler, for_save=True)
@dataclass
class _StateSave(ocp.args.PyTreeSave):
    pass


@ocp.args.register_with_handler(_StateHandler, for_restore=True)
@dataclass
class _StateRestore(ocp.args.PyTreeRestore):
    pass


class _ArrayHandler(type_handlers.TypeHandler):
    """Writes each leaf where it lies."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}

    def typestr(self) -> str:
        return "np.ndarray"  # the type that readers without Alpa get

    async def serialize(
        self, values: Sequence[StateLeaf], infos: Sequence[Any], args: Any = None
    ) -> list[Any]:
        for info in infos:
            await info.await_path_creation()
        folder = Path(infos[0].parent_dir)
        self.entries |= _write(
            folder, {info.name: value for info, value in zip(infos, values, strict=True)}
        )
        return []

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        raise NotImplementedError("the executable reads a state")

    async def metadata(self, infos: Any) -> Any:
        raise NotImplementedError("the manifest describes a state's arrays")


def _write(folder: Path, leaves: Mapping[str, StateLeaf]) -> dict[str, Entry]:
    parts = {name: keepers.pieces(leaf.array) for name, leaf in leaves.items()}
    flat = [array for pieces in parts.values() for _, array in pieces]
    shards = iter(keepers.ask(flat, lambda it, mine: it.shard_shapes([flat[i] for i in mine])))
    entries: dict[str, Entry] = {}
    writes: list[Write] = []
    for name, leaf in leaves.items():
        shape: Shape = tuple(leaf.array.shape)
        dtype = jnp.dtype(leaf.array.dtype)
        ends = [(start, next(shards)) for start, _ in parts[name]]
        entries[name] = Entry(
            type=leaf.type,
            shape=shape,
            dtype=dtype.name,
            chunk=chunk_shape(shape, dtype.itemsize, ends),
            checksums=(),
        )
        stored = entries[name].at(folder, name)
        stored.create()
        writes += [Write(stored=stored, start=start) for start, _ in ends]

    def order(keeper: Keeper, mine: Sequence[int]) -> list[None]:
        keeper.write([flat[i] for i in mine], [writes[i] for i in mine])
        return [None] * len(mine)

    keepers.ask(flat, order)
    return {
        name: replace(entry, checksums=entry.at(folder, name).written_checksums())
        for name, entry in entries.items()
    }
