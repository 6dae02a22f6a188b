"""Every fenced block of the README and the docs runs, is output, or says why it does not run."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from test.docs.pages import PAGES, Block, blocks, prints_as

SESSION = Path(__file__).parent / "session.py"
LANGUAGES = {"python", "sh", "console", "toml", "mlir", "text", "json", "c", "cmake"}
RUN = [
    page
    for page in PAGES
    if any(_.mark in ("", "slow") and not _.is_directive for _ in blocks(page))
]


def _run(page: Path, folder: Path, *options: str) -> None:
    # A user's shell lacks the variables that JAX and these tests set for themselves.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        [sys.executable, str(SESSION), str(page), *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.fail(done.stderr)


def _skip_without_torch(page: Path) -> None:
    if page.stem == "pytorch" and find_spec("torchax") is None:
        pytest.skip("needs the extra torch")


def _has_slow(page: Path) -> bool:
    return any(block.mark == "slow" for block in blocks(page))


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_do_what_it_says(page: Path, tmp_path: Path) -> None:
    _skip_without_torch(page)
    _run(page, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", [*filter(_has_slow, RUN)], ids=lambda page: page.stem)
def test_the_slow_blocks_of_a_page_do_what_it_says(page: Path, tmp_path: Path) -> None:
    _skip_without_torch(page)
    _run(page, tmp_path, "--slow")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_has_a_language_and_every_mark_a_reason(page: Path) -> None:
    for block in blocks(page):
        assert block.is_directive or block.language in LANGUAGES, block.place
        assert block.mark not in ("not run", "file") or block.note, block.place


def _block(tmp_path: Path, text: str) -> list[Block]:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    return list(blocks(page))


def test_marks_are_read(tmp_path: Path) -> None:
    found = _block(
        tmp_path,
        "<!-- hidden\nx = 1\n-->\n```python\nprint(x)\n```\n<!-- output -->\n```text\n1\n```\n"
        "* item\n\n  <!-- not run: minutes -->\n  ```sh\n  sleep 100\n  ```\n"
        "<!-- slow -->\nText between.\n```sh\ntrue\n```\n",
    )
    assert [(_.language, _.mark, _.note, _.text) for _ in found] == [
        ("python", "", "", "x = 1"),
        ("python", "", "", "print(x)"),
        ("text", "output", "", "1"),
        ("sh", "not run", "minutes", "sleep 100"),
        ("sh", "", "", "true"),
    ]


def test_a_page_that_is_wrong_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n<!-- output -->\n```text\n2\n```\n")
    with pytest.raises(pytest.fail.Exception, match=r"page.md:6: printed was:\n1"):
        _run(page, tmp_path)
    page.write_text("```sh\nfalse\n```\n")
    with pytest.raises(pytest.fail.Exception, match=r"page.md:2: exit status 1"):
        _run(page, tmp_path)


@pytest.mark.parametrize(
    ("example", "printed", "expected"),
    [
        ("a\nb", "a  \nb\n", True),
        ("a\nb", "a\nc\nb\n", False),
        ("a\n...\nb", "a\nc\nd\nb\n", True),
        ("a\n...", "a\nb\n", True),
        ("a … c", "a bb c\n", True),
        ("a … c", "a\nc\n", False),
        ("...\nb", "a\n", False),
    ],
)
def test_output_is_compared(example: str, printed: str, expected: bool) -> None:
    assert prints_as(example, printed) == expected
