"""Types of command line arguments that several commands take."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def count_or_auto(text: str) -> int | str:
    """The same, or `auto`."""
    return text if text == "auto" else count(text)


# What argparse calls the type in its messages.
count.__name__ = "whole number"
count_or_auto.__name__ = "whole number or auto"
