"""`alpa.runtime.comparison`: equality, noise, and the order of a report."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from alpa.runtime.comparison import FACTOR, Comparison, Tensor, difference, distance


def tensor(**given: Any) -> Tensor:
    known = {"label": "result", "type": "float32[4]", "difference": 0.0, "bound": 1e-4}
    return Tensor(**{**known, **given})


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        ({"difference": 1e-4}, "equal"),
        ({"difference": 2e-4}, "differs"),
        ({"difference": 2e-4, "perturbed": 2e-4 / FACTOR}, "noise"),
        ({"difference": 2e-4, "reassociated": 2e-4 / FACTOR}, "noise"),
        ({"difference": 2e-4, "perturbed": 1e-6, "reassociated": 1e-7}, "differs"),
        ({"difference": float("inf"), "perturbed": 1.0}, "differs"),
        ({"difference": 0.0, "is_finite": False}, "not finite"),
        ({"difference": float("inf"), "is_finite": False}, "not finite"),
        ({"difference": 1.0, "bound": 0.0, "type": "int32[]"}, "differs"),
    ],
)
def test_verdict(given: dict[str, Any], verdict: str) -> None:
    assert tensor(**given).verdict == verdict


def test_report_shows_faults_first_and_counts_the_rest() -> None:
    equal = [tensor(label=f"equal_{n}", difference=n * 1e-5) for n in range(5)]
    noise = tensor(label="noisy", difference=1.0, perturbed=0.5)
    fault = tensor(label="wrong", difference=2e-4, perturbed=1e-6)
    report = Comparison(reference="plain JAX", tensors=(*equal, noise, fault))
    assert [t.label for t in report.worst(3)] == ["wrong", "noisy", "equal_4"]
    lines = report.table(3).splitlines()
    assert lines[1].split() == [
        *("wrong", "float32[4]", "2.00e-04", "1.00e-04", "1.00e-06", "-", "differs"),
    ]
    assert lines[-1] == "(4 more, none of them worse)"
    assert "5 of 7 results are equal to plain JAX\n" in str(report)
    assert "FAULT: 1 differ" in str(report)
    assert report.is_fault


def test_report_of_noise_is_a_warning() -> None:
    noise = tensor(difference=1.0, perturbed=0.5)
    report = Comparison(reference="plain JAX", tensors=(tensor(), noise))
    assert report.is_noise
    assert not report.is_fault
    assert "\nwarning: 1 differ by no more than" in report.summary()


def test_report_of_a_reference_that_is_not_finite() -> None:
    report = Comparison(reference="plain JAX", tensors=(tensor(label="loss", is_finite=False),))
    assert report.is_fault
    assert "hold NaN or infinity in the reference, too (loss)" in report.summary()


def test_new_state_is_compared_by_its_change() -> None:
    old = np.array([1.0, 2.0], np.float32)
    new = old + np.float32(1e-3)
    assert difference(old, new).error < 1e-4 * 2 * 10
    row = difference(old, new, old=old)
    assert not row.ok
    assert row.bound == pytest.approx(1e-7 + 2 * np.finfo(np.float32).eps, rel=0.01)
    assert difference(new, new, old=old).ok


def test_change_of_a_count_is_exact() -> None:
    row = difference(np.int32(3), np.int32(4), old=np.int32(2))
    assert (row.error, row.bound) == (1.0, 0.0)


@pytest.mark.parametrize("name", ["int2", "uint2", "int4", "uint4"])
def test_change_of_integers_of_few_bits_is_exact(name: str) -> None:
    dtype = getattr(jnp, name)
    old, new = np.array([0, 1, 1], dtype), np.array([1, 0, 1], dtype)
    assert difference(new, new, old=old).ok
    row = difference(old, new, old=new)
    assert (row.error, row.bound, row.ok) == (1.0, 0.0, False)


def test_bound_can_be_that_of_another_type() -> None:
    a, b = np.float32([1.01]), np.float32([1.0])
    assert not difference(a, b).ok
    assert difference(a, b, dtype="bfloat16").ok
    assert not difference(a, b, dtype="bfloat16", relative=1e-9).ok
    assert difference(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)).ok


def test_distance_is_infinite_where_one_side_is_not_a_number() -> None:
    assert distance([np.nan], [1.0]) == float("inf")
    assert distance([np.inf], [np.inf]) == 0
    assert distance([1 + 1j], [1 - 1j]) == 2
    assert distance(np.zeros((0, 3)), np.zeros((0, 3))) == 0
