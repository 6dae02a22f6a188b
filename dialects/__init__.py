"""The IR's vocabulary: upstream dialects, typed `alpa.*` attributes, shardings, meshes, checks.

Only this package imports jaxlib's private IR modules.
"""

from __future__ import annotations

from alpa.dialects.bindings import (
    attributes_of,
    body,
    chlo,
    file_position,
    filled,
    func,
    ir,
    is_public,
    main_function,
    make_context,
    mpmd,
    ops_where,
    passmanager,
    sdy,
    stablehlo,
    terminator,
    transform,
    walk,
    walk_outside_manual,
)
from alpa.dialects.portable import write_portable
from alpa.dialects.reading import bytecode, is_bytecode, parse, parse_file, separate

__all__ = [
    "attributes_of",
    "body",
    "bytecode",
    "chlo",
    "file_position",
    "filled",
    "func",
    "ir",
    "is_bytecode",
    "is_public",
    "main_function",
    "make_context",
    "mpmd",
    "ops_where",
    "parse",
    "parse_file",
    "passmanager",
    "sdy",
    "separate",
    "stablehlo",
    "terminator",
    "transform",
    "walk",
    "walk_outside_manual",
    "write_portable",
]
