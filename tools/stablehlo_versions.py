"""Versions of StableHLO as command lines take them."""

from __future__ import annotations

import argparse

from alpa.dialects.portable import is_portable_version, portable_versions


def stablehlo_version(text: str) -> str:
    """A version of portable artifacts, such as 1.0.0; `current` is jaxlib's own."""
    oldest, newest = portable_versions()
    if text == "current":
        return newest
    if not is_portable_version(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a version of StableHLO that this jaxlib writes; it writes {oldest} "
            f"to {newest}"
        )
    return text
