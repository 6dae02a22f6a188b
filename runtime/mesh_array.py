"""An array that lies on meshes, as the caller holds it from one step to the next."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin


class MeshArray(NDArrayOperatorsMixin):
    """Shape and dtype are known at once, the numbers are fetched when they are looked at.

    `np.asarray`, `jnp.asarray`, `jax.device_get`, conversions, printing, operators and functions of
    numpy look at them, and so do those of jax.numpy that are not jitted (`reshape`, `concatenate`).
    Steps take the array where it lies.

    Jitted functions, as most of jax.numpy and all of `jax.lax`, want `jnp.asarray` first: where jax
    finds out the types of arguments it asks `__jax_array__` no more (0.10), its error says so, and
    there is no public way to make a class known to it. As a pytree the array would be no leaf of
    the state any more.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape, self.dtype = shape, dtype

    @abstractmethod
    def fetch(self) -> np.ndarray:
        """The numbers; waits for the step that makes them.

        Raises:
            RuntimeError: the array was deleted or donated, or the step has failed.
        """

    @abstractmethod
    def check_alive(self) -> None:
        """Raises RuntimeError where the numbers are lost: deleted, donated, their workers gone."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole, once."""
        return self.size * self.dtype.itemsize

    def item(self) -> Any:
        """The number of an array that holds one, as Python's."""
        return self.fetch().item()

    def tolist(self) -> Any:
        """The numbers as Python's, in lists."""
        return self.fetch().tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(f"a {type(self).__name__} is fetched by copying it")
        array = self.fetch()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
        fetched = [it.fetch() if isinstance(it, MeshArray) else it for it in inputs]
        return getattr(function, method)(*fetched, **options)

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.fetch())

    def __getitem__(self, at: Any) -> Any:
        return self.fetch()[at]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.fetch())

    def __float__(self) -> float:
        return float(self.fetch())

    def __int__(self) -> int:
        return int(self.fetch())

    def __index__(self) -> int:
        return self.fetch().__index__()

    def __bool__(self) -> bool:
        return bool(self.fetch())

    def __format__(self, spec: str) -> str:
        return format(self.fetch()[()], spec)

    def __str__(self) -> str:
        return str(self.fetch())
