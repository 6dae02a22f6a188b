"""Eight virtual CPU devices, which have to be asked for before jax starts."""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
