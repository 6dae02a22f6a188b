"""PyTorch modules and optimizers as pure functions of JAX, which `alpa.parallelize` plans.

Needs the extra `torch`.
"""

from __future__ import annotations

from importlib.util import find_spec

if _missing := [name for name in ("torch", "torchax") if find_spec(name) is None]:
    raise ModuleNotFoundError(
        f"alpa.torch needs {' and '.join(_missing)}; install the extra: pip install "
        "'alpa-mlir[torch]'",
        name=_missing[0],
    )

from alpa.torch.exporting import ExportError
from alpa.torch.module import ModuleFunction, from_module, to_module
from alpa.torch.optimizer import UpdateFunction, from_optimizer

__all__ = [
    "ExportError",
    "ModuleFunction",
    "UpdateFunction",
    "from_module",
    "from_optimizer",
    "to_module",
]
