"""Steps inside of `jax.set_mesh`, as programs with shardings of their own are run."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import jax
import numpy as np
from jax.sharding import Mesh

_NONE = Mesh(np.empty((), dtype=object), ())


@contextmanager
def without_mesh() -> Generator[None]:
    """Hides the mesh that the caller has set.

    JAX refuses arrays on other devices than the mesh's, and a plan has several meshes.
    """
    if jax.sharding.get_abstract_mesh().empty:
        yield
    else:
        with jax.set_mesh(_NONE):
            yield
