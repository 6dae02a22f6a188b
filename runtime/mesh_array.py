"""An array that lies on meshes, as the caller holds it between steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.experimental.hijax import register_hitype
from jax.interpreters.xla import canonicalize_dtype_handlers

from alpa.runtime.pjrt import weakly_typed

_OF_DEVICES = (
    "addressable_data",
    "addressable_shards",
    "device",
    "devices",
    "global_shards",
    "on_device_size_in_bytes",
    "platform",
    "sharding",
    "unsafe_buffer_pointer",
)


LOST = (
    "was donated to a step that was interrupted, and is lost; restore it from a checkpoint "
    "(alpa.resume), or create it again (alpa.create_state)"
)
"""What has become of a state whose step was interrupted."""


def _fetching(name: str, declared: Any) -> Any:
    """Delegates a method or property of `jax.Array` to the fetched array."""
    if isinstance(declared, property):
        return property(lambda self: getattr(self.__jax_array__(), name), doc=declared.__doc__)

    @wraps(declared)
    def method(self: MeshArray, *args: Any, **options: Any) -> Any:
        return getattr(self.__jax_array__(), name)(*args, **options)

    return method


def _needs_devices(name: str) -> property:
    """An attribute that only arrays on devices of this process have."""

    def attribute(self: MeshArray) -> Any:
        if (here := self.here()) is not None:
            return getattr(here, name)
        raise AttributeError(
            f"a {type(self).__name__} {self.aval.str_short()} has no `{name}`: it lies "
            f"{self.where()}, and no sharding of this process describes that; jax.device_put(x) "
            "fetches it into an array that has one"
        )

    return property(attribute)


def _completed(cls: type[MeshArray]) -> type[MeshArray]:
    """Adds the rest of `jax.Array` to a class and registers it with JAX as an argument type."""
    for name in _OF_DEVICES:
        setattr(cls, name, _needs_devices(name))
    for name, declared in vars(jax.Array).items():
        if name not in vars(cls) and (callable(declared) or isinstance(declared, property)):
            setattr(cls, name, _fetching(name, declared))
    # Jitted functions do not call `__jax_array__`. They look up argument types in the first table,
    # and the array to compute with in the second.
    register_hitype(cls, lambda array: array.aval)
    canonicalize_dtype_handlers[cls] = cls.__jax_array__
    return cls


@_completed
class MeshArray(jax.Array):
    """A `jax.Array` that knows its shape and dtype at once and fetches its numbers when needed.

    Functions of JAX and numpy, jitted or not, and its methods and operators fetch the numbers into
    an array on the default device and use that. So do `copy.deepcopy` and pickling: a copy is a
    plain `jax.Array`. Each use fetches again; `jnp.asarray` keeps the numbers. Steps read the array
    where it lies.

    `sharding`, `devices` and similar attributes raise an AttributeError that says where it lies,
    unless it is on devices of this process (`here`).
    """

    # numpy leaves operators to this class, as it does for the arrays of JAX.
    __array_priority__ = 100

    is_lost = False
    """whether it was donated to a step that was interrupted"""

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], weak_type: bool = False
    ) -> None:
        self._shape, self._dtype, self._weak_type = shape, dtype, weak_type

    @abstractmethod
    def fetch(self) -> np.ndarray:
        """Fetches the numbers; waits for the step that makes them.

        Raises:
            RuntimeError: the array was deleted or donated, or the step has failed.
        """

    @abstractmethod
    def check_workers(self) -> None:
        """Raises WorkerError if the workers that hold the numbers are gone."""

    def check_alive(self) -> None:
        """Raises RuntimeError if the array was deleted or donated, or its workers are gone."""
        self.check_workers()
        if self.is_deleted():
            raise self.deleted_error()

    @abstractmethod
    def is_deleted(self) -> bool:
        """Whether the array, or a part of it, was deleted or donated."""

    @abstractmethod
    def where(self) -> str:
        """Where the array lies, for errors: `in the workers of mesh_0`."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    @property
    def aval(self) -> ShapedArray:
        """Its abstract value in JAX."""
        return ShapedArray(self._shape, self._dtype, weak_type=self._weak_type)

    @property
    def weak_type(self) -> bool:
        return self._weak_type

    @property
    def ndim(self) -> int:
        return len(self._shape)

    @property
    def size(self) -> int:
        return int(np.prod(self._shape))

    @property
    def itemsize(self) -> int:
        return self._dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, counted once."""
        return self.size * self.itemsize

    @property
    def committed(self) -> bool:
        """False: computations with it run on the devices of their other arguments."""
        return False

    @property
    def is_fully_addressable(self) -> bool:
        return False

    @property
    def is_fully_replicated(self) -> bool:
        return False

    def here(self) -> jax.Array | None:
        """The array on devices of this process, or None if no sharding there describes it."""
        return None

    def deleted_error(self) -> RuntimeError:
        """JAX's error for the use of a deleted array."""
        if self.is_lost:
            return RuntimeError(
                f"Array has been deleted with shape={self.aval.str_short()}. It {LOST}"
            )
        return RuntimeError(
            f"Array has been deleted with shape={self.aval.str_short()}. It was donated to a step, "
            "or deleted; use the array that the step returned"
        )

    def copy_to_host_async(self) -> None:
        """Does nothing: the numbers are fetched when they are needed."""

    def item(self, *args: int) -> Any:
        return self.fetch().item(*args)

    def tolist(self) -> Any:
        return self.fetch().tolist()

    def tobytes(self, order: Any = "C") -> bytes:
        return self.fetch().tobytes(order)

    def __array__(
        self, dtype: Any = None, context: None = None, copy: bool | None = None
    ) -> np.ndarray:
        if copy is False:
            raise ValueError(f"a {type(self).__name__} is fetched by copying it")
        array = self.fetch()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __jax_array__(self) -> jax.Array:
        if (here := self.here()) is not None:
            return here
        with jax.enable_x64(True):  # 64-bit numbers keep their width
            fetched = jnp.asarray(self.fetch())
        return weakly_typed(fetched) if self._weak_type else fetched

    def __reduce__(self) -> Any:
        return self.__jax_array__().__reduce__()

    def __len__(self) -> int:
        if not self._shape:
            raise TypeError("len() of unsized object")
        return self._shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__jax_array__())

    def __reversed__(self) -> Iterator[Any]:
        return reversed(self.__jax_array__())

    def __float__(self) -> float:
        return float(self.fetch())

    def __int__(self) -> int:
        return int(self.fetch())

    def __complex__(self) -> complex:
        return complex(self.fetch())

    def __index__(self) -> int:
        return self.fetch().__index__()

    def __bool__(self) -> bool:
        return bool(self.fetch())

    def __format__(self, spec: str) -> str:
        return format(self.fetch()[()], spec)

    def __str__(self) -> str:
        return str(self.fetch())

    def __dlpack__(self, **options: Any) -> Any:
        return self.__jax_array__().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        array: Any = self.__jax_array__()
        return array.__dlpack_device__()
