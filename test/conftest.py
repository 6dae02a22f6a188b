"""What all tests share: eight virtual CPU devices, and no deadline per example.

jax reads its environment when it starts, so this stands before any test imports it.
"""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

# The same examples on every run; `--hypothesis-profile=explore` draws new ones.
settings.register_profile("alpa", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("alpa")
