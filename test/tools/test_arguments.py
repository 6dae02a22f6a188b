from __future__ import annotations

import argparse

import pytest

from alpa.tools.arguments import amount, share


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "-1", "1e999"])
def test_numbers_that_are_not_finite_or_negative(text: str) -> None:
    for kind in (amount, share):
        with pytest.raises(argparse.ArgumentTypeError):
            kind(text)


def test_finite_numbers() -> None:
    assert [amount(text) for text in ("0", "0.5", "1e3")] == [0, 0.5, 1000]
