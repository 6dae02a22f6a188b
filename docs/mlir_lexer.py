"""A Pygments lexer for MLIR, as the pages show it: whole modules and excerpts with `…`."""

from __future__ import annotations

from typing import ClassVar

from pygments.lexer import RegexLexer, words
from pygments.token import Comment, Keyword, Name, Number, Operator, Punctuation, String, Text

_KEYWORDS = (
    "module",
    "attributes",
    "public",
    "private",
    "return",
    "call",
    "loc",
    "cond",
    "do",
    "applies",
    "across",
    "init",
    "true",
    "false",
    "unit",
)
_TYPES = ("tensor", "memref", "vector", "tuple", "index", "dense", "array", "affine_map")


class MlirLexer(RegexLexer):
    """Marks ops, values, symbols, types, attributes and literals. Any other text stays as it is."""

    name = "MLIR"
    url = "https://mlir.llvm.org/docs/LangRef"
    aliases: ClassVar[list[str]] = ["mlir"]
    filenames: ClassVar[list[str]] = ["*.mlir"]
    tokens: ClassVar[dict] = {
        "root": [
            (r"//.*", Comment.Single),
            (r'"(\\.|[^"\\\n])*"', String.Double),
            (r"%[\w$.-]+(#\d+)?", Name.Variable),
            (r'@[\w$.-]+|@"[^"\n]*"', Name.Function),
            (r"\^\w+", Name.Label),
            (r"[#!][A-Za-z][\w$.]*", Name.Class),
            (words(_KEYWORDS, prefix=r"\b", suffix=r"\b(?!\.)"), Keyword),
            (words(_TYPES, prefix=r"\b", suffix=r"\b(?=[<(]|\b)"), Keyword.Type),
            (r"\b(x?(bf16|f16|f32|f64|tf32|[su]?i\d+|complex|f8\w+))\b", Keyword.Type),
            (r"\b[a-z_]\w*(\.[\w$]+)+", Name.Builtin),
            (r"-?\b\d+(\.\d*)?([eE][-+]?\d+)?", Number),
            (r"->|::|=", Operator),
            (r"[()\[\]{}<>,:]", Punctuation),
            (r"[A-Za-z_]\w*", Name),
            (r"\s+", Text.Whitespace),
            (r".", Text),
        ]
    }
