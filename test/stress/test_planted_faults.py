"""Random programs find mistakes that are planted in their compiled modules."""

from __future__ import annotations

import pytest

from alpa.runtime.executable import Executable
from stress.random_programs.faults import FAULTS
from stress.random_programs.faults import __main__ as tool
from stress.random_programs.faults.planting import Fault, Sound
from stress.random_programs.faults.search import Finding, SoundProgramError, search

SMALL = 22  # a seed: a program in 64 bits, on two meshes, with two micro-batches
ROOMY = 7  # the same, and with sums over two devices of a mesh
ENOUGH = 45  # programs; all faults needed 14, the three from ROOMY on needed one


def by_name(name: str) -> Fault:
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    return fault


@pytest.fixture
def no_fault() -> Fault:
    return Fault(name="none", where="nowhere", plant=Sound.without_fault)


@pytest.mark.slow
def test_three_planted_faults_are_found() -> None:
    chosen = [
        by_name("an all-reduce is dropped"),
        by_name("accumulators are not zeroed"),
        by_name("two devices get each other's tile"),
    ]
    findings = list(search(chosen, range(ROOMY, ROOMY + ENOUGH)))
    assert sorted(finding.fault.name for finding in findings) == sorted(f.name for f in chosen)
    assert [finding.fault.name for finding in findings if finding.seed is None] == []


@pytest.mark.slow
def test_every_planted_fault_is_found() -> None:
    findings = list(search(FAULTS, range(ENOUGH)))
    assert len(findings) == len(FAULTS) >= 20
    assert [finding.fault.name for finding in findings if finding.seed is None] == []


def test_names_tell_the_faults_apart() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_what_is_no_fault_is_not_found(no_fault: Fault) -> None:
    (finding,) = search([no_fault], [SMALL])
    assert finding == Finding(fault=no_fault, programs=1, planted=1)
    assert tool.row(finding) == "| none | nowhere | not in 1 | 1 |  |"


def test_a_fault_that_has_no_place_is_not_planted() -> None:
    nowhere = Fault(name="none", where="nowhere", plant=lambda _: None)
    (finding,) = search([nowhere], [SMALL])
    assert finding == Finding(fault=nowhere, programs=1, planted=0)


def test_a_fault_that_was_not_planted_ends_the_search(
    no_fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsound(sound: Sound) -> Executable:
        faulty = by_name("the first micro-batch is read again").plant(sound)
        assert faulty is not None
        return faulty

    monkeypatch.setattr(Sound, "without_fault", unsound)
    with pytest.raises(SoundProgramError, match=rf"seed {SMALL} fails with no fault planted"):
        list(search([no_fault], [SMALL]))


def test_words_that_no_fault_has_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.main(["--only", "gremlin"])
    said = capsys.readouterr().err
    assert "no fault has 'gremlin' in its name; there are: an all-reduce is dropped, " in said
