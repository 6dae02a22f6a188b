"""Writes a state as an Orbax checkpoint; each process writes its own shards.

Orbax writes the description of the tree, in this process. To save `jax.Array`s from several
processes, Orbax needs one world of `jax.distributed` that all of them have joined, with barriers
between them. The workers of a plan have no such world: each mesh is a world of its own, so that
other meshes survive when one is lost. Therefore the arrays are written below Orbax by tensorstore.
This process writes each array's description, and the processes with shards write their chunks
(`shards`). The result is an Orbax checkpoint, zarr 3 without OCDBT, which
`orbax.checkpoint.PyTreeCheckpointer().restore(folder)` reads without Alpa.

Until it is complete, the folder has another name (`unfinished`). Orbax starts threads, which a
process cannot do while it ends. So a save in the background calls Orbax before it returns, and the
rest uses no other threads than its own and tensorstore's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from alpa.runtime import keepers
from alpa.runtime.calls import Leaf
from alpa.runtime.checkpoints.errors import CheckpointError
from alpa.runtime.checkpoints.manifest import Entry, Manifest, type_text
from alpa.runtime.checkpoints.shards import Write
from alpa.runtime.checkpoints.stored_array import Shape, chunk_shape, create_stored
from alpa.runtime.checkpoints.unfinished import Unfinished
from alpa.runtime.keepers import AllCopies, Keeper
from alpa.runtime.mesh_array import MeshArray


@dataclass(frozen=True, kw_only=True)
class StateLeaf:
    """An array of a state as it is stored; for a random key, its words."""

    type: str
    array: Any

    @classmethod
    def of(cls, leaf: Leaf) -> StateLeaf:
        """The array as it is stored: typed keys as words, numpy arrays in JAX's type.

        Raises:
            CheckpointError: an integer does not fit into JAX's type.
        """
        array, type_ = leaf.value, leaf.type
        assert type_ is not None, leaf
        if type_.is_typed_key:
            array = jax.random.key_data(array)
        elif not isinstance(array, jax.Array | MeshArray):
            given = np.asarray(array)
            array = given.astype(type_.dtype, copy=False)  # as JAX converts it
            is_integer = given.dtype.kind in "iu"
            if is_integer and array is not given and not np.array_equal(array, given):
                raise CheckpointError(
                    f"{leaf.label} has integers of {given.dtype} that do not fit into "
                    f"{type_.dtype}, JAX's type for them; save smaller ones or floats, or call "
                    'jax.config.update("jax_enable_x64", True)'
                )
        return cls(type=type_text(type_), array=array)


def write(folder: Path, step: int, leaves: Mapping[str, StateLeaf]) -> None:
    """Writes a checkpoint: completely, or without any trace.

    Raises:
        CheckpointError: it cannot be written.
        RuntimeError: an array was deleted, or the step that makes it has failed.
        WorkerError: a worker has failed.
    """
    layout = _Layout.of(leaves)
    unfinished = Unfinished(folder)
    with unfinished.kept_if_successful() as there:
        _describe(there, leaves)
        entries = layout.write(there, layout.write_arrays, parallel=True)
        Manifest(step=step, arrays=entries).write(there)
        unfinished.complete()


def copy(folder: Path, step: int, leaves: Mapping[str, StateLeaf]) -> Callable[[], None]:
    """Copies a state to the host memory of its processes; returns a function that writes it.

    The arrays may be changed or donated as soon as this returns. The function raises as `write`.

    Raises:
        CheckpointError, RuntimeError, WorkerError: as in `write`.
    """
    layout = _Layout.of(leaves)
    copies = AllCopies(layout.pieces)
    unfinished = Unfinished(folder)
    with ExitStack() as undo:
        undo.callback(copies.drop)
        with unfinished.kept_if_successful() as there:
            _describe(there, leaves)
        undo.pop_all()

    def finish() -> None:
        with unfinished.kept_if_successful() as there, ExitStack() as after:
            after.callback(copies.drop)
            entries = layout.write(there, copies.write, parallel=False)
            Manifest(step=step, arrays=entries).write(there)
            unfinished.complete()

    return finish


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """How a state is stored.

    `pieces` are its arrays, in parts if they are split between meshes. `starts` are the offsets of
    each array's pieces.
    """

    entries: Mapping[str, Entry]
    starts: Mapping[str, Sequence[Shape]]
    pieces: Sequence[Any]

    @classmethod
    def of(cls, leaves: Mapping[str, StateLeaf]) -> _Layout:
        parts = {name: keepers.pieces(leaf.array) for name, leaf in leaves.items()}
        starts = {name: [start for start, _ in them] for name, them in parts.items()}
        flat = [array for them in parts.values() for _, array in them]
        shards = iter(keepers.ask(flat, lambda it, mine: it.shard_shapes([flat[i] for i in mine])))
        entries: dict[str, Entry] = {}
        for name, leaf in leaves.items():
            shape: Shape = tuple(leaf.array.shape)
            dtype = jnp.dtype(leaf.array.dtype)
            ends = [(start, next(shards)) for start in starts[name]]
            entries[name] = Entry(
                type=leaf.type,
                shape=shape,
                dtype=dtype.name,
                chunk=chunk_shape(shape, dtype.itemsize, ends),
                checksums=(),
            )
        return cls(entries=entries, starts=starts, pieces=flat)

    def write(
        self, folder: Path, write: Callable[[Sequence[Write]], None], parallel: bool
    ) -> dict[str, Entry]:
        """Writes the arrays to a folder; returns their entries in the manifest.

        `write` writes all pieces to the given places. `parallel` allows further threads.
        """
        stored = {name: entry.at(folder, name) for name, entry in self.entries.items()}
        create_stored(stored.values())
        write(
            [
                Write(stored=stored[name], start=at)
                for name, them in self.starts.items()
                for at in them
            ]
        )
        return {
            name: replace(entry, checksums=stored[name].written_checksums(parallel))
            for name, entry in self.entries.items()
        }

    def write_arrays(self, writes: Sequence[Write]) -> None:
        """Writes the pieces themselves."""

        def order(keeper: Keeper, mine: Sequence[int]) -> list[None]:
            keeper.write([self.pieces[i] for i in mine], [writes[i] for i in mine])
            return [None] * len(mine)

        keepers.ask(self.pieces, order)


def _describe(folder: Path, leaves: Mapping[str, StateLeaf]) -> None:
    """Writes Orbax's description of a tree to a new folder."""
    handler = _TreeHandler(
        use_ocdbt=False,
        use_zarr3=True,
        type_handler_registry=type_handlers.create_type_handler_registry(
            (StateLeaf, _LeafHandler()),
            # Not used: Orbax asks it where the descriptions of jax.Arrays are kept.
            (jax.Array, type_handlers.ArrayHandler(array_metadata_store=None)),
        ),
    )
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder, args=_TreeSave(dict(leaves)))


class _TreeHandler(ocp.PyTreeCheckpointHandler):
    def finalize(self, directory: Any) -> None:
        """Does nothing: there is no OCDBT to merge."""


# Orbax finds the handler by the class of its arguments.
@ocp.args.register_with_handler(_TreeHandler, for_save=True)
@dataclass
class _TreeSave(ocp.args.PyTreeSave):
    pass


@ocp.args.register_with_handler(_TreeHandler, for_restore=True)
@dataclass
class _TreeRestore(ocp.args.PyTreeRestore):
    pass


class _LeafHandler(type_handlers.TypeHandler):
    """Names the types of leaves, whose elements are written elsewhere."""

    def typestr(self) -> str:
        return "np.ndarray"  # the type that readers without Alpa get

    async def serialize(
        self, values: Sequence[StateLeaf], infos: Sequence[Any], args: Any = None
    ) -> list[Any]:
        return []

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        raise NotImplementedError("the executable reads a state")

    async def metadata(self, infos: Any) -> Any:
        raise NotImplementedError("the manifest describes a state's arrays")
