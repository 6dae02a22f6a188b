"""Writes a state as an orbax checkpoint of which each process writes its own shards.

orbax keeps what belongs to one process here: the folder of a step, which it writes under another
name and renames when all is there, and the description of the tree. Its own way of saving
`jax.Array`s from several processes wants one world of `jax.distributed` that all of them have
joined, with barriers between them. The workers of a plan have none: each mesh is a world of its
own, so that others live on when one is lost. So the arrays are written below orbax, by tensorstore:
this process writes each array's description, and whoever has shards of it writes their chunks
(`stored_array`). To orbax that is a `TypeHandler`. What comes out is a checkpoint of orbax', zarr 3
without OCDBT, which `orbax.checkpoint.PyTreeCheckpointer().restore(folder)` reads anywhere.
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
    """An array of a state, as it is stored: of a random key, its words."""

    type: str
    array: Any

    @classmethod
    def of(cls, type_: Any, array: Any) -> StateLeaf:
        """An array of a type: typed keys as their words, numpy's arrays in JAX's type."""
        if type_.is_typed_key:
            array = jax.random.key_data(array)
        elif not isinstance(array, jax.Array | MeshArray):
            array = np.asarray(array, type_.dtype)  # as jax takes it
        return cls(type=type_text(type_), array=array)


def write(folder: Path, step: int, leaves: Mapping[str, StateLeaf]) -> None:
    """Writes a checkpoint: all of it, or nothing that `latest_step` would take for one.

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
            # Never used: orbax asks it where the descriptions of jax.Arrays are kept.
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
        """Writes the manifest, when all arrays are there; there is no OCDBT to be merged."""
        self._manifest().write(Path(directory))


# orbax finds the handler by the class of its arguments.
@ocp.args.register_with_handler(_StateHandler, for_save=True)
@dataclass
class _StateSave(ocp.args.PyTreeSave):
    pass


@ocp.args.register_with_handler(_StateHandler, for_restore=True)
@dataclass
class _StateRestore(ocp.args.PyTreeRestore):
    pass


class _ArrayHandler(type_handlers.TypeHandler):
    """Has each leaf written where it lies."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}

    def typestr(self) -> str:
        return "np.ndarray"  # what whoever reads it without us gets

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
        raise NotImplementedError("a state is read by its executable")

    async def metadata(self, infos: Any) -> Any:
        raise NotImplementedError("a state's arrays are described by the manifest")


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
