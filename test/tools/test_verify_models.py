"""`verify_models`: the numbers of `alpa-plan --verify` as a table."""

from __future__ import annotations

from typing import Any

import pytest

from alpa.tools.verify_models import MODELS, Verified, main

GIB = 2**30


def module(name: str, predicted: int, real: int, sent: tuple[int, int]) -> dict[str, Any]:
    return {
        "name": name,
        "memory": {"predicted": {"peak": predicted}, "real": {"peak": real}},
        "payload_bytes": {"all-gather": {"predicted": sent[0], "real": sent[1]}},
    }


def mesh(predicted: int, compiled: int) -> dict[str, Any]:
    return {
        "name": "mesh",
        "predicted_bytes": predicted,
        "compiled_bytes": compiled,
        "usable_bytes": 14 * GIB,
        "fits": compiled <= 14 * GIB,
    }


def test_numbers_of_a_verified_plan() -> None:
    numbers = {
        "predicted_step_seconds": 2.0,
        "verification": {
            "fits": True,
            "modules": [
                module("a", 109 * GIB, 100 * GIB, (8, 10)),
                module("b", 111 * GIB, 100 * GIB, (12, 10)),
                module("c", 12, 52, (0, 0)),
            ],
            "meshes": [mesh(10 * GIB, 11 * GIB), mesh(13 * GIB, 12 * GIB)],
        },
    }
    found = Verified.read(numbers, rounds=2)
    assert found.fullest == (13 * GIB, 12 * GIB, 14 * GIB)
    assert found.near == 2
    assert found.sent == (20, 20)
    assert (found.step_seconds, found.rounds, found.fits) == (2.0, 2, True)


def test_the_models_need_at_most_a_host() -> None:
    families = {name.partition("-")[0] for name in MODELS}
    assert families == {"gpt", "moe", "wresnet"}
    assert len(MODELS) == 9


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpt-39b"]) == 1
    assert capsys.readouterr().err.startswith("error: no model gpt-39b; there are gpt-350m")
