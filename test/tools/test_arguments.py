from __future__ import annotations

import argparse
from importlib import metadata
from typing import Any

import pytest

import alpa as package
from alpa.tools import alpa, alpa_calibrate, alpa_opt, alpa_plan
from alpa.tools.arguments import amount, compiler_option, dimension_size, share


@pytest.mark.parametrize("tool", [alpa, alpa_calibrate, alpa_opt, alpa_plan])
def test_commands_print_the_version(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    version = metadata.version("alpa-mlir")
    with pytest.raises(SystemExit, match=r"^0$"):
        tool.main(["--version"])
    name = tool.__name__.removeprefix("alpa.tools.").replace("_", "-")
    assert capsys.readouterr().out == f"{name} {version}\n"
    assert package.__version__ == version


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "-1", "1e999"])
def test_numbers_that_are_not_finite_or_negative(text: str) -> None:
    for kind in (amount, share):
        with pytest.raises(argparse.ArgumentTypeError):
            kind(text)


def test_finite_numbers() -> None:
    assert [amount(text) for text in ("0", "0.5", "1e3")] == [0, 0.5, 1000]


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("xla_a=false", ("xla_a", False)),
        ("xla_a=True", ("xla_a", True)),
        ("xla_a=2", ("xla_a", 2)),
        ("xla_a=0.5", ("xla_a", 0.5)),
        ("xla_a=", ("xla_a", "")),
        ("xla_a=b=c", ("xla_a", "b=c")),
    ],
)
def test_compiler_options(text: str, option: tuple[str, object]) -> None:
    name, value = compiler_option(text)
    assert (name, value) == option
    assert type(value) is type(option[1])


@pytest.mark.parametrize("text", ["xla_a", "=1", ""])
def test_what_is_no_compiler_option(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not NAME=VALUE"):
        compiler_option(text)


def test_sizes_of_dimensions() -> None:
    assert dimension_size("batch_2=8") == "batch_2=8"
    for text in ("b", "b=", "=8", "2b=8", "b=-8", "b=8,c=2", "b=٣"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not NAME=SIZE, such as b=8"):
            dimension_size(text)
