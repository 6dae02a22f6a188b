"""The IR vocabulary: upstream dialects, typed `alpa.*` attributes, shardings, meshes, checks.

Private jaxlib IR modules are imported here only.
"""

from __future__ import annotations

from alpa.dialects.bindings import (
    attributes_of,
    body,
    chlo,
    file_position,
    filled,
    format_error,
    func,
    ir,
    is_bytecode,
    is_public,
    main_function,
    make_context,
    mpmd,
    parse,
    parse_file,
    passmanager,
    sdy,
    stablehlo,
    terminator,
    transform,
    walk,
    walk_outside_manual,
)

__all__ = [
    "attributes_of",
    "body",
    "chlo",
    "file_position",
    "filled",
    "format_error",
    "func",
    "ir",
    "is_bytecode",
    "is_public",
    "main_function",
    "make_context",
    "mpmd",
    "parse",
    "parse_file",
    "passmanager",
    "sdy",
    "stablehlo",
    "terminator",
    "transform",
    "walk",
    "walk_outside_manual",
]
