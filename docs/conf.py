"""Sphinx's settings.

    python -m sphinx -W -b html docs build/docs

Pages are Markdown (MyST). GitHub shows them too, so they use no directives but `math`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

from mlir_lexer import MlirLexer

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "Alpa"
html_title = "Alpa"
html_theme = "furo"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
myst_fence_as_directive = ["math"]
# Docstrings are Markdown in spirit: single backticks are code.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# The reference of `alpa.torch` is built without PyTorch.
autodoc_mock_imports = ["torch", "torchax"]


def setup(app: Sphinx) -> None:
    """Teaches Sphinx the language `mlir`."""
    app.add_lexer("mlir", MlirLexer)
