"""The processes of a mesh over several hosts: how they meet, and what they share."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from alpa.runtime.workers.cluster import Post
from alpa.runtime.workers.options import Platform


def join_mesh(post: Post, platform: Platform, coordinator: str, seconds: float) -> None:
    """Joins the processes of a mesh over several hosts; JAX must not have started here."""
    if platform == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator,
        post.processes,
        post.process,
        # Under SLURM and Open MPI, JAX would take one device, of its rank among the processes that
        # those have started. Here Ray has started this process, which takes all that it sees.
        cluster_detection_method="deactivate",
        initialization_timeout=int(seconds),
        coordinator_bind_address=coordinator,  # otherwise all addresses
    )


def shares_executables(post: Post, platform: Platform) -> bool:
    """Whether the first worker of the mesh compiles for the others, too.

    On GPUs, XLA times kernels to choose among them. Each process could choose others, and with them
    another order of collectives: the mesh would hang. On CPU, nothing is timed, and the hosts'
    processors may differ.
    """
    return platform != "cpu" and post.processes > 1


def compile_waves(posts: Sequence[Post], platform: Platform) -> tuple[list[Post], list[Post]]:
    """The workers that compile, and those that then load the executables of their mesh's first."""
    later = [post for post in posts if post.process > 0 and shares_executables(post, platform)]
    return [post for post in posts if post not in later], later
