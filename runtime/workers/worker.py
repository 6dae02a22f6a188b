"""The actor: one host's part of a mesh, with its devices, its arrays and its instruction list."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
import ray
from jax import export
from jaxlib import version

from alpa.dialects import parse
from alpa.dialects.attributes import Slice
from alpa.passes.plan.instructions import Instruction, Script
from alpa.runtime.checkpoints.shards import Write
from alpa.runtime.checkpoints.stored_array import Shape, StoredArray
from alpa.runtime.compile_cache import CompileCache
from alpa.runtime.interpreter import Interpreter, Store
from alpa.runtime.keepers import HERE, Copies
from alpa.runtime.pjrt import Compiled, CompilerOptions, compile_module
from alpa.runtime.placement import Placement
from alpa.runtime.process_usage import ProcessUsage
from alpa.runtime.stages import compile_stages
from alpa.runtime.tiles import Tiles
from alpa.runtime.trace import Recorder
from alpa.runtime.workers.cluster import Post
from alpa.runtime.workers.gpus import show_gpus, visible_gpus
from alpa.runtime.workers.mesh_processes import join_mesh, shares_executables
from alpa.runtime.workers.messages import (
    ArrayId,
    Compilation,
    Endpoint,
    Started,
    StepCall,
    StepTimes,
)
from alpa.runtime.workers.options import Platform, WorkerOptions
from alpa.runtime.workers.transport.base import Group, Transport
from alpa.runtime.workers.transport.opening import host_identity, open_transport

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    """A program whose mesh this worker runs a part of."""

    script: Script
    placement: Placement
    instructions: Sequence[Instruction]
    stages: Mapping[str, Compiled]
    interpreter: Interpreter


class Worker:
    """One process of a mesh. Call `start`, then `connect`, then the other methods. Call `load`
    before methods that name a program."""

    def __init__(
        self, post: Post, platform: Platform, options: WorkerOptions, log_level: int
    ) -> None:
        _log_to_stderr(log_level)
        self._post, self._options = post, options
        self._platform: Platform = platform
        self._held: dict[ArrayId, jax.Array | Store] = {}
        self._copies: dict[int, Copies] = {}
        self._programs: dict[int, _Loaded] = {}
        self._transport: Transport
        self._cache = CompileCache(directory=options.cache_path)
        if options.pin_cores:
            _pin(post)
        if platform == "cpu":
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", len(post.devices))

    def __repr__(self) -> str:
        """The prefix that Ray puts before the lines of this process's log."""
        return self._post.name

    def endpoint(self) -> Endpoint:
        """Where this process is, and what it has."""
        with socket.socket() as probe:
            probe.bind(("", 0))  # on all addresses, but it accepts no connection
            port = probe.getsockname()[1]
        given = ray.get_runtime_context().get_accelerator_ids()
        return Endpoint(
            ip=ray.util.get_node_ip_address(),
            host=host_identity(),
            port=port,
            jaxlib=version.__version__,
            gpus=tuple(given.get("GPU", ())),
        )

    def start(self, coordinator: str, group: Group, gpus: Sequence[str]) -> Started:
        """Takes the devices, and opens the transport."""
        post = self._post
        if self._platform == "gpu":
            show_gpus(gpus, os.environ)
        if post.processes > 1:
            join_mesh(post, self._platform, coordinator, group.seconds)
        found, wanted = jax.local_devices(), len(post.devices)
        if len(found) != wanted or found[0].platform != self._platform:
            seen = f" ({visible_gpus(os.environ)})" if self._platform == "gpu" else ""
            raise RuntimeError(
                f"{post.name} needs {wanted} {self._platform} devices, but jax finds {len(found)} "
                f"of {found[0].platform} there{seen}"
            )
        self._transport = open_transport(self._options.transport, group)
        return Started(
            transport=self._transport.path,
            address=self._transport.address,
            platform=export.default_export_platform(),
        )

    def connect(self, addresses: Sequence[Mapping[str, str]]) -> None:
        """Connects with the other workers, whose transports have these addresses, by rank."""
        self._transport.connect(addresses)

    def load(
        self,
        number: int,
        script: Script,
        modules: Mapping[str, bytes],
        compiler_options: CompilerOptions | None,
        folders: tuple[Path, ...],
        executables: Mapping[str, bytes] | None = None,
    ) -> Compilation:
        """Reads the mesh's fragments of a program from folders of executables or from the cache,
        and compiles those that are not there; or loads those of the mesh's first worker."""
        begin = time.perf_counter()
        devices = tuple(sorted(jax.devices(), key=lambda it: (it.process_index, it.id)))
        placement = Placement(program=script.program, devices=devices, mesh=self._post.mesh)
        stages = compile_stages(
            modules,
            placement,
            compiler_options=compiler_options,
            cache=replace(self._cache, exported=folders),
            executables=executables,
        )
        tiles = Tiles(placement, self._transport)
        self._programs[number] = _Loaded(
            script=script,
            placement=placement,
            instructions=script.on(self._post.mesh),
            stages=stages,
            interpreter=Interpreter(placement, script, stages, tiles),
        )
        seconds = time.perf_counter() - begin
        if executables is None:
            compiled = sum(stage.read_from is None for stage in stages.values())
            did = f"compiled {compiled} of {len(stages)} fragments and read the others"
        else:
            did = f"loaded {len(stages)} fragments of the mesh's first worker"
        _log.info("%s, in %.1f s", did, seconds)
        shared = shares_executables(self._post, self._platform) and executables is None
        return Compilation(
            seconds=seconds,
            executables={name: it.serialised() for name, it in stages.items()} if shared else {},
        )

    def step(self, call: StepCall, *arrays: np.ndarray) -> StepTimes:
        """Runs the mesh's list once, and keeps its results under (call.number, position)."""
        begin, processor = time.perf_counter(), time.process_time()
        loaded = self._programs[call.program]
        interpreter, program = loaded.interpreter, loaded.script.program
        recorder = Recorder(loaded.script, settle=call.traced)
        with jax.enable_x64(True):  # 64-bit values of the program keep their width
            store: Store = {}
            for position, source in call.feeds.items():
                argument = program.arguments[position]
                given = self._held[source] if isinstance(source, tuple) else arrays[source]
                if isinstance(given, dict):
                    interpreter.take(store, argument, given)
                else:
                    interpreter.feed(store, argument, given)
            self._free(call.free)
            recorder.start()
            interpreter.run(store, loaded.instructions, after=recorder)
            results = interpreter.results(store)
            jax.block_until_ready(list(results.values()))
        self._held.update({(call.number, i): array for i, array in results.items()})
        return StepTimes(
            total=time.perf_counter() - begin,
            processor=time.process_time() - processor,
            **recorder.seconds(self._post.mesh),
            spans=recorder.of(self._post.mesh, self._post.name, self._transport.path)
            if call.traced
            else None,
        )

    def create(
        self,
        number: int,
        call: int,
        positions: Sequence[int],
        module: bytes,
        executable: bytes | None = None,
    ) -> None:
        """Makes arguments of a program, and keeps them like a step's results.

        The module has no arguments, and one result for each position in the planned @main. With
        `executable`, what the mesh's first worker has compiled, nothing is compiled here.
        """
        make = self._maker(number, positions, module, executable)
        arrays = jax.block_until_ready(make([]))
        self._held.update({(call, p): array for p, array in zip(positions, arrays, strict=True)})

    def compile_creation(self, number: int, positions: Sequence[int], module: bytes) -> bytes:
        """The executable for `create` in the other workers of the mesh."""
        return self._maker(number, positions, module).serialised()

    def _maker(
        self,
        number: int,
        positions: Sequence[int],
        module: bytes,
        executable: bytes | None = None,
    ) -> Compiled:
        loaded = self._programs[number]
        program, placement = loaded.script.program, loaded.placement
        values = [program.arguments[position].value for position in positions]
        return compile_module(
            parse(module),
            placement.mesh_devices(self._post.mesh),
            [(program.values[value].shape, placement.shardings[value]) for value in values],
            name="create",
            cache=self._cache,
            executable=executable,
        )

    def restore(
        self, number: int, call: int, parts: Mapping[int, tuple[StoredArray, Slice | None]]
    ) -> None:
        """Reads arguments of a program from a checkpoint, by their positions in the planned @main,
        and keeps them like a step's results."""
        loaded = self._programs[number]
        shardings, arguments = loaded.placement.shardings, loaded.script.program.arguments
        read = {
            (call, position): stored.read(shardings[arguments[position].value], part)
            for position, (stored, part) in parts.items()
        }
        self._held.update(read)

    def shard_shapes(self, keys: Sequence[ArrayId]) -> list[Shape]:
        """The shapes of shards, as for every keeper."""
        return HERE.shard_shapes([self._array(key) for key in keys])

    def write(self, keys: Sequence[ArrayId], writes: Sequence[Write]) -> None:
        """Writes this process's shards, as for every keeper."""
        HERE.write([self._array(key) for key in keys], writes)
        _give_back_memory()

    def copy(self, number: int, keys: Sequence[ArrayId]) -> None:
        """Copies this process's shards to host memory, under a number, as for every keeper."""
        self._copies[number] = HERE.copy([self._array(key) for key in keys])

    @ray.method(concurrency_group="save")
    def write_copies(self, number: int, writes: Sequence[Write]) -> None:
        """Writes copies while steps run, and frees them."""
        copies = self._copies.pop(number)
        copies.write(writes)
        del copies
        _give_back_memory()

    @ray.method(concurrency_group="save")
    def drop_copies(self, number: int) -> None:
        """Frees copies that may have been written."""
        self._copies.pop(number, None)

    def are_finite(self, keys: Sequence[ArrayId]) -> list[bool]:
        """Checks arrays for NaN and infinity, as for every keeper."""
        return HERE.are_finite([self._array(key) for key in keys])

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Never returns, so that its caller learns at once when this process ends."""
        threading.Event().wait()

    @ray.method(concurrency_group="io")
    def place(self, number: int, key: ArrayId, array: np.ndarray) -> None:
        """Puts an argument of a program on the devices before the step that takes it."""
        loaded = self._programs[number]
        store: Store = {}
        _, position = key
        with jax.enable_x64(True):
            loaded.interpreter.feed(store, loaded.script.program.arguments[position], array)
        self._held[key] = store

    @ray.method(concurrency_group="io")
    def fetch(self, key: ArrayId) -> list[tuple[tuple[slice, ...], np.ndarray]]:
        """This process's shards of a result, each once, with their place in it."""
        array = self._array(key)
        shards = (shard for shard in array.addressable_shards if shard.replica_id == 0)
        return [(shard.index, np.asarray(shard.data)) for shard in shards]

    @ray.method(concurrency_group="io")
    def held_bytes(self, free: Sequence[ArrayId]) -> int:
        """Bytes of the arrays that this process holds between steps, after freeing some."""
        self._free(free)
        arrays = [
            array
            for held in self._held.values()
            for array in (held.values() if isinstance(held, dict) else [held])
        ]
        return sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)

    @ray.method(concurrency_group="io")
    def usage(self) -> ProcessUsage:
        """The resources of this process."""
        return ProcessUsage.of()

    def hlo_text(self, number: int, stage: str) -> str:
        """A compiled fragment after partitioning and optimisation."""
        return self._programs[number].stages[stage].hlo_text()

    def read_from(self, number: int, stage: str) -> Path | None:
        """The file that a fragment's executable was read from; None if it was compiled here."""
        return self._programs[number].stages[stage].read_from

    def memory(self, number: int, stage: str) -> dict[str, int]:
        """XLA's memory statistics of a fragment, in bytes per device."""
        stats = self._programs[number].stages[stage].memory()
        names = (name for name in dir(stats) if name.endswith("_in_bytes"))
        return {name: getattr(stats, name) for name in names}

    def _array(self, key: ArrayId) -> jax.Array:
        array = self._held[key]
        assert isinstance(array, jax.Array)  # placed arguments are not read here
        return array

    def _free(self, keys: Sequence[ArrayId]) -> None:
        for key in keys:
            # The arrays of a refused checkpoint have never been here.
            self._held.pop(key, None)


def _log_to_stderr(level: int) -> None:
    """Sends Alpa's log of this process to stderr; Ray forwards it to the caller's terminal."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("alpa")
    logger.addHandler(handler)
    logger.setLevel(level)


def _give_back_memory() -> None:
    """Returns free memory of the C heaps to the system, if the library can (glibc).

    The threads that write a checkpoint leave much there: 12 MiB per worker for gpt-tiny.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _pin(post: Post) -> None:
    """Keeps all threads of this process on the post's cores, wrapping around if there are few."""
    cores = os.cpu_count() or 1
    mine = {(post.core + i) % cores for i in range(len(post.devices))}
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), mine)
