"""Options of a pass: from texts to the types of its fields. Errors that are kept."""

from __future__ import annotations

import dataclasses
import traceback
from typing import Any, ClassVar, Literal

import pytest

from alpa.dialects import ir
from alpa.passes.base import OptionError, Pass, Remark, describe_type, fresh, kept, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Everything(Pass):
    """Has an option of each type.

    And more to say.
    """

    name: ClassVar[str] = "everything"
    flag: bool = option(False, "on or off")
    num_layers: int | Literal["auto"] = option("auto", "how many")
    ratio: float = option(0.5, "how much")
    schedule: Literal["gpipe", "1f1b"] = option("gpipe", "which")
    cluster: str = option("", "where")
    limit: float | None = option(None, "at most")

    def run(self, module: ir.Module, remark: Remark) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("flag", "true", True),
        ("flag", "false", False),
        ("num-layers", "8", 8),
        ("num-layers", "auto", "auto"),
        ("ratio", "1e-3", 1e-3),
        ("ratio", "2", 2.0),
        ("schedule", "1f1b", "1f1b"),
        ("cluster", "v100-16gb:8x8", "v100-16gb:8x8"),
        ("limit", "2.5", 2.5),
    ],
)
def test_option_has_the_type_of_its_field(name: str, text: str, value: Any) -> None:
    converted = getattr(Everything.from_options({name: text}), name.replace("-", "_"))
    assert (type(converted), converted) == (type(value), value)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("flag", "yes", "true or false"),
        ("num-layers", "x", "an integer or auto"),
        ("num-layers", "2.5", "an integer or auto"),
        ("ratio", "half", "a number"),
        ("schedule", "pipedream", "gpipe or 1f1b"),
        ("limit", "none", "a number"),
    ],
)
def test_a_value_of_another_type_names_the_expected_type(
    name: str, text: str, expected: str
) -> None:
    with pytest.raises(OptionError) as caught:
        Everything.from_options({name: text})
    assert str(caught.value) == f"option '{name}' is '{text}'; expected {expected}"


@pytest.mark.parametrize("name", ["ratio", "limit"])
@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999"])
def test_numbers_are_finite(name: str, text: str) -> None:
    with pytest.raises(OptionError) as caught:
        Everything.from_options({name: text})
    assert str(caught.value) == f"option '{name}' is '{text}'; expected a finite number"


def test_fields_without_an_option_keep_their_defaults() -> None:
    assert Everything.from_options({}) == Everything()


def test_names_have_dashes_and_the_summary_is_one_line() -> None:
    names = ["flag", "num-layers", "ratio", "schedule", "cluster", "limit"]
    assert list(Everything.options()) == names
    assert Everything.summary() == "Has an option of each type."
    assert describe_type(int | Literal["auto", "off"]) == "an integer or auto or off"


def test_what_was_handled_when_a_kept_error_was_raised_stays_as_it_is() -> None:
    users = own = cause = None
    try:
        raise OSError("the user's own")
    except OSError as error:
        users = error
        try:
            try:
                raise TypeError("the reason")
            except TypeError as reason:
                cause = reason
                raise OptionError("refused") from reason
        except OptionError as refused:
            own = kept(refused)
    assert len(traceback.extract_tb(users.__traceback__)) == 1
    assert own.__traceback__ is own.__context__ is cause.__traceback__ is None
    with pytest.raises(OptionError, match="refused") as caught:
        raise fresh(own)
    assert caught.value is not own
    assert caught.value.__cause__ is cause
    assert own.__traceback__ is None
