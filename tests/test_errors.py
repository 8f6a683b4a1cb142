"""Errors say what was given, what is needed and what to do."""

from __future__ import annotations

import pytest

from hdnn import errors
from hdnn.errors import HDNNError, MissingExtraError, OptionError


def test_every_error_is_an_HDNNError_which_is_a_ValueError():
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(
            kind, HDNNError if name.endswith("Error") else UserWarning
        )
    assert issubclass(HDNNError, ValueError)


@pytest.mark.parametrize("value", [0, -1, 1.0, "3", True, None])
def test_a_count_is_a_whole_number_of_at_least_one(value):
    with pytest.raises(
        OptionError, match="layers must be a whole number >= 1, but got"
    ):
        errors.positive_int("layers", value)
    assert errors.positive_int("layers", 3) == 3


@pytest.mark.parametrize(
    "value", [0.0, -1, float("nan"), float("inf"), "3", True, None]
)
def test_a_step_is_a_finite_number_above_zero(value):
    with pytest.raises(
        OptionError, match="T must be a finite number > 0, but got"
    ):
        errors.positive_float("T", value)
    assert errors.positive_float("T", 2) == 2.0


def test_an_unknown_name_is_met_with_the_known_ones_and_the_nearest():
    with pytest.raises(
        OptionError, match="'verlte' is not known; choose one of euler, verlet"
    ):
        errors.choose("integrator", "verlte", ["verlet", "euler"])
    with pytest.raises(OptionError, match="Did you mean 'verlet'"):
        errors.choose("integrator", "verlte", ["verlet", "euler"])
    assert errors.choose("integrator", "euler", ["verlet", "euler"]) == "euler"


def test_a_missing_extra_is_named_with_the_command_that_installs_it():
    with pytest.raises(MissingExtraError, match=r"pip install 'hdnn\[plot\]'"):
        errors.require("no_such_package", extra="plot")
