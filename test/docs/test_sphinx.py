"""The pages become HTML without a warning, and the API reference has every public name."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from pygments.token import Keyword, Name, Punctuation, Token, Whitespace

from test.docs.pages import ROOT, blocks

DOCS = ROOT / "docs"


@pytest.mark.skipif(find_spec("sphinx") is None, reason="needs Sphinx: pip install '.[docs]'")
def test_the_pages_are_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run([*command, DOCS, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'class="highlight-mlir' in (tmp_path / "passes.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["alpa", "alpa.passes", "alpa.runtime", "alpa.torch"])
def test_the_reference_has_every_public_name(name: str) -> None:
    if name == "alpa.torch" and None in map(find_spec, ("torch", "torchax")):
        pytest.skip("needs the extra torch")
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    named = re.findall(rf"^\.\. [\w:]+:: {re.escape(name)}\.(\w+)$", page, re.MULTILINE)
    assert sorted(named) == sorted(import_module(name).__all__)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *DOCS.glob("*.md")], ids=lambda it: it.stem)
def test_links_to_pages_and_files_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", page.read_text(encoding="utf-8"))
    for target, anchor in links:
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


def test_no_page_has_the_name_of_one_that_sphinx_writes() -> None:
    assert not {"search", "genindex", "py-modindex"} & {page.stem for page in DOCS.glob("*.md")}


def test_every_page_is_in_the_table_of_contents() -> None:
    entries = "\n".join(block.text for block in blocks(DOCS / "index.md")).splitlines()
    assert {f"{entry}.md" for entry in entries if entry and entry[0] != ":"} == {
        page.name for page in DOCS.glob("*.md") if page.name != "index.md"
    }


def test_mlir_is_highlighted() -> None:
    sys.path.insert(0, str(DOCS))
    try:
        from mlir_lexer import MlirLexer  # noqa: PLC0415, it is beside Sphinx's settings
    finally:
        sys.path.remove(str(DOCS))
    tokens = MlirLexer().get_tokens("%0 = stablehlo.add %x, @f : tensor<4xf32> … // why")
    kinds = {text: kind for kind, text in tokens if kind is not Whitespace}
    assert kinds["%0"] is Name.Variable
    assert kinds["stablehlo.add"] is Name.Builtin
    assert kinds["@f"] is Name.Function
    assert kinds["tensor"] is Keyword.Type
    assert kinds["<"] is Punctuation
    assert kinds["// why"] is Token.Comment.Single
