"""`verify_models`: the numbers of `alpa-plan --verify` as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alpa.runtime.ahead_of_time.compilation import missing_packages
from alpa.tools.verify_models import MODELS, Subject, Verified, main

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


def test_a_model_has_the_papers_defaults() -> None:
    found = Subject.named("gpt-39b", shape=None, num_micro_batches=None)
    assert (found.shape, found.num_micro_batches) == ("8x8", 128)
    assert Subject.named("gpt-39b", shape="4x8", num_micro_batches=64).shape == "4x8"


def test_a_file_is_a_program(tmp_path: Path) -> None:
    file = tmp_path / "step.mlir"
    file.write_text("module {}")
    found = Subject.named(str(file), shape=None, num_micro_batches=None)
    assert (found.name, found.shape, found.num_micro_batches) == ("step", "1x8", 1)
    with found.program() as program:
        assert program == file


def test_an_unknown_program_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpt-1"]) == 1
    assert capsys.readouterr().err.startswith("error: no model and no file gpt-1; pass the path")


PROGRAM = """
func.func public @main(%x: tensor<16x64xf32>, %w: tensor<64x64xf32>) -> tensor<16x64xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<16x64xf32>, tensor<64x64xf32>) -> tensor<16x64xf32>
  return %0 : tensor<16x64xf32>
}
"""


@pytest.mark.skipif(bool(missing_packages()), reason=f"needs {' and '.join(missing_packages())}")
@pytest.mark.slow
def test_a_file_on_two_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The mesh has devices of two hosts; the program is one module."""
    file = tmp_path / "product.mlir"
    file.write_text(PROGRAM)
    cache = tmp_path / "cache"
    command = [str(file), "--gpu", "v100-16gb", "--shape", "2x2", "--verify-cache", str(cache)]
    assert main(command) == 0
    row = capsys.readouterr().out.splitlines()[2]
    assert row.startswith("| product | v100-16gb:2x2 | ")
    assert "| fits | 1 of 1 |" in row
    assert len(list(cache.iterdir())) == 1


def test_a_program_that_cannot_be_planned_is_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.mlir"
    file.write_text("func.func @main( {")
    assert main([str(file), "--gpu", "v100-16gb", "--shape", "1x2"]) == 1
    row = capsys.readouterr().out.splitlines()[2]
    assert row.startswith(f"| broken | v100-16gb:1x2 | error: {file}:1:")
